"""Summarize a run (percentiles, throughput, goodput, errors) and compare two runs (ratios with their spread). Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.bench.answers import Answer

#: Figures for which larger is better; for the latencies smaller is better.
RATES = ("requests_per_second", "tokens_per_second", "goodput")
LATENCIES = ("ttft", "tpot", "e2e")
_PERCENTS = {"median": 50.0, "p95": 95.0, "p99": 99.0}


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in seconds that a request must meet to count for goodput; None for no bound.

    An answer of one token meets any `tpot`.
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
    """Return a percentile, linear between the two nearest ranks as in numpy's default.

    `values` need not be sorted and must not be empty.
    """
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100.0
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return median, p95, p99, mean and maximum; None without values."""
    if not values:
        return None
    return {name: percentile(values, percent) for name, percent in _PERCENTS.items()} | {
        "mean": statistics.fmean(values),
        "max": max(values),
    }


def summarize(answers: Sequence[Answer], slo: Slo) -> dict[str, Any]:
    """Return the document of a run.

    Times are in seconds. Rates are over the time from the start to the end of the last request. Latencies are of
    requests without error. `late` is the client's largest delay in sending; if it is not small compared with the
    latencies, the client was the bottleneck.
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
    """Return the median over rounds of every figure that all rounds have."""
    figures = [_figures(summary) for summary in summaries]
    shared = [name for name in figures[0] if all(name in one for one in figures)] if figures else []
    return {name: statistics.median(one[name] for one in figures) for name in shared}


def ratios(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return first over second for each alternating pair of summaries: median, minimum, maximum and number of pairs.

    Covers every figure that both have. Rates: above 1 the first is faster. Latencies (`ttft.median`, …): below 1 the
    first is faster.
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
    """Return the figures of a summary that make sense as ratios, by name."""
    latencies = {
        f"{name}.{part}": summary[name][part]
        for name in LATENCIES
        if summary[name]
        for part in ("median", "p95", "p99")
    }
    return {name: summary[name] for name in RATES} | latencies
