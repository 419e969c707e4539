"""When a step waits for rows that are due back."""

from __future__ import annotations

from runtime.policy.batching.batch_wait import until

STEP, LIMIT = 10_000.0, 2_000


def test_a_step_waits_for_rows_that_are_due_within_a_moment() -> None:
    assert until(waiting=4, due=4, deadline=1_100, step=STEP, limit=LIMIT, now=1_000) == 1_100


def test_nobody_waits_for_nobody() -> None:
    assert until(4, 0, 1_100, STEP, LIMIT, 1_000) is None
    assert until(0, 4, 1_100, STEP, LIMIT, 1_000) is None


def test_what_is_late_or_far_away_is_not_waited_for() -> None:
    assert until(4, 4, 1_000, STEP, LIMIT, 1_000) is None
    assert until(4, 4, 3_001, STEP, LIMIT, 1_000) is None
    assert until(4, 4, 3_000, STEP, LIMIT, 1_000) == 3_000
    assert until(4, 4, 1_100, STEP, 0, 1_000) is None, "switched off"


def test_it_has_to_gain_more_than_those_who_wait_lose() -> None:
    """One row saves a step; each waiting row loses what is left of the round trip."""
    assert until(waiting=10, due=1, deadline=1_999, step=STEP, limit=LIMIT, now=1_000) == 1_999
    assert until(waiting=11, due=1, deadline=2_000, step=STEP, limit=LIMIT, now=1_000) is None
    assert until(waiting=11, due=2, deadline=2_000, step=STEP, limit=LIMIT, now=1_000) == 2_000
    assert until(waiting=1, due=1, deadline=1_100, step=0.0, limit=LIMIT, now=1_000) is None, "no step is known yet"
