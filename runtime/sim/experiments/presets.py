"""The papers' experiments as scenarios, with the papers' own numbers beside them.

A preset is a few cases, each a scenario. BlockLLM's cluster is always its four servers with twelve A100; what a preset
changes is given in it. At the paper's load of 400 requests in 20 minutes this hardware is almost idle (the paper's
latencies of minutes are those of its prototype), so presets that compare policies use a higher load, and their titles
give it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from runtime.sim.experiments.lending_presets import long_contexts_preset
from runtime.sim.experiments.preset import KEPT_STILL, LOADED, STILL, Case, Preset
from runtime.sim.experiments.scenario import Scenario, scenario_of
from runtime.sim.experiments.slo_presets import classes_preset
from zoo.errors import InputError

#: BlockLLM's own figures (its section 7), as ratios of its method to the other one.
_PAPER_OVERALL = {
    "figure 18, minutes": {
        "median": {"blocks": 3.34, "pm": 3.39, "ps": 3.87},
        "p95 over pm": 0.665,
        "p95 over ps": 0.766,
    },
    "figure 19, throughput": {"over pm": 1.71, "over ps": 1.46},
    "figure 20, utilisation": {"over pm": 1.201, "over ps": 1.048},
    "figure 21, memory over pm, best case": {"weights": 0.839, "kv": 1.241},
}
_PAPER_APPS = {"figure 22, 30 applications, over pm": {"p95": 0.626, "throughput": 1.85}}
_PAPER_TABLE2 = {
    "table 2: minutes, tokens/s, SM share": {
        apps: {"pm": pm, "blocks": blocks}
        for apps, pm, blocks in (
            ("3", [5.4, 6.6, 0.644], [4.6, 8.9, 0.765]),
            ("6", [7.6, 8.2, 0.751], [5.2, 12.3, 0.794]),
            ("9", [14.4, 7.2, 0.766], [9.9, 14.5, 0.853]),
            ("12", [17.6, 6.9, 0.744], [12.4, 15.6, 0.896]),
        )
    }
}
_PAPER_KV = {
    "figure 24, over ours": {
        "recompute": {"p95": 1.23, "communication": 0.36},
        "least-busy": {"p95": 1.36, "communication": 1.28},
    }
}
_PAPER_ACCURACY = {"figure 16": {"mean accuracy": 0.421, "above 7B": 0.035}}
_PAPER_ADAPTIVE = {"figure 23, exact over adaptive": {"p95": 1.156, "throughput": 0.763, "adapted": 136 / 400}}
_PAPER_SPECULATION = {
    "figure 25, over ours": {"off": {"median": 1.113, "p95": 1.316}, "ideal": {"p95": 0.873, "throughput": 1.128}}
}
_PAPER_PLACEMENT = {
    "figure 26, frag-min over ours": {"median": 1.126, "p95": 1.182, "communication": 1.734, "between servers": 3.61}
}
_PAPER_FIGURE7 = {"figure 7": {"compute": 0.629, "between_servers": 0.364}}
#: Eight times the paper's load, two minutes of it.
_PRESSED = {"count": 320, "seconds": 120.0, "after": 60.0}
#: Times the paper's rate: the load at which per-model provisioning has about 67 requests in the system.
_MATCHED = 28


def preset_named(name: str) -> Preset:
    """Return a preset. Raises InputError for an unknown name."""
    if name not in PRESETS:
        raise InputError(f"no preset is called {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]()


def alone(scenario: Scenario) -> Preset:
    """Return a preset of one given scenario."""
    return Preset(scenario.name, scenario.name, (Case("", scenario),))


def _policies(*names: str, **settings: Any) -> dict[str, dict[str, Any]]:
    """Return policies by provisioning: ours as `zoo serve` ships it, the baselines with engines of their own."""
    return {name: {"provision": name, **({} if name == "blocks" else {"engines": {}}), **settings} for name in names}


def _overall() -> Preset:
    """The paper's load, and the one at which per-model provisioning has as many requests in the system as there.

    The paper answers .33 requests a second in 3.39 minutes on average: by Little's law 67 requests are in the system.
    On this hardware a request takes seconds, so at the paper's rate there are two.
    """
    policies = _policies("blocks", "pm", "ps")
    policies["pm, batches"] = {"provision": "pm", "engines": {"run_to_completion": True}}
    policies["pm, our scheduler"] = {"provision": "pm"}
    cases = [
        Case(label, scenario_of("blockllm", {"policies": policies, "asked": {**asked, "after": LOADED}}), x)
        for x, label, asked in (
            (1, "the paper's rate", {"count": 400, "seconds": 1200.0}),
            (_MATCHED, "67 in the system", {"count": 50 * _MATCHED, "seconds": 150.0}),
        )
    ]
    title = "BlockLLM's cluster: 12 A100, 20 applications, at the paper's rate and at its number of requests"
    return Preset("blockllm", title, tuple(cases), "load, times the paper's", _PAPER_OVERALL)


def _load() -> Preset:
    """More and more load, in steps of two, for the greatest one that is sustained, and goodput."""
    cases = []
    for factor in (4, 16, 32, 64, 128):
        asked = {"count": 25 * factor, "seconds": 75.0, "after": LOADED}
        values = {"policies": _policies("blocks", "pm", "ps"), "asked": asked}
        cases.append(Case(f"{factor} x", scenario_of("load", values), factor))
    title = "BlockLLM's cluster, 20 applications, more and more load (1 x: 400 requests in 20 minutes), 75 s of it"
    return Preset("blockllm-load", title, tuple(cases), "load, times the paper's", _PAPER_OVERALL)


def _apps() -> Preset:
    cases = []
    for apps in (10, 20, 30):
        values = {
            "policies": _policies("blocks", "pm", "ps"),
            "apps": {"count": apps},
            "asked": {"count": 40 * apps, "seconds": 150.0, "after": LOADED},
        }
        cases.append(Case(f"{apps} applications", scenario_of("apps", values), apps))
    title = "BlockLLM's cluster, more and more applications, load in proportion: 16 times the paper's per application"
    return Preset("blockllm-apps", title, tuple(cases), "applications", _PAPER_APPS)


def _table2() -> Preset:
    cases = []
    for apps in (3, 6, 9, 12):
        values = {
            "cluster": {"servers": [4]},
            "apps": {"count": apps},
            "asked": {"count": 40 * apps // 3, "seconds": 10.0, "after": LOADED},
            "policies": _policies("blocks", "pm", "ps"),
        }
        cases.append(Case(f"{apps} applications", scenario_of("table2", values), apps))
    return Preset(
        "blockllm-table2",
        "Four A100, 40 requests for every three applications, within ten seconds",
        tuple(cases),
        "applications",
        _PAPER_TABLE2,
    )


def _kv() -> Preset:
    """Figure 24: where a sequence's next tokens run.

    All policies are implemented here, and every device has its whole foundation, so that a sequence can run elsewhere.
    `least-busy` and `recompute` look at loads ten times a second and move at any difference; a row waits at the
    destination until its K and V are there. `blocks` migrates while the sequence keeps running. Scaling is off, so
    nothing else moves sequences.
    """
    base = {"provision": "blocks"}
    often = {"interval_ms": 100, "rebalance_margin": 1, "max_migrations": 256, "scaling": False}
    policies = {
        "blocks": {**base, "control": {"rebalance": "owner", "scaling": False}},
        "recompute": {**base, "control": {"rebalance": "recompute", **often}},
        "least-busy": {**base, "control": {"rebalance": "least-busy", **often}},
        "strict": {**base, "control": {"rebalance": "strict", "scaling": False}},
    }
    cases = []
    for factor, label in ((1, "the paper's rate"), (8, "8 x"), (_MATCHED, "67 in the system")):
        asked = _PRESSED if factor == 8 else {"count": 320, "seconds": 960.0 / factor, "after": LOADED}
        cases.append(Case(label, scenario_of("kv", {"policies": policies, "asked": asked}), factor))
    title = "Where a sequence's next tokens run (Figure 24), at the paper's load and at higher ones"
    differs = {
        "control.rebalance": "the figure compares where sequences go on, and `strict`, which ships, is one of them",
        "control.scaling": "nothing but the compared policies moves sequences",
    }
    return Preset("blockllm-kv", title, tuple(cases), "load, times the paper's", _PAPER_KV, differs)


def _placement() -> Preset:
    """Figure 26: whole chains on near devices, or each block where the least memory is left over.

    `whole` and `scattered` compare the placements alone, without copies by load. `mended`: with locality's moves every
    ten seconds, because the run is a tenth as long as the paper's; `mended, scaled`: with copies by load, too. The cost
    of moves follows from the cluster's links.
    """
    base = {"provision": "blocks"}
    here = {"scaling": False, "rearranging": False}
    moves = {"rearrange_interval_ms": 10_000, "bandwidth": 0.94 * 12.5e9, "crossing_us": 30.0}
    policies = {
        "locality": base,
        "frag-min": {**base, "placement": "frag-min", "control": {"locality": False, "rearranging": False}},
        "whole": {**base, "placement": "on-demand", "control": here},
        "scattered": {**base, "placement": "frag-min", "control": here},
        "mended": {**base, "placement": "frag-min", "control": {"scaling": False, **moves}},
        "mended, scaled": {**base, "placement": "frag-min", "control": moves},
    }
    values = {"policies": policies, "asked": _PRESSED}
    title = "Where blocks are (Figure 26), 8 times the paper's load"
    return Preset("blockllm-placement", title, (Case("", scenario_of("placement", values)),), "", _PAPER_PLACEMENT)


def _adaptive() -> Preset:
    """Figure 23: all requests allow equivalent blocks, or none does.

    Only blocks of equal width without adapters count: those of full fine-tunes and of foundations. Runs at the load of
    the other ablations, and at four times that, where devices are short.
    """
    policies = _policies("blocks", equivalents=True) | {"exact": _policies("blocks")["blocks"]}
    cases = []
    for factor in (8, 32):
        asked = {"count": 50 * factor, "seconds": 150.0, "after": LOADED}
        cases.append(Case(f"{factor} x", scenario_of("adaptive", {"policies": policies, "asked": asked}), factor))
    title = "With equivalent blocks where requests allow them, and without (Figure 23)"
    return Preset("blockllm-adaptive", title, tuple(cases), "load, times the paper's", _PAPER_ADAPTIVE)


def _speculation() -> Preset:
    """Figure 25: predicted hops.

    One copy of everything, cut over all devices, so that chains have hops; nothing moves. Surrogates are as fast (Table
    4) and as often right as the paper's; ideal; or twice as fast, as with half the weights. `exact` emits only the
    chain's own tokens, with the paper's surrogates. `everywhere` predicts every hop that may be, not a tenth of them.
    """
    base = {"provision": "blocks", "placement": "partition", "control": STILL}

    def predicted(mode: str = "similarity", top: float = 0.1, **stand_ins: float) -> dict[str, Any]:
        return {**base, "speculation": {"mode": mode, "top": top}, "stand_ins": stand_ins}

    policies = {
        "blocks": predicted(),
        "off": base,
        "ideal": predicted(speed=50.0, right=1.0),
        "half": predicted(speed=2.0),
        "exact": predicted("exact"),
        "everywhere": predicted(top=1.0),
    }
    cases = []
    for factor in (1, 8, _MATCHED):
        asked = {"count": 160, "seconds": 480.0 / factor, "after": LOADED}
        cases.append(Case(f"{factor} x", scenario_of("speculation", {"policies": policies, "asked": asked}), factor))
    title = "Predicted hops (Figure 25), chains cut over twelve devices, at the paper's load and at higher ones"
    differs = {
        "placement": "whole chains on a device have no hops to predict",
        "speculation.mode": "the figure compares speculation, which ships off",
        **KEPT_STILL,
    }
    return Preset("blockllm-speculation", title, tuple(cases), "load, times the paper's", _PAPER_SPECULATION, differs)


def _accuracy() -> Preset:
    """Figure 16: sizes of LLaMA, the largest one requested, on four devices.

    Twelve devices of this table serve 45 requests a second with the largest model alone. A step may take 40 ms, twice
    what one row of the largest takes. Accuracies are MMLU's as published (LLaMA 13B and 7B, TinyLlama 1.1B); the paper
    gives its mean, and how far that is above its 7B.
    """
    known = {"llama-13b": 0.469, "llama-7b": 0.351, "llama-1.1b": 0.253}
    asked = {"kind": "twitter", "count": 10_000, "seconds": 120.0, "after": LOADED}
    cases = []
    for x, (label, names) in enumerate(
        (("7B alone", ("llama-7b",)), ("13B alone", ("llama-13b",)), ("adaptive", tuple(known)))
    ):
        values = {
            "cluster": {"servers": [4]},
            "apps": {"ladder": names, "accuracy": tuple(known[name] for name in names)},
            "asked": asked,
            "policies": _policies("blocks"),
        }
        cases.append(Case(label, scenario_of("accuracy", values), x))
    title = "Accuracy as the arrival rate changes (Figure 16): a trace like Twitter's, 1 to 45 requests a second"
    return Preset("blockllm-accuracy", title, tuple(cases), "models that may answer", _PAPER_ACCURACY)


def _swap() -> Preset:
    """More models than the devices hold: what leaves, and what sharing blocks saves of the loads."""
    policies = {
        "blocks": {"provision": "blocks"},
        "lru": {"provision": "blocks", "eviction": "lru"},
        "whole models": {"provision": "pm"},
        "pm": {"provision": "pm", "engines": {}},
    }
    asked = {"kind": "poisson", "count": 300, "seconds": 300.0, "popularity": "skewed", "after": LOADED}
    values = {"cluster": {"servers": [2]}, "apps": {"count": 30}, "asked": asked, "policies": policies}
    title = "Two A100 and 30 applications, one request a second, skewed: blocks come and go"
    return Preset("blockllm-swap", title, (Case("", scenario_of("swap", values)),))


def _figure7() -> Preset:
    """Figure 7: LLaMA-7B cut over three devices on two servers, a batch of 32 requests of 512 tokens on average.

    All come at once and grow from 8 tokens to 1016, so that they stay one batch. A token takes one hop inside a server
    and one between servers. The paper says neither how often a batch crosses servers nor what a hop carries. If a hop
    carries the whole context (134 MB), one hop takes about as long as computing, and both of the paper's shares and
    the rest follow. With the new token's hidden states (256 kB) it would take over a hundred hops; with K and V (8.6
    GB) one hop would take .7 s.
    """
    policy = {"provision": "blocks", "parts": 3, "placement": "partition", "control": STILL, "page_layers": 32}
    asked = {"kind": "poisson", "count": 32, "seconds": 1e-12, "prompts": "8", "answers": "1008", "after": 30.0}
    cases = []
    for x, hops in enumerate(("context", "new")):
        values = {
            "cluster": {"servers": [2, 1], "hops": hops},
            "apps": {"ladder": ["llama-7b"], "accuracy": [1.0]},
            "asked": asked,
            "policies": {"blocks": policy},
        }
        cases.append(Case(hops, scenario_of("figure7", values), x))
    title = "The latency of a token by part (Figure 7): LLaMA-7B over two servers, 32 requests of 512 tokens"
    differs = {"placement": "the figure's model is cut over servers", **KEPT_STILL}
    return Preset("blockllm-figure7", title, tuple(cases), "what a hop carries", _PAPER_FIGURE7, differs)


def _scale() -> Preset:
    """Use strides of 64 tokens, and pages of 128 tokens for all layers.

    That means fewer events and smaller page tables for the same decisions.
    """
    lengths = "lognormal:128,0.8<=512"
    values = {
        "cluster": {"servers": [4] * 250},
        "apps": {"count": 10, "foundations": ["llama-7b"]},
        "asked": {
            "kind": "poisson",
            "count": 1_000_000,
            "seconds": 500.0,
            "prompts": lengths,
            "answers": lengths,
            "after": LOADED,
        },
        "policies": {
            "blocks": {
                "parts": 1,
                "stride": 64,
                "strides": True,
                "page_layers": 64,
                "page_tokens": 128,
                "prefill_chunk": 512,
                "placement": "replicate",
                "routing": "least-loaded",
                "control": STILL,
                "prefix_caching": "off",  # prompts share no prefixes on purpose, and lookups cost a third of the time
            }
        },
        "pace": {"tick": 10**10, "report": 10**10},
    }
    fewer = "fewer events for the same decisions"
    differs = {
        "stride": fewer,
        "prefill_chunk": fewer,
        "placement": "every device can run every model at once",
        "routing": "devices that all hold the same differ by their sequences; counting bytes takes longer",
        "prefix_caching": "prompts share nothing on purpose",
        **KEPT_STILL,
    }
    case = Case("", scenario_of("scale", values))
    return Preset("scale", "A million requests on a thousand A100", (case,), differs=differs)


def _full() -> Preset:
    """Measure what scheduling a step costs with the most sequences that a device runs, decided token by token."""
    values = {
        "cluster": {"servers": [1]},
        "apps": {"count": 10, "foundations": ["llama-7b"]},
        "asked": {"kind": "poisson", "count": 1024, "seconds": 1.0, "prompts": "32", "answers": "256"},
        "policies": {
            "blocks": {"stride": 1, "parts": 1, "page_layers": 32, "placement": "replicate", "control": STILL}
        },
    }
    differs = {"stride": "every token is decided by the scheduler", "placement": "all is there at once", **KEPT_STILL}
    case = Case("", scenario_of("full-device", values))
    return Preset("full-device", "One A100 with 256 sequences at a time", (case,), differs=differs)


PRESETS: Mapping[str, Callable[[], Preset]] = {
    "blockllm": _overall,
    "blockllm-load": _load,
    "blockllm-apps": _apps,
    "blockllm-table2": _table2,
    "blockllm-kv": _kv,
    "blockllm-placement": _placement,
    "blockllm-adaptive": _adaptive,
    "blockllm-speculation": _speculation,
    "blockllm-accuracy": _accuracy,
    "blockllm-swap": _swap,
    "blockllm-figure7": _figure7,
    "qlm-classes": classes_preset,
    "infinite": long_contexts_preset,
    "scale": _scale,
    "full-device": _full,
}
