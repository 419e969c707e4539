"""Scenarios of `benchmarks.simulated.many_queues`: orders of requests, QLM's operations left out, and its workloads.

A100 of 80 GB, each in a server with a disk of its own, with room for the weights of two 7B models or one of 13B, and 32
GB of host memory for K and V. Workload A: three times as many whole models as devices, one of three of 13B, popularity
by Zipf's law. Workload B: one model of 13B. Workload C: B with mega prompts. Objectives: 30 s for interactive requests,
as in the paper; five minutes for the others. Long answers: B with 8 places and answers that take much longer than an
objective of 4.5 s, so that few places get free by themselves within it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runtime.sim.experiments.preset import LOADED, STILL
from runtime.sim.experiments.scenario import Scenario, scenario_of

#: Limit of the order by length among equals.
_AGING_MS = 120_000
#: Values of a policy by its name.
Policies = Mapping[str, Mapping[str, Any]]


def _order(plan: str, **settings: Any) -> Mapping[str, Any]:
    return {"order": {"plan": plan, **settings}}


#: The paper's baselines are the strict orders: what does not fit holds back all later requests for its devices.
ORDERS: Policies = {
    "qlm": _order("qlm"),
    "edf": _order("edf"),
    "edf, strict": _order("edf", strict=True),
    "fcfs": _order("fcfs"),
}
#: `qlm` without one of the paper's operations, with models read ahead, with the paper's swap of one model for another,
#: then without one of its other parts.
PARTS: Policies = {
    "qlm": _order("qlm"),
    "pulled by arrival": _order("fcfs"),
    "no eviction": _order("qlm", evict=False),
    "no state swap": {**_order("qlm"), "preemption_mode": "recompute"},
    "no groups of a model": _order("edf"),
    "no load balance": _order("qlm", assign="turns"),
    "one queue": _order("qlm", cells=False),
    "read-ahead": _order("qlm", read_ahead=True),
    "one model at a time": _order("qlm", exclusive=True),
    "no run floor": _order("qlm", run_floor=0.0),
    "drains not filled": _order("qlm", fill_drains=False),
    "planned under overload": _order("qlm", overload="queue"),
    "whole steps": _order("qlm", cap_batches=False),
    "insertion alone": _order("qlm", plan_rounds=0),
}
#: Orders with other ways to assign groups to devices; `one speed`: as if all were equally fast.
ASSIGNED: Policies = {
    "qlm": _order("qlm"),
    "one speed": _order("qlm", speeds=False),
    "turns": _order("qlm", assign="turns"),
    "edf": _order("edf"),
    "fcfs": _order("fcfs"),
}
#: Orders among equals.
EQUALS: Policies = {
    "qlm": _order("qlm"),
    "short first": _order("qlm", short_first_ms=_AGING_MS),
    "edf": _order("edf"),
    "edf, short first": _order("edf", short_first_ms=_AGING_MS),
}
#: Orders of models of which one fits, all of them with interactive requests.
TURNS: Policies = {
    "qlm": _order("qlm"),
    "turns of 5 s": _order("qlm", turn_ms=5_000),
    "turns of 15 s": _order("qlm", turn_ms=15_000),
    "no eviction": _order("qlm", evict=False),
    "no run floor": _order("qlm", run_floor=0.0),
    "edf": _order("edf"),
    "fcfs": _order("fcfs"),
}
#: Kinds of devices, which come in turn.
MIXES: Mapping[str, tuple[str, ...]] = {
    "A100 alone": ("A100-80GB",),
    "one A10 of four": ("A100-80GB", "A100-80GB", "A100-80GB", "A10"),
    "one A10 of two": ("A100-80GB", "A10"),
    "A10 alone": ("A10",),
}
#: What is varied, by the name of the experiment.
EXPERIMENTS = ("interactive", "parts", "long", "equals", "turns", "mega", "bursts", "mixed", "slo")
_INTERACTIVE_MS, _BATCH_MS = 30_000, 300_000
#: Of long answers: objectives, places, and the classes' other settings.
_LONG_MS, _LONG_BATCH_MS, _LONG_PLACES = 4_500, 1_200_000, 8
_LONG: Mapping[str, Mapping[str, Any]] = {
    "interactive": {"share": 0.1, "slo_ms": _LONG_MS, "answers": "uniform:32-128"},
    "batch": {"share": 0.9, "slo_ms": _LONG_BATCH_MS, "answers": "uniform:1000-3000"},
}
#: Of equals: lengths of answers with a heavy tail.
_EQUAL: Mapping[str, Mapping[str, Any]] = {
    "interactive": {"share": 0.5, "answers": "uniform:16-64"},
    "middle": {"share": 0.4, "answers": "uniform:200-600"},
    "batch": {"share": 0.1, "answers": "uniform:1500-3000"},
}
#: Of models in turns.
_TURNS: Mapping[str, Any] = {"answers": "uniform:200-600"}
#: Tokens of a prompt and its answer, at most.
_LONGEST = 9000


def scenario(
    policies: Policies, requests: int, devices: int, share: float = 0.05, seconds: float = 60.0, scale: float = 1.0,
    mega: float = 0.0, models: int | None = None, host_cache: int = 100_000_000_000, gpus: tuple[str, ...] = (),
    long: bool = False, equal_ms: int | None = None, turns_ms: tuple[int, int] | None = None,
) -> Scenario:  # fmt: skip
    """Return the scenario of a case.

    Args:
        requests: For each device, within `seconds`.
        share: Of interactive requests; `mega`: of long ones, which are none of these.
        scale: Factor of all objectives.
        models: How many; by default three for each device.
        gpus: Kinds of devices, which then run a model of 7B each.
        long: Whether answers are long, instead of `share`, `scale` and `mega`.
        equal_ms: The objective of all requests, half of which have short answers, a few very long ones; 0: none. With
            few places, instead of the same; None: otherwise.
        turns_ms: The objective of all requests, of their whole answers or else of their first tokens, with answers that
            take several times as long as a load, and models of 13B alone.
    """
    base: dict[str, Any] = {"provision": "pm", "control": STILL, "max_num_seqs": 64, "host_memory_bytes": 32 * 10**9}
    classes = {
        "interactive": {"share": share, "slo_ms": round(_INTERACTIVE_MS * scale)},
        "batch": {"share": 1.0 - share - mega, "slo_ms": round(_BATCH_MS * scale)},
    }
    if long:
        base["max_num_seqs"], classes = _LONG_PLACES, {name: dict(each) for name, each in _LONG.items()}
    if equal_ms is not None:
        base["max_num_seqs"] = _LONG_PLACES
        classes = {name: {"slo_ms": equal_ms, **each} for name, each in _EQUAL.items()}
    if turns_ms is not None:
        classes = {"interactive": {"share": 1.0, "slo_ms": turns_ms[0], "ttft_slo_ms": turns_ms[1], **_TURNS}}
    if mega or long or equal_ms is not None:
        base["max_model_len"] = _LONGEST
    if mega:
        classes["mega"] = {
            "share": mega, "slo_ms": round(_BATCH_MS * scale), "prompts": "uniform:6000-8000", "answers": "512",
        }  # fmt: skip
    foundations = (
        ["llama-7b"]
        if gpus
        else ["llama-13b"]
        if models == 1 or turns_ms is not None
        else ["llama-7b", "llama-7b", "llama-13b"]
    )
    return scenario_of(
        "many-queues",
        {
            "cluster": {
                "servers": [1] * devices, "weights": 0.65 if gpus else 0.42, "host_cache": host_cache,
                "gpus": list(gpus),
            },
            "apps": {"count": models or 3 * devices, "foundations": foundations},
            "asked": {
                "kind": "poisson", "count": requests * devices, "seconds": seconds, "prompts": "uniform:32-512",
                "answers": "uniform:32-384", "popularity": "skewed", "after": LOADED, "longest": _LONGEST,
            },
            "classes": classes,
            "policies": {name: {**base, **policy} for name, policy in policies.items()},
        },
    )  # fmt: skip


def cases(what: str, requests: int, devices: int) -> Iterator[tuple[str, Scenario]]:
    """Yield the cases of an experiment with their labels; `requests`: for each device."""

    def made(policies: Policies, **settings: Any) -> Scenario:
        return scenario(policies, requests, devices, **settings)

    if what == "interactive":
        for share in (0.01, 0.05, 0.2, 0.5):
            yield f"{share:.0%} interactive", made(ORDERS, share=share)
        for share in (0.05, 0.2):
            yield f"one model, {share:.0%} interactive", made(ORDERS, share=share, models=1)
    elif what == "parts":
        yield "all models", made(PARTS)
        yield "all models, no warm start", made({"qlm": PARTS["qlm"]}, host_cache=0)
        yield "one model", made(PARTS, models=1)
        yield "one model, objectives x 0.2", made(PARTS, models=1, scale=0.2)
    elif what == "long":
        yield "one model, long answers", made(PARTS, models=1, long=True)
    elif what == "equals":
        for seconds in (600, 120, 0):
            made_of = made(EQUALS, models=1, equal_ms=1000 * seconds)
            yield f"one model, {f'objectives of {seconds} s' if seconds else 'no objectives'}", made_of
        yield "all models, objectives of 600 s", made(EQUALS, equal_ms=600_000)
    elif what == "turns":
        for seconds in (10, 20):
            yield f"first tokens within {seconds} s", made(TURNS, seconds=240.0, turns_ms=(0, 1000 * seconds))
        yield "answers within 40 s", made(TURNS, seconds=240.0, turns_ms=(40_000, 0))
    elif what == "mega":
        for share in (0.01, 0.05, 0.2):
            yield f"{share:.0%} mega prompts", made(ASSIGNED, mega=share, models=1)
    elif what == "bursts":
        for seconds in (480.0, 240.0, 120.0, 60.0):
            yield f"within {seconds:.0f} s", made(ORDERS, seconds=seconds)
    elif what == "mixed":
        for name, gpus in MIXES.items():
            yield name, made(ASSIGNED, models=1, gpus=gpus)
    else:
        for scale in (1.0, 3.0, 5.0, 11.0):
            yield f"objectives x {scale:.0f}", made(ORDERS, scale=scale)
