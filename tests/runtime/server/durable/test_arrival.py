"""Deadlines of requests that an earlier server accepted count from their arrival there."""

from __future__ import annotations

from dataclasses import replace

from runtime.queueing.records import DurableRequest
from runtime.server.durable.execution import arrival_of

ONE = DurableRequest(id="a", kind="completion", digest=b"", seed=0, created=1_000, model="m", version="v")


def test_the_time_since_the_arrival_is_kept_over_a_restart() -> None:
    assert arrival_of(ONE, monotonic=50, wall=1_700) == 50 - 700


def test_a_wall_clock_that_was_set_back_gives_no_arrival_in_the_future() -> None:
    assert arrival_of(ONE, monotonic=50, wall=900) == 50


def test_a_line_of_a_batch_arrives_when_its_turn_comes() -> None:
    assert arrival_of(replace(ONE, batch="b", line=3), monotonic=50, wall=1_700) == 50
