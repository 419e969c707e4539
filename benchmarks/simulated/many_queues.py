"""Compare orders of requests for more models than fit in the simulator: QLM's experiments (sections 8.1 to 8.3).

    python -m benchmarks.simulated.many_queues WHAT [--seeds 3] [--requests 300] [--devices 8] [--policy NAME]…
        [--case LABEL]… [--output FILE]

WHAT:

- `interactive`: the share of interactive requests from 1 to 50 % (Figure 10); with one model, Figure 13.
- `parts`: each operation of `qlm` left out at 5 % interactive requests (Figure 10, ablation).
- `mega`: one model; some requests have prompts and answers that take a large part of a device's K and V (Figure 16).
- `bursts`: the same requests in less time, so that queues get longer (Figure 16).
- `mixed`: A10 beside A100, with one model of 7B; `turns` assigns groups to devices in turn (Figure 16).
- `slo`: objectives from 1 to 11 times as long (Figure 20).

A100 of 80 GB, each in a server with a disk of its own, with room for the weights of two 7B models or one of 13B; three
times as many whole models as devices, one of three of 13B, popularity by Zipf's law. `fcfs` is vLLM's order: a strict
queue. `--requests` for each device come within a minute: faster than any side answers, since the paper's gains are
those of long queues. Objectives: 30 s for interactive requests, as in the paper; five minutes for the others.

Printed per case, policy and seed: requests per second until the last one ended, and until nine tenths have; attainment
of interactive and of all requests; loads; errors. Virtual time: the same seeds give the same figures on any machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.reports import deliver
from runtime.sim.experiments.preset import LOADED, STILL
from runtime.sim.experiments.run import play
from runtime.sim.experiments.scenario import Scenario, scenario_of
from runtime.sim.results.report import classes_of, document_of

ORDERS: Mapping[str, Mapping[str, Any]] = {
    "qlm": {"plan": "qlm"},
    "edf": {"plan": "edf"},
    "edf, strict": {"plan": "edf", "strict": True},
    "fcfs": {"plan": "fcfs"},
}
#: `qlm` without one of its operations.
PARTS: Mapping[str, Mapping[str, Any]] = {
    "qlm": {"plan": "qlm"},
    "no eviction": {"plan": "qlm", "evict": False},
    "no load balance": {"plan": "qlm", "cells": False},
    "no run floor": {"plan": "qlm", "run_floor": 0.0},
    "whole steps": {"plan": "qlm", "cap_batches": False},
    "insertion alone": {"plan": "qlm", "plan_rounds": 0},
    "no plans, no eviction": {"plan": "edf"},
    "strict queue": {"plan": "fcfs"},
}
#: Orders with other ways to assign groups to devices.
ASSIGNED: Mapping[str, Mapping[str, Any]] = {
    "qlm": {"plan": "qlm"},
    "turns": {"plan": "qlm", "assign": "turns"},
    "edf": {"plan": "edf"},
    "fcfs": {"plan": "fcfs"},
}
#: Kinds of devices, which come in turn.
MIXES: Mapping[str, tuple[str, ...]] = {
    "A100 alone": ("A100-80GB",),
    "one A10 of four": ("A100-80GB", "A100-80GB", "A100-80GB", "A10"),
    "one A10 of two": ("A100-80GB", "A10"),
    "A10 alone": ("A10",),
}
_INTERACTIVE_MS, _BATCH_MS = 30_000, 300_000
_RATES = ("requests_per_second", "until_nine_tenths")


def scenario(
    orders: Mapping[str, Mapping[str, Any]], given: argparse.Namespace, share: float = 0.05, seconds: float = 60.0,
    scale: float = 1.0, mega: float = 0.0, models: int | None = None, host_cache: int = 100_000_000_000,
    gpus: tuple[str, ...] = (),
) -> Scenario:  # fmt: skip
    """Return the scenario of a case; `mega`: share of the requests that are long."""
    base = {"provision": "pm", "control": STILL, "max_num_seqs": 64}
    rest = 1.0 - share - mega
    classes = {
        "interactive": {"share": share, "slo_ms": round(_INTERACTIVE_MS * scale)},
        "batch": {"share": rest, "slo_ms": round(_BATCH_MS * scale)},
    }
    if mega:
        classes["mega"] = {
            "share": mega, "slo_ms": round(_BATCH_MS * scale), "prompts": "uniform:6000-8000", "answers": "512",
        }  # fmt: skip
    return scenario_of(
        "many-queues",
        {
            "cluster": {
                "servers": [1] * given.devices, "weights": 0.65 if gpus else 0.42, "host_cache": host_cache,
                "gpus": list(gpus),
            },
            "apps": {
                "count": models or 3 * given.devices,
                "foundations": ["llama-7b"] if gpus else ["llama-13b"] if models == 1
                else ["llama-7b", "llama-7b", "llama-13b"],
            },
            "asked": {
                "kind": "poisson", "count": given.requests * given.devices, "seconds": seconds,
                "prompts": "uniform:32-512",
                "answers": "uniform:32-384", "popularity": "skewed", "after": LOADED, "longest": 9000,
            },
            "classes": classes,
            "policies": {name: {**base, "order": order} for name, order in orders.items()},
        },
    )  # fmt: skip


def cases(what: str, given: argparse.Namespace) -> Iterator[tuple[str, Scenario]]:
    """Yield the cases with their labels."""
    if what == "interactive":
        for share in (0.01, 0.05, 0.2, 0.5):
            yield f"{share:.0%} interactive", scenario(ORDERS, given, share)
        for share in (0.05, 0.2):
            yield f"one model, {share:.0%} interactive", scenario(ORDERS, given, share, models=1)
    elif what == "parts":
        yield "all models", scenario(PARTS, given)
        yield "no warm start", scenario({"qlm": PARTS["qlm"]}, given, host_cache=0)
    elif what == "mega":
        for share in (0.01, 0.05, 0.2):
            yield f"{share:.0%} mega prompts", scenario(ASSIGNED, given, mega=share, models=1)
    elif what == "bursts":
        for seconds in (480.0, 240.0, 120.0, 60.0):
            yield f"within {seconds:.0f} s", scenario(ORDERS, given, seconds=seconds)
    elif what == "mixed":
        for name, gpus in MIXES.items():
            yield name, scenario(ASSIGNED, given, models=1, gpus=gpus)
    else:
        for scale in (1.0, 3.0, 5.0, 11.0):
            yield f"objectives x {scale:.0f}", scenario(ORDERS, given, scale=scale)


def run(scenario: Scenario, policy: str, seed: int) -> dict[str, float]:
    """Return the figures of one run."""
    demand = scenario.demand(seed)
    played = play(scenario, policy, demand)
    document = document_of(played)
    classes = classes_of(played, demand)["classes"]
    met = sum(each.get("met", 0.0) * each["requests"] for each in classes.values())
    ended = sorted(each for each in played.ledger.ended if each)
    most = ended[: round(0.9 * len(ended))]
    return {
        "requests_per_second": document["completed"] / document["virtual_seconds"],
        "until_nine_tenths": len(most) / max((most[-1] - min(played.ledger.arrived)) / 1e9, 1e-9),
        "interactive": classes["interactive"].get("met", 0.0),
        "all": met / sum(each["requests"] for each in classes.values()),
        "loads": document["loads"]["count"],
        "errors": sum(document["errors"].values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("interactive", "parts", "mega", "bursts", "mixed", "slo"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=300, help="for each device")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--case", action="append", help="the beginning of a case's label")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for label, made in cases(given.what, given):
        if given.case and not label.startswith(tuple(given.case)):
            continue
        for name in made.policies:
            if given.policy and name not in given.policy:
                continue
            runs = found.setdefault(label, {}).setdefault(name, [])
            for seed in range(given.seeds):
                runs.append(run(made, name, seed))
                print(f"| {label} | {name} | {seed} | " + _cells(runs[-1]) + " |", flush=True)
    deliver({"experiment": given.what, "requests": given.requests, "devices": given.devices, "runs": found},
            given.output)  # fmt: skip


def _cells(row: Mapping[str, float]) -> str:
    return " | ".join(
        f"{row[name]:.2f}" if name in _RATES else f"{row[name]:.0%}" if name in ("interactive", "all")
        else f"{row[name]:.0f}"
        for name in (*_RATES, "interactive", "all", "loads", "errors")
    )  # fmt: skip


if __name__ == "__main__":
    main()
