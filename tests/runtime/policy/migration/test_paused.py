"""Moves inside pauses: examples, and where the traffic lies for any pause (BL-17)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.policy.migration.paused import Foresight, PausedSequence, foresee


def test_a_pause_that_has_lasted_as_long_as_the_move_is_worth_it() -> None:
    pause = PausedSequence("s", called=100)
    assert foresee(pause, 50, now=120) == Foresight(False, 20, 50, 151)
    assert foresee(pause, 50, now=150) == Foresight(False, 50, 50, 151)
    assert foresee(pause, 50, now=151) == Foresight(True, 51, 50, None)
    assert not foresee(pause, 50, now=151, margin=1.5).migrate and foresee(pause, 50, now=176, margin=1.5).migrate


def test_a_known_pause_is_used_at_once_if_it_is_long_enough() -> None:
    assert foresee(PausedSequence("s", 100, expected=80), 50, now=100) == Foresight(True, 80, 50, None)
    assert foresee(PausedSequence("s", 100, expected=80), 50, now=140) == Foresight(False, 40, 50, 180)
    assert foresee(PausedSequence("s", 100, expected=40), 50, now=145) == Foresight(
        False, 45, 50, 151
    )  # longer than expected
    assert foresee(PausedSequence("s", 100, expected=40), 50, now=151).migrate


def test_a_pause_that_has_not_begun() -> None:
    with pytest.raises(ValueError, match="not paused"):
        foresee(PausedSequence("s", 100), 50, now=99)


@given(st.integers(0, 1000), st.integers(1, 500), st.one_of(st.none(), st.integers(0, 1000)))
def test_traffic_lies_inside_pauses_twice_as_long_as_the_move_and_short_ones_have_none(
    lasts: int, migration: int, expected: int | None
) -> None:
    """`foresee` is called at each time it returns; the pause ends at `lasts`."""
    now, begins = 0, None
    while now < lasts and begins is None:
        seen = foresee(PausedSequence("s", 0, expected), migration, now)
        if seen.migrate:
            begins = now
        else:
            assert seen.again is not None and seen.again > now
            assert not any(
                foresee(PausedSequence("s", 0, expected), migration, each).migrate for each in range(now, seen.again)
            )
            now = seen.again
    if expected is None:
        assert (begins is not None) == (lasts > migration + 1)
        if begins is not None and lasts > 2 * migration:
            assert begins + migration <= lasts
    elif expected == lasts:
        assert (begins is not None) == (lasts > migration) and (begins is None or begins + migration <= lasts)
