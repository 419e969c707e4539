"""Usage in the queue: it comes with the end of a request, once, and stays until it is dropped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.queueing import requests, usage
from runtime.queueing.database import QueueDatabase
from runtime.queueing.records import StoredAnswer
from runtime.queueing.usage import RequestUsage
from tests.runtime.queueing.test_requests import DEAD, GIVEN_UP, NOW, made, put

ANSWER = StoredAnswer(200, b"{}")


def used(name: str, **changes: object) -> RequestUsage:
    row = RequestUsage("p", "org/m", "2026-01-31", 3, 5, 1, 80, name)
    return replace(row, **changes)  # type: ignore[arg-type]


def kept(queue: QueueDatabase) -> set[str]:
    with queue.reading() as connection:
        return {each.id for each in usage.kept(connection, usage.principals(connection), 99)}


def test_usage_comes_with_the_one_end_of_a_request(queue: QueueDatabase) -> None:
    put(queue, made(1, state="running"), made(2, state="running"))
    with queue.writing() as connection:
        requests.append(connection, [("cmpl-1", 0, b"a")])
        assert not requests.finish(connection, "cmpl-1", "cancelled", ANSWER, NOW, events=0, used=used("early"))
        assert requests.finish(connection, "cmpl-1", "done", ANSWER, NOW, used=used("a"))
        assert not requests.finish(connection, "cmpl-1", "done", ANSWER, NOW, used=used("late"))
        assert requests.finish(connection, "cmpl-2", "failed", ANSWER, NOW)
    assert kept(queue) == {"a"}
    with queue.reading() as connection:
        assert usage.kept(connection, ["p"], 9) == [used("a")] and usage.kept(connection, ["q"], 9) == []


def test_an_end_that_is_undone_leaves_no_usage(queue: QueueDatabase) -> None:
    put(queue, made(1, state="running"))
    with pytest.raises(RuntimeError), queue.writing() as connection:
        assert requests.finish(connection, "cmpl-1", "done", ANSWER, NOW, used=used("a"))
        raise RuntimeError
    assert kept(queue) == set()
    with queue.writing() as connection:
        assert requests.finish(connection, "cmpl-1", "done", ANSWER, NOW, used=used("b"))
    assert kept(queue) == {"b"}


def test_what_is_given_up_is_charged_nothing_and_usage_outlives_its_request(queue: QueueDatabase) -> None:
    put(queue, made(1, state="running", owner=DEAD, attempts=3), made(2, state="running"))
    with queue.writing() as connection:
        assert requests.recover(connection, GIVEN_UP, NOW) == ["cmpl-1"]
    assert kept(queue) == set()
    for name in ("first", "second"):  # a key comes again after the retention, and with it the id
        put(queue, made(2, state="running"))
        with queue.writing() as connection:
            assert requests.finish(connection, "cmpl-2", "done", ANSWER, NOW, used=used(name))
            requests.remove(connection, "cmpl-2")
    assert kept(queue) == {"first", "second"}


def test_kept_usage_is_summed_without_that_of_one_server_and_dropped_by_id(queue: QueueDatabase) -> None:
    most = (1 << 63) - 1
    with queue.writing() as connection:
        for row in (
            used("aa1", cost=most),
            used("aa2", cost=most, model="org/other"),
            used("bb1", cached_tokens=0),
            used("aa3", day="2026-02-01"),
            used("aa4", principal="q"),
        ):
            usage.put(connection, row)
    with queue.reading() as connection:
        found = {(each.principal, each.day): each for each in usage.sums(connection, "bb")}
        assert found["p", "2026-01-31"] == RequestUsage("p", "", "2026-01-31", 6, 10, 2, 2 * most, "")
        assert {place: each.generated_tokens for place, each in found.items()} == {
            ("p", "2026-01-31"): 10,
            ("p", "2026-02-01"): 5,
            ("q", "2026-01-31"): 5,
        }
        assert sum(each.generated_tokens for each in usage.sums(connection, "aa")) == 5
        assert usage.present(connection, ["aa1", "cc"]) == {"aa1"} and usage.present(connection, []) == set()
        assert len(usage.kept(connection, ["p"], 2)) == 2
    with queue.writing() as connection:
        usage.drop(connection, ["aa1", "aa2", "cc"])
    assert kept(queue) == {"bb1", "aa3", "aa4"}
