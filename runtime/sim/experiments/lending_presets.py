"""Presets of contexts that are longer than a device (Infinite-LLM)."""

from __future__ import annotations

from runtime.sim.experiments.preset import KEPT_STILL, LOADED, STILL, Case, Preset
from runtime.sim.experiments.scenario import scenario_of

#: Longest context of normal requests, in tokens: about what an A100 holds beside LLaMA2-7B.
_NORMAL = 100_000


def long_contexts_preset() -> Preset:
    """Requests of which a part is longer than a device: with loans, and refused (Infinite-LLM, Table 2).

    Long requests have up to twice the tokens of normal ones; here 40 requests, of the paper's 1,000. All datasets are
    in `benchmarks.simulated.infinite`.
    """
    base = {
        "provision": "blocks", "parts": 1, "page_layers": 32, "page_tokens": 256, "max_model_len": 2 * _NORMAL,
        "placement": "replicate", "prefix_caching": "off", "stride": 1, "prefill_chunk": 2048,
        "max_num_batched_tokens": 2304, "control": STILL,
    }  # fmt: skip
    policies = {
        "blocks": {**base, "lending": {"mode": "planned", "cap": 1.0}},
        "refused": base,
    }
    cases = []
    for x, share in enumerate((0.1, 0.3)):
        values = {
            "cluster": {"servers": [2], "weights": 0.95},
            "apps": {"count": 1, "foundations": ["llama-7b"]},
            "asked": {
                "kind": "poisson", "count": 40, "seconds": 800.0, "answers": "uniform:1-256", "longest": 2 * _NORMAL,
                "after": LOADED,
            },
            "classes": {
                "normal": {"share": 1 - share, "prompts": f"uniform:1-{_NORMAL}"},
                "long": {"share": share, "prompts": f"uniform:{_NORMAL}-{2 * _NORMAL}"},
            },
            "policies": policies,
        }  # fmt: skip
        cases.append(Case(f"{share:.0%} long", scenario_of("long-contexts", values), x))
    fewer = "fewer events for the same decisions"
    differs = {
        "placement": "every device can run the model at once",
        "stride": "engines that lend launch no steps ahead",
        "prefill_chunk": fewer,
        "max_num_batched_tokens": "a chunk and all decoding rows are one step",
        "prefix_caching": "prompts share nothing on purpose",
        "lending.mode": "the figure compares loans with none, which ship",
        "lending.cap": "the longest requests need all of both devices",
        **KEPT_STILL,
    }
    title = "Two A100 and LLaMA2-7B: contexts longer than a device, with loans and without"
    paper = {"figure 7, longest context over that of one instance": {"2 A100": 2, "32 A100": 19}}
    return Preset("infinite", title, tuple(cases), "long requests", paper, differs)
