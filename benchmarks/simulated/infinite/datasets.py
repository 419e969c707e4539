"""Run the datasets of Infinite-LLM's Table 2 (Figure 8): 1, 10 and 30 % long requests on instances that lend.

    python -m benchmarks.simulated.infinite.datasets [--setups "7B, 2"]... [--requests 100] [--seeds 1] [--answer 256]
    python -m benchmarks.simulated.infinite.datasets --curve "7B, 2" --long 0.1

All requests come at once. Throughput: tokens of contexts per second, from when a tenth of them has ended to when four
fifths have. `again`: tokens that ran again after a preemption, as a share of all. `--curve`: requests come at random,
more and more of them per second, and latencies are in seconds per thousand tokens of context. Virtual time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.simulated.infinite.setups import LONG, SETUPS, START, Setup, dataset
from runtime.sim.experiments.run import play

#: Systems that serve all of a dataset.
COMPARED = ("lent", "together")
#: Shares of all tokens between which throughput is measured.
_BEGIN, _END = 0.1, 0.8
#: Loads of a curve, as shares of the throughput of `together`.
LOADS = (0.4, 0.6, 0.8, 0.9, 1.0, 1.1)


@dataclass(frozen=True, slots=True)
class DatasetRun:
    """One system on one dataset.

    Fields:
        rate: Tokens of contexts per second.
        latency: Mean seconds of an answered request.
        pace: Mean seconds of an answered request per thousand tokens of its context.
        refused: Share of the requests.
        again: Tokens that ran again, as a share of all contexts' tokens.
        loans: Number of loans.
    """

    rate: float
    latency: float
    pace: float
    refused: float
    again: float
    loans: int


def run(
    setup: Setup, system: str, long: float, requests: int, seed: int, answer: int = 256, per_second: float = 0.0
) -> DatasetRun:
    """Run a dataset. `per_second`: arrivals, at random; 0: all at once."""
    prompts, answers = dataset(setup, long, requests, seed, answer)
    at = None if not per_second else np.cumsum(np.random.default_rng(seed).exponential(1 / per_second, requests))
    demand = setup.demand(system, prompts, answers, None if at is None else at.tolist())
    played = play(setup.scenario(system), system, demand)
    warm, ledger = setup.warm(system), played.ledger
    ended, arrived, first = (np.array(each)[warm:] for each in (ledger.ended, ledger.arrived, ledger.first))
    context = np.array(prompts) + np.array(answers)
    served = first > 0
    order = np.argsort(ended[served])
    done, times = np.cumsum(context[served][order]), (ended[served][order] - START) / 1e9
    low, high = (int(np.searchsorted(done, share * done[-1])) for share in (_BEGIN, _END))
    seconds = (ended - arrived)[served] / 1e9
    return DatasetRun(
        float((done[high] - done[low]) / (times[high] - times[low])),
        float(seconds.mean()),
        float((seconds / context[served]).mean() * 1e3),
        float(1 - served.mean()),
        played.counts["resumed_tokens"] / int(context.sum()),
        played.counts["loans"],
    )


def beside(
    setup: Setup, long: float, requests: int, seeds: Sequence[int], answer: int = 256
) -> dict[str, list[DatasetRun]]:
    """Return the runs of every seed, with loans and on one instance."""
    return {system: [run(setup, system, long, requests, seed, answer) for seed in seeds] for system in COMPARED}


def curve(setup: Setup, long: float, requests: int, answer: int = 256) -> dict[float, dict[str, DatasetRun]]:
    """Return the runs at more and more load, by requests per second."""
    prompts, answers = dataset(setup, long, requests, 0, answer)
    most = run(setup, "together", long, requests, 0, answer).rate / (sum(prompts) + sum(answers)) * requests
    return {
        share * most: {system: run(setup, system, long, requests, 0, answer, share * most) for system in COMPARED}
        for share in LOADS
    }


def mean(runs: Sequence[DatasetRun], name: str) -> float:
    return float(np.mean([getattr(each, name) for each in runs]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--setups", action="append", choices=list(SETUPS))
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--answer", type=int, default=256, help="longest answer, in tokens")
    parser.add_argument("--curve", choices=list(SETUPS))
    parser.add_argument("--long", type=float, default=0.1, help="share of long requests of the curve")
    given = parser.parse_args(arguments)
    if given.curve:
        print(json.dumps(curve(SETUPS[given.curve], given.long, given.requests, given.answer), default=asdict))
        return 0
    print("| dataset | lent, tokens/s | together, tokens/s | gain | mean s: lent, together | loans | again |")
    print("|---|---|---|---|---|---|---|")
    for setup in [SETUPS[name] for name in given.setups or SETUPS]:
        for long in LONG:
            runs = beside(setup, long, given.requests, range(given.seeds), given.answer)
            lent, together = mean(runs["lent"], "rate"), mean(runs["together"], "rate")
            print(
                f"| {setup.name}, {long:.0%} | {lent:.0f} | {together:.0f} | {lent / together:.2f} | "
                f"{mean(runs['lent'], 'latency'):.0f}, {mean(runs['together'], 'latency'):.0f} | "
                f"{mean(runs['lent'], 'loans'):.0f} | {mean(runs['lent'], 'again'):.2f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
