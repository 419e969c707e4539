"""Rows due back from the scheduler: learnt from earlier round trips, removed when they are late or gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from runtime.agent.steps.round_trips import RoundTrips
from runtime.chains import Hop

LIMIT = 2_000


def row(name: str, hops: tuple[str, ...] = ("d",), at: int | None = None, attempt: int = 0) -> Any:
    path = tuple(Hop(device, place, place + 1) for place, device in enumerate(hops))
    return SimpleNamespace(
        name=name,
        sequence=SimpleNamespace(path=path, keys={}),
        hop=len(hops) - 1 if at is None else at,
        attempt=attempt,
    )


def test_nobody_is_expected_before_one_has_come_back() -> None:
    due = RoundTrips(LIMIT, 0.5)
    due.leaves(row("a"), "d", 1_000)
    assert due.due == 1 and due.deadline(1_010) == 0
    due.comes("a", 1_100)
    due.leaves(row("a"), "d", 5_000)
    assert due.deadline(5_010) == 5_000 + 150


def test_only_rows_that_the_scheduler_alone_has_are_due() -> None:
    """Other rows come back when another device's step is over, which may take long."""
    due = RoundTrips(LIMIT, 0.5)
    due.leaves(row("goes on", ("d", "e"), at=0), "d", 0)
    due.leaves(row("begins elsewhere", ("e", "d")), "d", 0)
    due.leaves(row("predicted", attempt=2), "d", 0)
    assert due.due == 0
    due.leaves(row("ends where it began", ("d", "e", "d")), "d", 0)
    assert due.due == 1


def test_a_path_that_comes_back_begins_again_at_its_first_hop() -> None:
    due = RoundTrips(LIMIT, 0.5)
    last = row("a@4", ("d", "e", "d"), at=2)
    last.sequence.keys.update({0: "a@0", 4: "a@4"})
    due.leaves(last, "d", 0)
    due.comes("a@0", 100)
    assert due.due == 0, "a step with it in would wait for it"


def test_who_is_late_is_not_expected_any_more_and_makes_the_round_longer() -> None:
    due = RoundTrips(LIMIT, 0.5)
    due.leaves(row("a"), "d", 0)
    due.comes("a", 100)
    due.leaves(row("b"), "d", 1_000)
    due.leaves(row("c"), "d", 2_500)
    assert due.deadline(1_000 + LIMIT) == 2_500 + int(1.5 * (0.8 * 100 + 0.2 * LIMIT))
    assert due.due == 1


def test_whoever_is_gone_is_not_waited_for() -> None:
    due = RoundTrips(LIMIT, 0.5)
    due.leaves(row("a"), "d", 0)
    due.comes("a", 100)
    due.leaves(row("a"), "d", 1_000)
    due.remove_table("a")
    assert due.due == 0 and due.deadline(1_001) == 0


def test_switched_off_nothing_is_written_down() -> None:
    due = RoundTrips(0, 0.5)
    due.leaves(row("a"), "d", 0)
    assert due.due == 0


def test_steps_are_learnt_by_the_clock() -> None:
    due = RoundTrips(LIMIT, 0.5)
    due.begin_step(1_000)
    due.end_step(1_100)
    assert due.step == 100
    due.begin_step(2_000)
    due.end_step(2_200)
    assert due.step == 0.8 * 100 + 0.2 * 200
