"""Compare rules of decode admission and of the choice of a decode device (TetriInfer, sections 3.4 and 5.2.4).

    python -m benchmarks.simulated.tetri_decode admission [--apart] [--seeds 3]
    python -m benchmarks.simulated.tetri_decode choice [--seeds 10] [--reports 100]

`admission`: OPT-13B on two V100 that split each layer; requests come faster than they are decoded. `--apart`: with
another such device for prompts.
`choice`: 32 requests for each of 2 to 8 such devices that decode. Lengths are hidden from the scheduler: it gets
forecasts of buckets 200 tokens wide, right in 74.9 % (the paper's predictor) or exact ones, or learns from answers.
Times are virtual.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from runtime.sim.experiments.preset import LOADED, STILL
from runtime.sim.experiments.run import play
from runtime.sim.experiments.scenario import Scenario, scenario_of
from runtime.sim.workload.requests import Demand

#: Most tokens of a prompt and its answer.
LONGEST = 2048


@dataclass(frozen=True, slots=True)
class LengthSpread:
    """Lengths spread over two orders of magnitude (as in Figure 1): medians and most tokens."""

    prompt: int
    answer: int
    most: int


#: As of chat, and with long answers, of which K and V grow far beyond what a prompt needs.
CHAT, LONG = LengthSpread(100, 180, 1024), LengthSpread(30, 500, 1500)
#: Lengths known exactly, by the paper's predictor, and as learned from answers.
KNOWLEDGE: Mapping[str, Mapping[str, Any]] = {
    "exact": {"hidden": True, "granularity": 1},
    "predicted": {"hidden": True, "granularity": 200, "accuracy": 0.749},
    "learned": {"hidden": True},
}
RULES = ("greedy", "static", "dynamic", "peak")
CHOICES = ("po2", "least", "random", "worst", "load")
#: A request is good if its first token comes within the first, and each further one within the second (seconds): the
#: objectives of Past-Future (arXiv 2507.10150, section 5).
GOOD = (10.0, 1.5)
#: Short requests before all, that are not counted.
_WARM = 200
_START = round(LOADED * 1e9)


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """One run.

    Fields:
        preemptions: Sequences that gave way for want of pages.
        good: Good requests per second; `rate`: all of them.
        mean: Mean seconds until a request has ended; `worst`: 99 % take no longer.
        whole: Seconds until all have ended.
    """

    preemptions: int
    good: float
    rate: float
    mean: float
    worst: float
    whole: float


def demand(model: str, requests: int, rate: float, seed: int, spread: LengthSpread) -> Demand:
    """Return requests behind those that let devices load their weights. `rate`: per second; 0: all at once."""
    draws = np.random.default_rng(seed)
    at = np.cumsum(draws.exponential(1e9 / rate, requests)) if rate else np.zeros(requests)
    prompt = np.clip(draws.lognormal(np.log(spread.prompt), 1.0, requests), 4, 512)
    answer = np.clip(draws.lognormal(np.log(spread.answer), 1.0, requests), 2, spread.most)
    numbers = (np.rint(each).astype(np.int64) for each in (at + _START, prompt, answer))
    at, prompt, answer = numbers
    early = np.full(_WARM, _START // 2)  # so many at once that each device loads its weights
    at, prompt, answer = (np.concatenate(each) for each in ((early, at), ([4] * _WARM, prompt), ([40] * _WARM, answer)))
    return Demand((model,), at, np.zeros(len(at), dtype=np.int64), prompt, answer)


def scenario(decoders: int, net: str = "nvlink3", **policy: Any) -> Scenario:
    """Return a scenario with a device for prompts for every two that decode; 0: with one device for both.

    K and V travel over links of the kind `net` when a prompt is done, as in the paper.
    """
    policy["decode"] = {"grain": "request", **policy.get("decode", {})}
    roles = ["prefill"] * -(-decoders // 2) + ["decode"] * decoders
    values = {
        "provision": "blocks", "parts": 1, "page_layers": 40, "max_model_len": LONGEST, "control": STILL,
        "roles": roles, "prefill_chunk": 512, "max_num_batched_tokens": 512, "max_num_seqs": 256,
        "placement": "replicate", **policy,
    }  # fmt: skip
    tables = {
        "cluster": {"gpu": "2xV100-tetri", "servers": [1] * max(len(roles), 1), "weights": 0.95, "net": net},
        "apps": {"ladder": ["opt-13b"], "accuracy": [1.0]},
        "asked": {"longest": LONGEST},
        "policies": {"decode": values},
    }
    return scenario_of("tetri-decode", tables)


def decoded(
    decoders: int, requests: int, rate: float, seed: int, spread: LengthSpread = CHAT, **policy: Any
) -> DecodeRun:
    """Run requests on so many devices that decode."""
    made = scenario(decoders, **policy)
    played = play(made, "decode", demand("opt-13b", requests, rate, seed, spread))
    ledger = played.ledger
    arrived, first, ended, gap = (
        np.array(each, dtype=float)[_WARM:] for each in (ledger.arrived, ledger.first, ledger.ended, ledger.gap)
    )
    took = (ended - arrived) / 1e9
    whole = (ended.max() - arrived.min()) / 1e9
    good = float(np.count_nonzero(((first - arrived) / 1e9 <= GOOD[0]) & (gap / 1e9 <= GOOD[1]))) / whole
    return DecodeRun(
        played.counts["preemptions"], good, requests / whole, float(took.mean()), float(np.quantile(took, 0.99)), whole
    )


def admission(seeds: Sequence[int], rate: float, requests: int, decoders: int) -> dict[str, dict[str, list[DecodeRun]]]:
    """Return the runs of each rule with each knowledge of lengths."""

    def runs(rule: str, lengths: Mapping[str, Any]) -> list[DecodeRun]:
        settings = {"decode": {"admission": rule}}
        return [
            decoded(decoders, requests, rate, seed, LONG, **settings, lengths={**lengths, "seed": seed})
            for seed in seeds
        ]

    return {known: {rule: runs(rule, lengths) for rule in RULES} for known, lengths in KNOWLEDGE.items()}


def choice(seeds: Sequence[int], decoders: Sequence[int], **decode: Any) -> dict[int, dict[str, list[DecodeRun]]]:
    """Return the runs of each rule for each number of devices that decode."""

    def runs(count: int, rule: str) -> list[DecodeRun]:
        settings = {"decode": {"choice": rule, **decode}}
        return [
            decoded(count, 32 * count, 0.0, seed, **settings, lengths={**KNOWLEDGE["predicted"], "seed": seed})
            for seed in seeds
        ]

    return {count: {rule: runs(count, rule) for rule in CHOICES} for count in decoders}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("study", choices=("admission", "choice"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second (admission)")
    parser.add_argument("--requests", type=int, default=400, help="requests (admission)")
    parser.add_argument("--decoders", type=int, nargs="+", default=[2, 4, 8], help="devices that decode (choice)")
    parser.add_argument("--reports", type=int, default=0, help="period of reports of loads in ms (choice)")
    parser.add_argument("--apart", action="store_true", help="prompts on another device (admission)")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    seeds = range(given.seeds)
    found: Mapping[Any, Mapping[str, Sequence[DecodeRun]]] = (
        admission(seeds, given.rate, given.requests, int(given.apart))
        if given.study == "admission"
        else choice(seeds, given.decoders, load_reports_ms=given.reports)
    )
    if given.json:
        print(json.dumps({key: {rule: [asdict(run) for run in runs] for rule, runs in some.items()}
                          for key, some in found.items()}))  # fmt: skip
        return 0
    print(f"{'':>10} {'':>8} {'preempted':>10} {'good/s':>8} {'all/s':>8} {'mean s':>8} {'p99 s':>8} {'whole s':>8}")
    for key, some in found.items():
        for rule, runs in some.items():
            columns = [np.mean([getattr(run, name) for run in runs]) for name in DecodeRun.__dataclass_fields__]
            print(f"{key:>10} {rule:>8} {columns[0]:>10.1f} " + " ".join(f"{each:>8.2f}" for each in columns[1:]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
