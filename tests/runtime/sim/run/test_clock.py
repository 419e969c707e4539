"""The virtual clock and its random streams: time does not go back, ties have one order, and streams are independent.

No event runs inside the event that scheduled it.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.sim.run.clock import EventClass, Streams, VirtualClock


def drained(clock: VirtualClock) -> list[tuple[int, object]]:
    played = []
    while len(clock):
        what = clock.pop()
        played.append((clock.now, what))
    return played


def test_one_moment_has_one_order():
    clock = VirtualClock()
    for what, kind in (
        ("begin", EventClass.BEGIN),
        ("request", EventClass.REQUEST),
        ("array", EventClass.ARRIVED),
        ("end", EventClass.DONE),
    ):
        clock.at(5, kind, what)
    clock.at(5, EventClass.ARRIVED, "second array")
    clock.at(4, EventClass.TICK, "before")
    assert [what for _, what in drained(clock)] == ["before", "end", "array", "second array", "request", "begin"]
    assert clock.played == 6


def test_what_has_no_delay_comes_after_what_scheduled_it():
    clock = VirtualClock()
    clock.at(1, EventClass.DONE, "first")
    clock.at(1, EventClass.DONE, "second")
    clock.pop()
    clock.at(clock.now, EventClass.DONE, "of the first")
    assert [what for _, what in drained(clock)] == ["second", "of the first"]


def test_the_past_is_refused():
    clock = VirtualClock()
    clock.at(7, EventClass.TICK, "now")
    clock.pop()
    with pytest.raises(ValueError, match="6 ns is over"):
        clock.at(6, EventClass.TICK, "too late")


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from(EventClass))))
def test_time_never_goes_back(entries: list[tuple[int, EventClass]]):
    clock = VirtualClock()
    for number, (time, kind) in enumerate(entries):
        clock.at(time, kind, number)
    expected = sorted((time, kind, number) for number, (time, kind) in enumerate(entries))
    assert drained(clock) == [(time, number) for time, _, number in expected]


def test_streams_are_named_and_apart():
    first, second = Streams(3), Streams(3)
    second.named("lengths").random(100)
    assert list(first.named("arrivals").random(4)) == list(second.named("arrivals").random(4))
    assert list(Streams(3).named("lengths").random(4)) != list(Streams(3).named("arrivals").random(4))
    assert list(Streams(3).named("lengths").random(4)) != list(Streams(4).named("lengths").random(4))
