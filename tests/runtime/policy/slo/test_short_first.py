"""Short answers first among equals: within an aging limit, and never at the price of a deadline."""

from __future__ import annotations

from dataclasses import replace

from runtime.policy.slo.lengths import AnswerLengths, class_of
from runtime.policy.slo.short_first import EqualGroup, delays

SECOND = 10**9
LONG = EqualGroup(1, (0, "a"), 1000.0, 10, 60 * SECOND, 61 * SECOND, 2.0 * SECOND, 20 * SECOND)
SHORT = replace(LONG, id=2, size=100.0, first=65 * SECOND, last=66 * SECOND, work=0.2 * SECOND)


def order(*groups: EqualGroup, busy: float = 0.0, places: int = 1) -> list[int]:
    found = delays(groups, busy, places)
    return [each.id for each in sorted(groups, key=lambda each: (each.equals[0], each.first + found.get(each.id, 0)))]


def test_short_answers_go_first_within_the_limit() -> None:
    assert order(LONG, SHORT) == [2, 1]
    assert order(LONG, replace(SHORT, first=85 * SECOND, last=86 * SECOND)) == [1, 2]  # came too long after it


def test_what_are_no_equals_keep_their_order() -> None:
    assert not delays([LONG, replace(SHORT, equals=(0, "b"))], 0.0, 1)
    assert not delays([LONG, replace(LONG, id=2)], 0.0, 1)


def test_none_that_is_on_time_by_arrival_becomes_late() -> None:
    """The long ones take 20 s, and the short ones 2 s."""
    tight = replace(LONG, first=10 * SECOND, last=21 * SECOND)
    short = replace(SHORT, first=12 * SECOND, last=30 * SECOND)
    assert order(tight, short) == [1, 2]
    assert order(replace(tight, last=23 * SECOND), short) == [2, 1]


def test_what_has_no_equals_counts_no_later() -> None:
    other = replace(LONG, id=3, equals=(0, "b"), first=62 * SECOND)
    assert order(LONG, other, replace(SHORT, last=90 * SECOND)) == [3, 2, 1]


def test_those_that_are_late_anyway_hold_no_short_ones_back() -> None:
    late = replace(LONG, first=SECOND, last=SECOND)
    assert order(late, replace(SHORT, first=2 * SECOND, last=5 * SECOND)) == [2, 1]


def test_lengths_with_the_same_mean_differ_by_their_tail() -> None:
    known, even, heavy = AnswerLengths(), class_of("even", 8, 1 << 12), class_of("heavy", 8, 1 << 12)
    for number in range(100):
        known.add(even, 100)
        known.add(heavy, 1000 if number % 20 == 0 else 53)
    assert abs(known.expected(even, 0, 4096) - known.expected(heavy, 0, 4096)) < 10
    assert known.inflated(heavy, 0, 4096) > 1.3 * known.inflated(even, 0, 4096)
    assert known.inflated(class_of("new", 8, 64), 0, 64) == 64
