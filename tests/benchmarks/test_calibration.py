"""The figures of `benchmarks.cluster.calibration`: errors, bias, and tenths by estimate and by measured time."""

from __future__ import annotations

import pytest

from benchmarks.cluster.calibration import Estimates, table
from runtime.types import TraceEvent


def test_what_is_learned_first_does_not_count() -> None:
    learning = [(100.0, 1.0)] * 3
    pairs = [(1.1 * seconds, seconds) for seconds in (float(at) for at in range(20, 0, -1))]
    figures = table([*learning, *pairs], learning=3)
    assert figures["count"] == 20
    assert figures["median_error"] == pytest.approx(0.1) and figures["bias"] == pytest.approx(0.1)
    for tenths in (figures["tenths_by_estimate"], figures["tenths_by_measured"]):
        assert [each["measured_ms"] for each in tenths] == [1000 * (2 * at + 1.5) for at in range(10)]
        assert {each["estimate_over_measured"] for each in tenths} == {1.1}


def test_of_equal_estimates_only_the_tenths_by_measured_time_differ() -> None:
    pairs = [(1.0, 0.5 + (7 * at % 20) / 20) for at in range(20)]
    figures = table([*pairs, *((10.0, 10 * seconds) for _, seconds in pairs)], learning=0)
    ratios = {
        by: [each["estimate_over_measured"] for each in figures[f"tenths_by_{by}"]] for by in ("estimate", "measured")
    }
    assert figures["spread"] == pytest.approx(figures["median_error"], abs=0.1) and figures["spread"] > 0.1
    assert max(ratios["measured"]) > 1.7 and max(ratios["estimate"]) < 1.5


def test_too_long_and_too_short_cancel_in_the_bias_only() -> None:
    figures = table([(0.8, 1.0), (1.2, 1.0)] * 10, learning=0)
    assert figures["median_error"] == pytest.approx(0.2) and figures["bias"] == pytest.approx(0.0)
    assert figures["spread"] == 0.0, "all took as long: no spread"
    assert table([(1.0, 1.0)], learning=5) == {"count": 0}


def test_only_estimates_are_kept() -> None:
    sink = Estimates()
    sink.emit(TraceEvent(1, "arrive"))
    sink.emit(TraceEvent(2, "estimate", extra={"of": "hop", "seconds": 0.5, "measured": 0.25}))
    assert sink.pairs == {"hop": [(0.5, 0.25)]}
