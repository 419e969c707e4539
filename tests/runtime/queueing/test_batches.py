"""Batches in the queue's database: one status at a time, one principal, lines in order."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import get_args

import pytest
from sqlalchemy import text

from runtime.queueing import batches, requests
from runtime.queueing.batches import OPEN, Status, StoredBatch
from runtime.queueing.database import QueueDatabase
from runtime.queueing.records import DurableRequest, FileRange, StoredAnswer
from tests import postgres
from zoo.errors import StoreBusy

NOW = 1_700_000_000_000_000_000
CHECKED: tuple[Status, ...] = ("validating",)


def batch(number: int, **changes: object) -> StoredBatch:
    one = StoredBatch(
        f"batch_{number}", "p", "/v1/completions", "file-1", "24h", NOW + number, NOW + 1000, metadata={"a": "b"}
    )
    return replace(one, **changes)  # type: ignore[arg-type]


def line(number: int, of: str = "batch_1") -> DurableRequest:
    return DurableRequest(
        f"cmpl-{of}-{number}",
        "completion",
        b"",
        7,
        NOW,
        source=FileRange("file-1", number * 10, 10),
        batch=of,
        line=number,
    )


def test_a_batch_comes_back_and_is_put_once(queue: QueueDatabase) -> None:
    whole = batch(1, errors=[{"line": 3}], times={"in_progress": NOW}, total=5, output_file="f", ended=None)
    with queue.writing() as connection:
        assert batches.put(connection, whole)
        assert not batches.put(connection, batch(1, window="1h"))
    with queue.reading() as connection:
        assert batches.get(connection, "batch_1") == batches.get(connection, "batch_1", "p") == whole
        assert batches.get(connection, "batch_1", "q") is None


def test_a_status_changes_only_from_the_ones_named(queue: QueueDatabase) -> None:
    with queue.writing() as connection:
        batches.put(connection, batch(1))
        assert batches.change(connection, "batch_1", CHECKED, NOW + 1, status="cancelling", becomes="cancelled")
        assert not batches.change(connection, "batch_1", CHECKED, NOW + 2, status="in_progress", total=3)
        assert not batches.change(connection, "batch_7", OPEN, NOW + 2, status="failed")
        assert batches.change(connection, "batch_1", OPEN, NOW + 3, status="cancelled", failed=2)
        assert not batches.change(connection, "batch_1", OPEN, NOW + 4, status="completed")
    with queue.reading() as connection:
        ended = batch(
            1,
            status="cancelled",
            becomes="cancelled",
            failed=2,
            times={"cancelling": NOW + 1, "cancelled": NOW + 3},
            ended=NOW + 3,
        )
        assert batches.get(connection, "batch_1") == ended


def test_lists_are_of_one_principal_and_go_on(queue: QueueDatabase) -> None:
    with queue.writing() as connection:
        for number in range(1, 7):
            batches.put(
                connection,
                batch(number, principal="pq"[number % 2], status="completed" if number == 4 else "validating"),
            )
    with queue.reading() as connection:
        assert [each.id for each in batches.listed(connection, "p", 2)] == ["batch_6", "batch_4"]
        assert [each.id for each in batches.listed(connection, "p", 9, after="batch_4")] == ["batch_2"]
        assert batches.listed(connection, "p", 9, after="batch_3") == []
        assert [each.id for each in batches.unended(connection)] == [f"batch_{each}" for each in (1, 2, 3, 5, 6)]


def test_lines_are_added_once_and_read_in_order(queue: QueueDatabase) -> None:
    with queue.writing() as connection:
        batches.put(connection, batch(1))
        batches.add_lines(connection, [line(number) for number in (3, 1, 2, 4)])
        batches.add_lines(connection, [line(number, "batch_2") for number in (1, 2)])
        claimed = requests.claim(connection, owner=queue.server, batch="batch_1", limit=3)
        assert [each.line for each in claimed] == [1, 2, 3]
        requests.finish(connection, claimed[1].id, "done", StoredAnswer(200, b'{"a":1}'), NOW)
        requests.finish(connection, claimed[2].id, "failed", StoredAnswer(400, b"{}"), NOW)
        batches.add_lines(connection, [line(number) for number in (1, 2, 3, 4)])  # after a restart: nothing changes
        assert batches.line_counts(connection, "batch_1") == {"running": 1, "done": 1, "failed": 1, "queued": 1}
        found = batches.answers(connection, "batch_1", 0, 3)
        assert [(each.line, each.state, each.status, each.document) for each in found] == [
            (1, "running", None, None),
            (2, "done", 200, b'{"a":1}'),
            (3, "failed", 400, b"{}"),
        ]
        assert [each.line for each in batches.answers(connection, "batch_1", 3, 9)] == [4]


def test_lines_go_with_the_end_of_their_batch(queue: QueueDatabase) -> None:
    with queue.writing() as connection:
        for number in (1, 2):
            batches.put(connection, batch(number))
            batches.add_lines(connection, [line(each, f"batch_{number}") for each in range(3)])
        requests.put(connection, [replace(line(1), id="cmpl-alone", batch=None, line=None)])
        assert batches.ended_with_lines(connection) == []
        batches.change(connection, "batch_1", OPEN, NOW, status="completed")
        assert batches.ended_with_lines(connection) == ["batch_1"]
        assert batches.drop_lines(connection, "batch_1", 2) == 2
        assert batches.drop_lines(connection, "batch_1", 2) == 1
        assert batches.ended_with_lines(connection) == []
        assert batches.line_counts(connection, "batch_1") == {}
        assert batches.line_counts(connection, "batch_2") == {"queued": 3}
        assert requests.get(connection, "cmpl-alone") is not None
        assert batches.ended_before(connection, NOW) == [] and batches.ended_before(connection, NOW + 1) == ["batch_1"]
        batches.remove(connection, ["batch_1"])
        assert batches.get(connection, "batch_1") is None


def test_batches_of_servers_that_are_gone_are_taken_over(queue: QueueDatabase) -> None:
    mine, owners = queue.server, {1: None, 2: 99, 3: queue.server}
    with queue.writing() as connection:
        for number, owner in owners.items():
            batches.put(connection, batch(number, owner=owner))
        batches.put(connection, batch(4, status="completed"))
        assert [(each.id, each.owner) for each in batches.adopt(connection, mine)] == [
            ("batch_1", mine),
            ("batch_2", mine),
        ]
        assert batches.adopt(connection, 98) == []
        batches.change(connection, "batch_3", CHECKED, NOW, status="cancelling")
        assert batches.cancelling(connection, mine) == ["batch_3"] and batches.cancelling(connection, 98) == []
        batches.leave(connection, mine)
        assert len(batches.adopt(connection, mine)) == 3


def test_many_lines_are_added_lot_by_lot(queue: QueueDatabase) -> None:
    count = 10_000
    for first in range(0, count, 500):
        with queue.writing(synced=False) as connection:
            batches.add_lines(connection, [line(number) for number in range(first, first + 500)])
    with queue.reading() as connection:
        assert batches.line_counts(connection, "batch_1") == {"queued": count}


@pytest.mark.parametrize("status", get_args(Status))
def test_lines_run_of_batches_that_are_checked_or_in_progress(queue: QueueDatabase, status: Status) -> None:
    with queue.writing() as connection:
        batches.put(connection, replace(batch(1), status=status))
        expected = {"batch_1"} if status in ("validating", "in_progress") else set()
        assert batches.running(connection, ["batch_1"]) == expected


@pytest.mark.postgres
def test_a_batch_does_not_stop_while_a_line_of_it_begins(postgres_server: str) -> None:
    url = postgres.new_database(postgres_server)
    with closing(QueueDatabase(url)) as first, closing(QueueDatabase(url)) as second:
        with first.writing() as connection:
            batches.put(connection, batch(1))
        with first.writing() as connection:
            assert batches.running(connection, ["batch_1"], hold=True) == {"batch_1"}
            with pytest.raises(StoreBusy), second.writing() as other:
                other.execute(text("SET LOCAL lock_timeout = '200ms'"))
                batches.change(other, "batch_1", CHECKED, NOW, status="cancelling")
        with second.writing() as other:
            assert batches.change(other, "batch_1", CHECKED, NOW, status="cancelling")
            assert batches.running(other, ["batch_1"], hold=True) == set()
