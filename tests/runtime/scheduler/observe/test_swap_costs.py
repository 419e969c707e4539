"""What copies of K and V are estimated to take: by profile, by measurements, and by those of the other way."""

from __future__ import annotations

import pytest

from runtime.config import ControlConfig
from runtime.control.trace_events import TraceEvents
from runtime.scheduler.observe.measured_times import MeasuredTimes
from runtime.scheduler.observe.swap_costs import SwapCosts

MIB = 1 << 20


def costs() -> SwapCosts:
    return SwapCosts(MeasuredTimes(ControlConfig(), None, TraceEvents(None, "")), None, bandwidth=1e9)


def test_without_a_profile_nothing_is_known_until_a_copy_was_measured() -> None:
    made = costs()
    assert not made.copies_known
    made.add_copy(0, True, MIB, 1e-4)
    assert made.copies_known


def test_a_way_that_was_never_measured_takes_the_other_ways_time() -> None:
    for out in (True, False):
        made = costs()
        made.add_copy(0, out, MIB, 1e-4)
        assert made.copy_seconds(not out, MIB) == made.copy_seconds(out, MIB) == pytest.approx(1e-4, rel=0.01)
        made.add_copy(0, not out, MIB, 3e-4)
        assert made.copy_seconds(not out, MIB) == pytest.approx(3e-4, rel=0.01)
