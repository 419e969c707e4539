"""Run Infinite-LLM's Figure 10: throughput over time, with circles of debts resolved and without (IL-19 to IL-24).

    python -m benchmarks.simulated.infinite.over_time [--requests 120] [--long 0.1] [--parts 6] [--seeds 1]

LLaMA2-13B on four instances of two A100; contexts of up to 480,000 tokens, all requests at once. Of each part of the
time until nine tenths of all tokens are done: tokens of the contexts that end in it, per second. `circles`: circles
that were found; `again`: tokens that run again, as a share of all. Plain recalls and returns to debtors are off in the
first two policies, as in the paper's experiment; `all` has them on, as they ship. Virtual time.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.simulated.infinite.setups import SETUPS, START, dataset
from runtime.sim.experiments.run import play

SETUP = SETUPS["13B, 8"]
_PLAIN: Mapping[str, Any] = {"mode": "planned", "cap": 1.0, "recall": 1.0, "reclaim": False}
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "circles stay": {**_PLAIN, "circle_pages": 0},
    "circles resolved": {**_PLAIN, "circle_pages": 8},
    "all": {"mode": "planned", "cap": 1.0},
}
#: Share of all tokens behind which the last requests run alone.
_END = 0.9


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One run.

    Fields:
        rates: Tokens of contexts per second, by part of the time.
        seconds: Length of a part.
        circles: Circles of debts that were found.
        recalled: Pages that came back while their sequence ran.
        again: Tokens that ran again, as a share of all contexts' tokens.
    """

    rates: tuple[float, ...]
    seconds: float
    circles: int
    recalled: int
    again: float

    @property
    def mean(self) -> float:
        return float(np.mean(self.rates))


def timed(policy: str, requests: int, long: float = 0.1, parts: int = 6, seed: int = 0) -> TimedRun:
    """Run a dataset under a policy."""
    prompts, answers = dataset(SETUP, long, requests, seed)
    demand = SETUP.demand("lent", prompts, answers)
    played = play(SETUP.scenario("lent", lending=dict(POLICIES[policy])), "lent", demand)
    context = np.array(prompts) + np.array(answers)
    ended = (np.array(played.ledger.ended)[SETUP.warm("lent") :] - START) / 1e9
    order = np.argsort(ended)
    done = np.cumsum(context[order])
    whole = float(ended[order][int(np.searchsorted(done, _END * done[-1]))])
    tokens, _ = np.histogram(ended, parts, (0.0, whole), weights=context)
    counts = played.counts
    return TimedRun(
        tuple((tokens / (whole / parts)).tolist()), whole / parts, counts["circles"], counts["recalled_pages"],
        counts["resumed_tokens"] / int(context.sum()),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--long", type=float, default=0.1)
    parser.add_argument("--parts", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args(arguments)
    for seed in range(given.seeds):
        for name in POLICIES:
            one = timed(name, given.requests, given.long, given.parts, seed)
            cells = " | ".join(f"{rate:.0f}" for rate in one.rates)
            print(
                f"| {seed} | {name} | {cells} | {one.mean:.0f} | {one.seconds:.0f} s | {one.circles} | "
                f"{one.recalled} | {one.again:.2f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
