"""Compare orders of requests for more models than fit in the simulator: QLM's experiments (sections 8.1 to 8.3).

    python -m benchmarks.simulated.many_queues WHAT [--seed 0]... [--requests 300] [--devices 4] [--policy NAME]...
        [--case LABEL]... [--output FILE]

WHAT, with the scenarios of `queue_cases`:

- `interactive`: the share of interactive requests from 1 to 50 % (Figure 10); with one model, Figure 13.
- `parts`: each operation of `qlm` left out at 5 % interactive requests (Figures 10 and 13, ablations).
- `long`: the same with answers that take much longer than the objective of interactive requests, `--requests 60`.
- `equals`: requests of one objective with answers of very different length, `--requests 120`.
- `turns`: three models of 13B for each device, of which one fits, with interactive requests alone, `--requests 60`.
- `mega`: one model; some requests have prompts and answers that take a large part of a device's K and V (Figure 16).
- `bursts`: the same requests in less time, so that queues get longer (Figure 16).
- `mixed`: A10 beside A100, with one model of 7B; `one speed` takes them to be equally fast, `turns` assigns groups to
  devices in turn (Figure 16).
- `slo`: objectives from 1 to 11 times as long (Figure 20).

`fcfs` is vLLM's order: a strict queue. By default `--requests` for each device come within a minute: faster than any
side answers, since the paper's gains are those of long queues.

Printed per case, policy and seed: requests per second until the last one ended, and until nine tenths have; attainment
of interactive and of all requests; the 90th percentile of the interactive ones' latency in seconds, and the mean and
the longest latency of all; loads; requests that gave way to urgent ones, and all that gave way; tokens of these that
were computed again, and that came back from host memory; errors. Virtual time: the same seeds give the same figures on
any machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reports import deliver
from benchmarks.simulated.queue_cases import EXPERIMENTS, cases
from runtime.sim.experiments.run import play
from runtime.sim.experiments.scenario import Scenario
from runtime.sim.results.report import classes_of, document_of

_SHOWN: Mapping[str, Callable[[float], str]] = {
    "requests_per_second": "{:.2f}".format,
    "until_nine_tenths": "{:.2f}".format,
    "interactive": "{:.0%}".format,
    "all": "{:.0%}".format,
    "interactive_p90_s": "{:.1f}".format,
    "mean_s": "{:.1f}".format,
    "longest_s": "{:.1f}".format,
    "loads": "{:.0f}".format,
    "evictions": "{:.0f}".format,
    "preemptions": "{:.0f}".format,
    "recomputed": "{:.0f}".format,
    "swapped": "{:.0f}".format,
    "errors": "{:.0f}".format,
}


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
        "interactive_p90_s": _p90(played.ledger.arrived, played.ledger.ended, demand.kind == 0),
        "mean_s": document["latency"]["mean"],
        "longest_s": document["latency"]["max"],
        "loads": document["loads"]["count"],
        "evictions": document["counts"]["evictions"],
        "preemptions": document["counts"]["preemptions"],
        "recomputed": document["counts"]["resumed_tokens"],
        "swapped": document["counts"]["swapped_tokens"],
        "errors": sum(document["errors"].values()),
    }


def _p90(arrived: Sequence[int], ended: Sequence[int], mine: Any) -> float:
    """Return the 90th percentile of the latencies of some requests, in seconds."""
    took = (np.array(ended, dtype=np.int64) - np.array(arrived, dtype=np.int64))[mine]
    return float(np.percentile(took[took > 0], 90) / 1e9) if (took > 0).any() else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=EXPERIMENTS)
    parser.add_argument("--seed", type=int, action="append", help="may be given again; default: 0")
    parser.add_argument("--requests", type=int, default=300, help="for each device")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--case", action="append", help="the beginning of a case's label")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    print("| case | policy | seed | " + " | ".join(_SHOWN) + " |\n" + "|---" * (3 + len(_SHOWN)) + "|")
    for label, made in cases(given.what, given.requests, given.devices):
        if given.case and not label.startswith(tuple(given.case)):
            continue
        for name in made.policies:
            if given.policy and name not in given.policy:
                continue
            runs = found.setdefault(label, {}).setdefault(name, [])
            for seed in given.seed or [0]:
                runs.append(run(made, name, seed))
                cells = " | ".join(show(runs[-1][key]) for key, show in _SHOWN.items())
                print(f"| {label} | {name} | {seed} | {cells} |", flush=True)
    deliver({"experiment": given.what, "requests": given.requests, "devices": given.devices, "runs": found},
            given.output)  # fmt: skip


if __name__ == "__main__":
    main()
