"""The queries of the queue on SQLite and PostgreSQL: what is accepted stays, ends once, and is given up late."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
from sqlalchemy import event, func, select, text

from runtime.queueing import requests
from runtime.queueing.database import QueueDatabase
from runtime.queueing.records import (
    DurableRequest,
    FileRange,
    State,
    StoredAnswer,
    decode_events,
    encode_events,
)
from runtime.queueing.schema import EventRow
from runtime.types import Logprob, PromptLogprobs, TokenEvent
from tests import postgres
from zoo.errors import StoreBusy

NOW = 1_700_000_000_000_000_000
GIVEN_UP = StoredAnswer(500, b'{"error":{}}')
#: A server that is dead: it never joined.
DEAD = 99


def made(number: int, **changes: object) -> DurableRequest:
    request = DurableRequest(
        id=f"cmpl-{number}", kind="completion", digest=b"d" * 32, seed=7, created=NOW + number, body=b"{}"
    )
    return replace(request, **changes)  # type: ignore[arg-type]


def put(queue: QueueDatabase, *given: DurableRequest) -> None:
    with queue.writing() as connection:
        requests.put(connection, given)


def states(queue: QueueDatabase) -> dict[str, str]:
    with queue.reading() as connection:
        return {f"cmpl-{i}": found.state for i in range(9) if (found := requests.get(connection, f"cmpl-{i}"))}


def test_a_request_comes_back_as_it_was_put(queue: QueueDatabase) -> None:
    whole = made(
        1,
        kind="chat",
        principal="p",
        key="k",
        body=None,
        source=FileRange("file-1", 5, 80),
        seed=2**62,
        deadline=NOW * 2,
        priority=-3,
        model="org/m",
        version="v",
        batch="batch-1",
        line=4,
    )
    put(queue, whole, made(2))
    with queue.reading() as connection:
        assert requests.get(connection, "cmpl-1") == whole
        assert requests.get(connection, "cmpl-2") == made(2)
        assert requests.get(connection, "cmpl-3") is None


def test_the_first_of_a_key_stays(queue: QueueDatabase) -> None:
    put(queue, made(1, principal="p", key="k"))
    put(queue, made(2, principal="p", key="k", digest=b"e" * 32), made(3, principal="q", key="k"), made(1, seed=9))
    assert states(queue) == {"cmpl-1": "queued", "cmpl-3": "queued"}
    with queue.reading() as connection:
        found = requests.by_key(connection, "p", "k"), requests.by_key(connection, "q", "k")
        assert [each and each.id for each in found] == ["cmpl-1", "cmpl-3"]
        assert requests.by_key(connection, "", "k") is None


def test_claims_go_by_priority_then_age_and_each_is_granted_once(queue: QueueDatabase) -> None:
    put(queue, made(3), made(1), made(2, priority=-1), made(4, batch="b", line=1), made(5, batch="b", line=0))
    with queue.writing() as connection:
        mine = queue.server
        first = requests.claim(connection, owner=mine, limit=2)
        assert [(each.id, each.state, each.attempts) for each in first] == [
            ("cmpl-2", "running", 0),
            ("cmpl-1", "running", 0),
        ]
        assert [each.id for each in requests.claim(connection, owner=mine, ids=["cmpl-1", "cmpl-3"])] == ["cmpl-3"]
        assert [each.id for each in requests.claim(connection, owner=mine, batch="b")] == ["cmpl-4", "cmpl-5"]
        assert requests.claim(connection, owner=mine) == []
        assert requests.get(connection, "cmpl-2") == first[0]
        assert requests.counts(connection) == {"running": 5}
        assert requests.counts(connection, "b") == {"running": 2}


@pytest.mark.parametrize("state", ["done", "failed", "cancelled"])
def test_a_request_ends_once_and_its_events_go(queue: QueueDatabase, state: State) -> None:
    put(queue, made(1, state="running"))
    with queue.writing(synced=False) as connection:
        requests.append(connection, [("cmpl-1", 0, b"a"), ("cmpl-1", 1, b"b")])
    answer = StoredAnswer(200, b'{"text":"x"}' * 99, b"data: x\n\n")
    with queue.writing() as connection:
        assert requests.events(connection, "cmpl-1") == [b"a", b"b"]
        assert requests.finish(connection, "cmpl-1", state, answer, NOW)
        assert not requests.finish(connection, "cmpl-1", "done", StoredAnswer(500, b"other"), NOW + 1)
    with queue.reading() as connection:
        assert requests.answer(connection, "cmpl-1") == answer
        assert requests.events(connection, "cmpl-1") == []
        found = requests.get(connection, "cmpl-1")
        assert found is not None
        assert (found.state, found.status, found.ended) == (state, 200, NOW)
        assert requests.answer(connection, "cmpl-2") is None


def test_no_event_is_written_twice(queue: QueueDatabase) -> None:
    put(queue, made(1, state="running"))
    with queue.writing() as connection:
        requests.append(connection, [("cmpl-1", 0, b"a")])
    with pytest.raises(Exception, match="database failed"), queue.writing() as connection:
        requests.append(connection, [("cmpl-1", 0, b"other")])
    with queue.reading() as connection:
        assert requests.events(connection, "cmpl-1") == [b"a"]


def test_what_a_dead_server_ran_is_queued_again_and_given_up_after_three_deaths_without_progress(
    queue: QueueDatabase,
) -> None:
    put(queue, made(1), made(2), made(3))
    for death in range(3):
        with queue.writing() as connection:
            ids = ["cmpl-1", "cmpl-2"]
            assert requests.claim(connection, owner=DEAD, ids=ids)[0].attempts == death
            for each in ids:
                requests.begin(connection, each, "org/m", "v")
            requests.append(connection, [("cmpl-2", death, b"a")])
            assert requests.recover(connection, GIVEN_UP, NOW) == (["cmpl-1"] if death == 2 else [])
    assert states(queue) == {"cmpl-1": "dead", "cmpl-2": "queued", "cmpl-3": "queued"}
    with queue.reading() as connection:
        assert requests.answer(connection, "cmpl-1") == GIVEN_UP
        assert [each.id for each in requests.unfinished(connection)] == ["cmpl-2", "cmpl-3"]


def test_progress_of_an_earlier_life_is_no_progress(queue: QueueDatabase) -> None:
    put(queue, made(1))
    for death in range(4):
        with queue.writing() as connection:
            requests.claim(connection, owner=DEAD)
            requests.begin(connection, "cmpl-1", "org/m", "v")
            if death == 0:
                requests.append(connection, [("cmpl-1", 0, b"a")])
            assert requests.recover(connection, GIVEN_UP, NOW) == (["cmpl-1"] if death == 3 else [])


def test_a_claim_that_had_not_begun_is_no_attempt(queue: QueueDatabase) -> None:
    """Lines that wait for their seats while servers die are not the cause."""
    put(queue, made(1))
    for _ in range(5):
        with queue.writing() as connection:
            assert requests.claim(connection, owner=DEAD)[0].attempts == 0
            assert requests.recover(connection, GIVEN_UP, NOW) == []
    assert states(queue) == {"cmpl-1": "queued"}


def test_what_a_living_server_has_is_left_to_it(queue: QueueDatabase) -> None:
    put(queue, *(made(i) for i in range(1, 5)), made(5, batch="b", line=0), made(6, owner=DEAD))
    with queue.writing() as connection:
        mine = queue.server
        requests.claim(connection, owner=mine, ids=["cmpl-1"])
        requests.claim(connection, owner=DEAD, ids=["cmpl-2"])
        requests.recover(connection, GIVEN_UP, NOW)
        assert [each.id for each in requests.adopt(connection, mine)] == ["cmpl-2", "cmpl-3", "cmpl-4", "cmpl-6"]
        assert requests.adopt(connection, 98) == requests.claim(connection, owner=98, ids=["cmpl-3"]) == []
        assert [each.id for each in requests.claim(connection, owner=mine, ids=["cmpl-3"])] == ["cmpl-3"]
        requests.release(connection, 98)
        requests.release(connection, mine, ["cmpl-1", "cmpl-3"], leave=False)
        found = {each.id: (each.state, each.owner) for each in requests.unfinished(connection, batches=False)}
        assert found == {f"cmpl-{i}": ("queued", mine) for i in (1, 2, 3, 4, 6)}
        requests.release(connection, mine)
        assert {each.owner for each in requests.unfinished(connection)} == {None}


def test_another_server_sees_events_and_the_end(queue: QueueDatabase) -> None:
    put(queue, made(1, state="running", owner=queue.server), made(2, owner=DEAD))
    with queue.writing() as connection:
        requests.append(connection, [("cmpl-1", 0, b"a"), ("cmpl-1", 3, b"b")])
        found = requests.watched(connection, "cmpl-1", 2)
        assert found is not None
        assert (found.state, found.owner, found.owned, found.events) == ("running", queue.server, True, [b"b"])
        assert requests.ended_of(connection, ["cmpl-1", "cmpl-2"]) == []
        assert not requests.finish(connection, "cmpl-1", "cancelled", GIVEN_UP, NOW, events=3)  # made without the last
        assert requests.unended_of(connection, ["cmpl-1", "cmpl-2", "cmpl-3"]) == {"cmpl-1", "cmpl-2"}
        assert requests.finish(connection, "cmpl-1", "cancelled", GIVEN_UP, NOW, events=4)
        assert requests.unended_of(connection, ["cmpl-1", "cmpl-2", "cmpl-3"]) == {"cmpl-2"}
        assert requests.ended_of(connection, ["cmpl-1", "cmpl-2"]) == ["cmpl-1"]
        other = requests.watched(connection, "cmpl-2", -1)
        assert other is not None and not other.owned
        assert requests.watched(connection, "cmpl-3", -1) is None


def test_what_is_put_down_unharmed_has_no_attempt_more(queue: QueueDatabase) -> None:
    put(queue, made(1), made(2))
    with queue.writing() as connection:
        for _ in range(5):
            assert [each.attempts for each in requests.claim(connection, owner=DEAD)] == [0, 0]
            requests.begin(connection, "cmpl-1", "org/m", "v")
            requests.release(connection, DEAD, ["cmpl-1"])
            requests.release(connection, DEAD)
    assert states(queue) == {"cmpl-1": "queued", "cmpl-2": "queued"}


def test_old_answers_expire_with_all_their_rows(queue: QueueDatabase) -> None:
    put(queue, *(made(i, state="running") for i in range(4)), made(5, state="running", batch="b", line=0))
    with queue.writing() as connection:
        for i in (1, 2, 5):
            requests.finish(connection, f"cmpl-{i}", "done", GIVEN_UP, NOW + i)
        assert requests.append(connection, [("cmpl-1", 8, b"late"), ("cmpl-3", 0, b"a")]) == {"cmpl-3"}
        assert requests.expire(connection, NOW + 2) == 1
        assert connection.execute(select(func.count()).select_from(EventRow)).scalar() == 1
    assert sorted(states(queue)) == ["cmpl-0", "cmpl-2", "cmpl-3", "cmpl-5"]


def test_unfinished_requests_are_those_of_batches_or_the_others(queue: QueueDatabase) -> None:
    put(queue, made(1, state="running"), made(2, batch="b", line=0), made(3), made(4, state="running"))
    with queue.writing() as connection:
        requests.finish(connection, "cmpl-4", "done", GIVEN_UP, NOW)
        requests.begin(connection, "cmpl-1", "org/m", "v1")
        found = {
            batches: [each.id for each in requests.unfinished(connection, batches)] for batches in (None, True, False)
        }
        assert found == {None: ["cmpl-1", "cmpl-2", "cmpl-3"], True: ["cmpl-2"], False: ["cmpl-1", "cmpl-3"]}
        assert [each.body for each in requests.unfinished(connection)] == [None] * 3
        first = requests.get(connection, "cmpl-1")
        assert first is not None
        assert (first.model, first.version) == ("org/m", "v1")


def test_events_come_back_as_they_were() -> None:
    top = (Logprob(3, -0.5), Logprob(9, -2.25))
    events = [
        TokenEvent("r/0", "r", 0, 5, -0.1, top, (PromptLogprobs("r/0", 1, top, (top, ())),), served="org/x", cached=48),
        TokenEvent("r/11", "r", 0, 6),
        TokenEvent("r/0", "r", 1, None, finish="error", error="why"),
    ]
    assert decode_events("r", [encode_events(events[:1]), encode_events(events[1:])]) == events


@pytest.mark.postgres
def test_no_server_ends_a_request_while_another_one_writes_its_events(postgres_server: str) -> None:
    """Else they would be written behind its end, and be there for good."""
    shared = postgres.new_database(postgres_server)
    with closing(QueueDatabase(shared)) as first, closing(QueueDatabase(shared)) as second:
        put(first, made(1, state="running"))
        with first.writing(synced=False) as connection:
            assert requests.append(connection, [("cmpl-1", 0, b"a")]) == {"cmpl-1"}
            with pytest.raises(StoreBusy), second.writing() as other:
                other.execute(text("SET LOCAL lock_timeout = 100"))
                requests.finish(other, "cmpl-1", "cancelled", GIVEN_UP, NOW)
        with second.writing() as other:
            assert requests.finish(other, "cmpl-1", "cancelled", GIVEN_UP, NOW)
            assert other.execute(select(func.count()).select_from(EventRow)).scalar_one() == 0


@pytest.mark.postgres
def test_no_events_are_written_while_another_server_ends_a_request_behind_those_that_it_has_seen(
    postgres_server: str,
) -> None:
    """Clients would have seen more than the answer that is stored was made from."""
    shared, tried = postgres.new_database(postgres_server), list[bool]()
    with closing(QueueDatabase(shared)) as first, closing(QueueDatabase(shared)) as second:
        put(first, made(1, state="running"))

        @event.listens_for(second._database.engine, "before_cursor_execute")
        def end(_connection: object, _cursor: object, statement: str, *_: object) -> None:
            if statement.startswith("UPDATE queue_requests"):
                tried.append(True)
                with pytest.raises(StoreBusy), first.writing() as connection:
                    connection.execute(text("SET LOCAL lock_timeout = 100"))
                    requests.append(connection, [("cmpl-1", 0, b"a")])

        with second.writing() as other:
            assert requests.finish(other, "cmpl-1", "cancelled", GIVEN_UP, NOW, events=0)
        assert tried
        with first.writing() as connection:
            assert requests.append(connection, [("cmpl-1", 0, b"a")]) == set()
