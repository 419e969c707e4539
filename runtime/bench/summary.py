"""What a run comes to: percentiles, throughput, goodput, errors. And two runs against each other: ratios with their
spread. Pure.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.bench.answers import Answer

#: Of two targets, larger is better for these, smaller for the others.
RATES = ("requests_per_second", "tokens_per_second", "goodput")
LATENCIES = ("ttft", "tpot", "e2e")
_PERCENTS = {"median": 50.0, "p95": 95.0, "p99": 99.0}


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count for goodput, in seconds; None for no bound. An answer of one token keeps any
    `tpot`.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def is_met(self, answer: Answer) -> bool:
        if answer.error is not None:
            return False
        return all(
            bound is None or measured is None or measured <= bound
            for bound, measured in ((self.ttft, answer.ttft), (self.tpot, answer.tpot), (self.e2e, answer.e2e))
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's default. `values` may lie in any order; there is at least
    one.
    """
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100.0
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, p95, p99, mean and greatest; None where there is nothing."""
    if not values:
        return None
    return {name: percentile(values, percent) for name, percent in _PERCENTS.items()} | {
        "mean": statistics.fmean(values),
        "max": max(values),
    }


def summarize(answers: Sequence[Answer], slo: Slo) -> dict[str, Any]:
    """A run as a document. Times in seconds; rates over the time from the begin to the last end. Latencies are of
    requests without error.

    `late`: how far the client sent behind time at worst; where that is not small beside the latencies, the client was
    the bottleneck.
    """
    fine = [answer for answer in answers if answer.error is None]
    seconds = max((answer.ended for answer in answers), default=0.0)
    tokens = sum(answer.tokens for answer in fine)
    per_second = 1.0 / seconds if seconds > 0 else 0.0
    return {
        "requests": len(answers),
        "completed": len(fine),
        "errors": dict(sorted(Counter(answer.error for answer in answers if answer.error is not None).items())),
        "first_error": next((answer.heard.detail for answer in answers if answer.error is not None), None),
        "seconds": seconds,
        "prompt_tokens": sum(answer.heard.prompt_tokens for answer in fine),
        "tokens": tokens,
        "requests_per_second": len(fine) * per_second,
        "tokens_per_second": tokens * per_second,
        "goodput": sum(slo.is_met(answer) for answer in answers) * per_second,
        "ttft": spread([answer.ttft for answer in fine if answer.ttft is not None]),
        "tpot": spread([answer.tpot for answer in fine if answer.tpot is not None]),
        "itl": spread([gap for answer in fine for gap in answer.gaps]),
        "e2e": spread([answer.e2e for answer in fine]),
        "late": max((answer.sent - answer.due for answer in answers), default=0.0),
    }


def typical(summaries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The median over rounds of every figure that all rounds have."""
    figures = [_figures(summary) for summary in summaries]
    shared = [name for name in figures[0] if all(name in one for one in figures)] if figures else []
    return {name: statistics.median(one[name] for one in figures) for name in shared}


def ratios(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """First over second of each alternating pair of summaries, for every figure that both have: median, least,
    greatest, pairs.

    Rates: above 1 the first is faster. Latencies (`ttft.median`, …): below 1 the first is faster.
    """
    found = [
        {name: mine / theirs[name] for name, mine in ours.items() if theirs.get(name)}
        for ours, theirs in map(_both, pairs)
    ]
    names = list(dict.fromkeys(name for one in found for name in one))
    return {
        name: {"median": statistics.median(values), "low": min(values), "high": max(values), "pairs": len(values)}
        for name in names
        if (values := [one[name] for one in found if name in one])
    }


def _both(pair: tuple[Mapping[str, Any], Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    return _figures(pair[0]), _figures(pair[1])


def _figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a summary that make sense as a ratio, by name."""
    latencies = {
        f"{name}.{part}": summary[name][part]
        for name in LATENCIES
        if summary[name]
        for part in ("median", "p95", "p99")
    }
    return {name: summary[name] for name in RATES} | latencies
