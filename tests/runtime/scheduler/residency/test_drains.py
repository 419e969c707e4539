"""Urgent sequences start on a model that is about to leave, if what it leaves for is on time all the same (QL-13)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.runtime.scheduler.order.test_planning import finished, swapping
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import request


def ends_of(
    objective: int, tokens: int = 20, at: int = 60, first_objective: int = 60_000, **order: Any
) -> tuple[int, int, int]:
    """Return when a request ends that comes for a model that is about to leave, and those of both models before it.

    `m0` runs an answer of 61 tokens from 21 to 94 ms. At 50 ms it begins to leave for `m1`, with loads of 20 ms. Then
    another request comes for `m0`. All in ms.

    Args:
        objective, tokens, at: Of that request: its objective, the tokens of its answer and when it comes.
        first_objective: Of the request for `m1`.
    """
    made = swapping(plan_rounds=0, models=2, run_floor=0.1, cap_batches=False, **order)
    made.loading = lambda: 20 * MS
    for seq, model, count, slo_ms, when in (
        ("runs", "m0", 61, 60_000, 1),
        ("first", "m1", 20, first_objective, 50),
        ("again", "m0", tokens, objective, at),
    ):
        one = request(seq, (1, 2, 3), model, max_tokens=count, ignore_eos=True)
        made.ask(replace(one, arrival=when * MS, slo_ms=slo_ms), at=when * MS)
    finished(made)
    assert made.trace.named("stage.close")[0].t < at * MS
    ends = {event.seq: event.t // MS for event in made.trace.named("finish")}
    return ends["again"], ends["runs"], ends["first"]


def test_an_urgent_sequence_starts_on_a_model_that_leaves() -> None:
    again, runs, first = ends_of(60)
    assert again <= 120
    assert again < runs < first
    again, runs, first = ends_of(60, fill_drains=False)
    assert again > first > runs


def test_one_that_can_wait_for_the_model_does() -> None:
    again, runs, first = ends_of(50_000)
    assert again > first > runs


def test_one_that_is_late_anyway_does_not_start() -> None:
    again, runs, _ = ends_of(2)
    assert again > runs


@pytest.mark.parametrize(("first_objective", "starts"), [(60_000, True), (110, False)])
def test_it_keeps_the_model_no_longer_than_what_comes_next_has_time(first_objective: int, starts: bool) -> None:
    """With an answer that ends after the one that runs."""
    again, runs, first = ends_of(90, 61, 70, first_objective)
    assert again > runs
    assert (again < first) == starts
    assert first <= 50 + first_objective
