"""Latencies, percentiles, goodput and ratios against cases computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.bench.answers import Answer, TokenTimes
from runtime.bench.summary import Slo, percentile, ratios, spread, summarize


def answer(
    due: float,
    stamps: tuple[float, ...],
    lots: tuple[int, ...] | None = None,
    error: str | None = None,
    sent: float = 0.0,
) -> Answer:
    """Return an answer with these token times; without any it ends 9 seconds after it was due."""
    lots = lots or (1,) * len(stamps)
    ended = stamps[-1] if stamps else due + 9.0
    return Answer(
        0, "m", due, max(sent, due), ended, TokenTimes(stamps, lots, sum(lots), 5, error, error and f"{error}!")
    )


def test_one_answer() -> None:
    one = answer(1.0, (1.5, 1.75, 2.5))
    assert (one.ttft, one.tpot, one.e2e, list(one.gaps)) == (0.5, 0.5, 1.5, [0.25, 0.75])
    in_lots = answer(0.0, (1.0, 3.0), lots=(2, 4))
    assert (in_lots.tpot, in_lots.tokens) == (0.5, 6)
    assert answer(0.0, (1.0,)).tpot is None
    assert answer(0.0, (1.0,), lots=(8,)).tpot is None
    late = answer(0.0, (1.0, 2.0), sent=0.75)
    assert (late.ttft, late.e2e) == (1.0, 2.0)  # measured from when the request was due
    silent = answer(0.0, (), error="broken stream")
    assert silent.ttft is None and silent.tpot is None and silent.e2e == 9.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-6)


def test_percentiles_by_hand() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([10.0 * n for n in range(101)], 95) == 950.0
    assert spread([]) is None
    assert spread([2.0]) == {"median": 2.0, "p95": 2.0, "p99": 2.0, "mean": 2.0, "max": 2.0}


def test_a_run_by_hand() -> None:
    answers = [
        answer(0.0, (0.5, 1.0, 1.5)),  # ttft 0.5, tpot 0.5, e2e 1.5
        answer(1.0, (3.0, 4.0)),  # ttft 2.0, tpot 1.0, e2e 3.0
        answer(2.0, (2.25,), sent=2.125),  # one token: no tpot
        answer(2.0, (2.25, 2.5), error="broken stream"),
        answer(3.0, (), error="http 429"),
        answer(3.0, (), error="http 429"),
    ]
    found = summarize(answers, Slo(ttft=0.5, tpot=0.75))
    assert (found["requests"], found["completed"], found["tokens"], found["prompt_tokens"]) == (6, 3, 6, 15)
    assert found["errors"] == {"broken stream": 1, "http 429": 2} and found["first_error"] == "broken stream!"
    assert found["seconds"] == 12.0  # the end of the last failed request
    assert found["requests_per_second"] == pytest.approx(3 / 12) and found["tokens_per_second"] == pytest.approx(6 / 12)
    assert found["goodput"] == pytest.approx(2 / 12)
    assert found["ttft"]["median"] == 0.5 and found["tpot"]["median"] == 0.75 and found["e2e"]["max"] == 3.0
    assert found["itl"]["max"] == 1.0 and found["late"] == 0.125


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(), 3),
        (Slo(ttft=0.4), 1),
        (Slo(tpot=0.5), 2),
        (Slo(e2e=1.5), 2),
        (Slo(ttft=0.5, tpot=0.4), 1),
        (Slo(e2e=0.1), 0),
    ],
)
def test_goodput_counts_who_kept_every_bound(slo: Slo, met: int) -> None:
    answers = [answer(0.0, (0.5, 1.0, 1.5)), answer(1.0, (3.0, 4.0)), answer(2.0, (2.25,))]
    assert summarize(answers, slo)["goodput"] == pytest.approx(met / 4.0)


def test_an_empty_run_divides_by_nothing() -> None:
    found = summarize([], Slo())
    assert found["requests_per_second"] == 0.0 and found["ttft"] is None


def test_ratios_are_per_pair() -> None:
    def run(scale: float) -> dict[str, object]:
        return summarize([answer(0.0, (scale, 2 * scale))], Slo())

    found = ratios([(run(1.0), run(2.0)), (run(1.0), run(4.0)), (run(2.0), run(1.0))])
    assert found["tokens_per_second"] == {"median": 2.0, "low": 0.5, "high": 4.0, "pairs": 3}
    assert found["ttft.p95"] == {"median": 0.5, "low": 0.25, "high": 2.0, "pairs": 3}
    failed = summarize([answer(0.0, (), error="refused")], Slo())
    assert ratios([(run(1.0), failed)]) == {}
