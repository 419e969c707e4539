"""Compare choices of a decode device that count the prefixes that are there with choices that do not, in virtual time.

    python -m benchmarks.simulated.tetri_prefixes [--rules load po2 least] [--margins 0 0.05 0.1 0.2 0.5] [--seeds 3]
        [--decoders 4] [--requests 400] [--rate 6] [--shared 400] [--prompts 8] [--reports 0]
        [--net nvlink3]

OPT-13B on two devices for prompts and four that decode, as in `tetri_decode`. Each prompt begins with one of some
system prompts, of which the first is the most frequent (Zipf), and has about 60 tokens of its own; answers are those of
`tetri_decode choice`. Prefixes are cached on both sides.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.simulated.tetri_decode import CHAT, KNOWLEDGE, scenario
from runtime.sim.experiments.preset import LOADED
from runtime.sim.experiments.run import play
from runtime.sim.workload.requests import Demand
from runtime.types import SamplingParams, SequenceRequest

#: Short requests before all, that are not counted: each device loads its weights.
_WARM = 200
_START = round(LOADED * 1e9)
RULES, MARGINS = ("load", "po2", "least"), (0.0, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True, slots=True)
class PrefixDemand(Demand):
    """Requests of which the prompts begin with system prompts.

    Fields:
        topic: Number of the system prompt of each request.
        shared: Tokens of a system prompt.
    """

    topic: tuple[int, ...] = ()
    shared: int = 0

    def requests(self, adaptive: bool = False) -> Iterator[SequenceRequest]:
        columns = self.at.tolist(), self.prompt.tolist(), self.answer.tolist(), self.topic
        for number, (at, prompt, answer, topic) in enumerate(zip(*columns, strict=True)):
            sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
            shared = min(self.shared, prompt)
            tokens = (topic,) * shared + (10_000 + number,) * (prompt - shared)
            yield SequenceRequest(f"r{number}", f"r{number}", self.models[0], tokens, sampling, arrival=at)


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """One run.

    Fields:
        moved: GB of K and V that hand-offs sent; `present`: share of the tokens handed off that were there.
        mean, worst: Seconds of a request: their mean; 99 % take no longer.
        gap: The longest gap between two tokens of an answer, in seconds: their mean.
    """

    moved: float
    present: float
    preemptions: int
    mean: float
    worst: float
    gap: float


def demand(requests: int, rate: float, prompts: int, shared: int, seed: int) -> PrefixDemand:
    """Return requests, `rate` per second, with so many system prompts of `shared` tokens each."""
    draws = np.random.default_rng(seed)
    at = _START + np.cumsum(draws.exponential(1e9 / rate, requests))
    weights = 1 / np.arange(1, prompts + 1)
    topic = draws.choice(prompts, requests, p=weights / weights.sum())
    said = np.clip(draws.lognormal(np.log(60), 0.7, requests), 4, 400)
    answer = np.clip(draws.lognormal(np.log(CHAT.answer), 1.0, requests), 2, CHAT.most)
    early = np.full(_WARM, _START // 2)
    columns = (
        np.concatenate((early, np.rint(at))), np.concatenate((np.full(_WARM, 4), np.rint(shared + said))),
        np.concatenate((np.full(_WARM, 40), np.rint(answer))),
    )  # fmt: skip
    times, lengths, answers = (each.astype(np.int64) for each in columns)
    topics = (*range(1000, 1000 + _WARM), *(int(each) for each in topic))
    models = np.zeros(len(times), np.int64)
    return PrefixDemand(("opt-13b",), times, models, lengths, answers, topic=topics, shared=shared)


def served(asked: PrefixDemand, decoders: int, seed: int, net: str, **decode: Any) -> PrefixRun:
    """Run requests with a choice of the decode device."""
    lengths = {**KNOWLEDGE["predicted"], "seed": seed}
    made = scenario(decoders, net, prefix_caching="cached", decode=decode, lengths=lengths)
    played = play(made, "decode", asked)
    ledger = played.ledger
    arrived, ended, gap = (np.array(each, dtype=float)[_WARM:] for each in (ledger.arrived, ledger.ended, ledger.gap))
    took, counts = (ended - arrived) / 1e9, played.counts
    return PrefixRun(
        counts["handoff_bytes"] / 1e9, counts["handoff_present_tokens"] / float(asked.prompt.sum()),
        counts["preemptions"], float(took.mean()), float(np.quantile(took, 0.99)), float(gap.mean() / 1e9),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rules", nargs="+", default=RULES)
    parser.add_argument("--margins", type=float, nargs="+", default=MARGINS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--decoders", type=int, default=4)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second")
    parser.add_argument("--prompts", type=int, default=8, help="different system prompts")
    parser.add_argument("--shared", type=int, default=400, help="tokens of a system prompt")
    parser.add_argument("--reports", type=int, default=0, help="period of reports of loads in ms")
    parser.add_argument("--net", default="nvlink3", help="links between devices")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    asked = [demand(given.requests, given.rate, given.prompts, given.shared, seed) for seed in range(given.seeds)]
    if not given.json:
        print("  rule  margin  GB sent  present  preempted  mean s   p99 s   gap s")
    found = {}
    for rule in given.rules:
        for margin in given.margins:
            decode: dict[str, Any] = {"choice": rule, "present_margin": margin, "load_reports_ms": given.reports}
            runs = [served(each, given.decoders, seed, given.net, **decode) for seed, each in enumerate(asked)]
            found[f"{rule} {margin}"] = [asdict(run) for run in runs]
            if not given.json:
                mean = {name: np.mean([getattr(run, name) for run in runs]) for name in PrefixRun.__dataclass_fields__}
                print(f"{rule:>6} {margin:>7} {mean['moved']:>8.1f} {mean['present']:>8.3f} "
                      f"{mean['preemptions']:>10.1f} {mean['mean']:>7.3f} {mean['worst']:>7.2f} {mean['gap']:>7.3f}",
                      flush=True)  # fmt: skip
    if given.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
