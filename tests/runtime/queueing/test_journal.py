"""The journal: writes of many tasks in few transactions, in order; a failed one harms no other."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event, text

from runtime.queueing import requests
from runtime.queueing.database import QueueDatabase
from runtime.queueing.journal import Journal
from tests import postgres
from tests.runtime.queueing.test_requests import GIVEN_UP, NOW, made, put
from zoo.errors import InputError, StoreError, StoreFull


def test_events_of_many_streams_share_transactions_and_keep_their_order(queue: QueueDatabase) -> None:
    put(queue, *(made(i, state="running") for i in range(8)))

    async def stream(journal: Journal, number: int) -> None:
        for ordinal in range(20):
            await journal.append(f"cmpl-{number}", ordinal, b"%d" % ordinal)

    async def main() -> int:
        journal = Journal(queue)
        await asyncio.gather(*(stream(journal, number) for number in range(8)))
        await journal.close()
        assert journal.counts.appends == 160
        return journal.counts.commits

    assert asyncio.run(main()) <= 80
    with queue.reading() as connection:
        for number in range(8):
            assert requests.events(connection, f"cmpl-{number}") == [b"%d" % i for i in range(20)]


def test_an_append_is_readable_once_it_has_returned(queue: QueueDatabase) -> None:
    put(queue, made(1, state="running"))

    async def main() -> None:
        journal = Journal(queue)
        for ordinal in range(5):
            await journal.append("cmpl-1", ordinal, b"x")
            with queue.reading() as connection:
                assert len(requests.events(connection, "cmpl-1")) == ordinal + 1
        await journal.close()

    asyncio.run(main())


def test_a_failed_write_is_undone_alone(queue: QueueDatabase) -> None:
    put(queue, made(1, state="running"), made(2, state="running"))

    def broken(connection: Connection) -> None:
        requests.put(connection, [made(5)])
        raise ValueError("broken")

    async def main() -> None:
        journal = Journal(queue, gather=0.2)
        await journal.append("cmpl-1", 0, b"first")
        outcomes = await asyncio.gather(
            journal.append("cmpl-1", 0, b"again"),
            journal.append("cmpl-2", 0, b"other"),
            journal.write(broken),
            journal.write(partial(requests.put, requests=[made(6)])),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [StoreError, bool, ValueError, type(None)]
        await journal.close()

    asyncio.run(main())
    with queue.reading() as connection:
        assert requests.events(connection, "cmpl-1") == [b"first"]
        assert requests.events(connection, "cmpl-2") == [b"other"]
        assert requests.get(connection, "cmpl-5") is None
        assert requests.get(connection, "cmpl-6") is not None


def test_only_a_transaction_of_which_a_part_has_failed_has_savepoints(queue: QueueDatabase) -> None:
    put(queue, made(1, state="running"), made(2, state="running"))
    statements: list[str] = []
    calls: list[str] = []
    event.listen(queue._database.engine, "savepoint", lambda _connection, name: statements.append(name))

    def add(number: int, connection: Connection) -> int:
        calls.append(f"add {number}")
        requests.put(connection, [made(number)])
        return number

    def broken(connection: Connection) -> None:
        calls.append("broken")
        requests.finish(connection, "cmpl-2", "failed", GIVEN_UP, NOW)
        raise ValueError("broken")

    async def main() -> None:
        journal = Journal(queue, gather=0.2)
        good = [journal.append("cmpl-1", 0, b"a"), journal.write(partial(add, 5))]
        assert await asyncio.gather(*good) == [True, 5]
        assert (statements, calls) == ([], ["add 5"])
        assert (journal.counts.appends, journal.counts.writes, journal.counts.failures) == (1, 1, 0)
        parts = [
            journal.append("cmpl-1", 1, b"b"), journal.write(partial(add, 6)), journal.write(broken),
            journal.write(partial(add, 7)), journal.append("cmpl-2", 0, b"c"),
        ]  # fmt: skip
        outcomes = await asyncio.gather(*parts, return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["True", "6", "broken", "7", "True"]
        assert calls[1:] == ["add 6", "broken", "add 6", "broken", "add 7"]
        assert len(statements) == len(parts)
        assert (journal.counts.appends, journal.counts.writes, journal.counts.failures) == (3, 4, 1)
        await journal.close()

    asyncio.run(main())
    with queue.reading() as connection:
        assert [requests.events(connection, name) for name in ("cmpl-1", "cmpl-2")] == [[b"a", b"b"], [b"c"]]
        assert requests.unended_of(connection, [f"cmpl-{n}" for n in range(9)]) == {
            f"cmpl-{n}" for n in (1, 2, 5, 6, 7)
        }


def test_events_of_a_request_that_has_ended_are_not_written(queue: QueueDatabase) -> None:
    put(queue, made(1, state="running"), made(2, state="running"))

    async def main() -> None:
        journal = Journal(queue, gather=0.2)
        assert await journal.append("cmpl-1", 0, b"a")
        end = partial(requests.finish, request="cmpl-1", state="cancelled", given=GIVEN_UP, now=NOW)
        await journal.write(end)
        both = asyncio.gather(journal.append("cmpl-1", 1, b"b"), journal.append("cmpl-2", 0, b"c"))
        assert await both == [False, True]
        await journal.close()

    asyncio.run(main())
    with queue.reading() as connection:
        assert [requests.events(connection, name) for name in ("cmpl-1", "cmpl-2")] == [[], [b"c"]]


def test_only_events_do_not_wait_for_the_disk(queue: QueueDatabase) -> None:
    """A write's transaction is synced, also if events are in it."""
    put(queue, made(1, state="running"))
    ask = "PRAGMA synchronous" if queue.is_sqlite else "SHOW synchronous_commit"
    found: list[object] = []
    event.listen(queue._database.engine, "commit", lambda it: found.append(it.exec_driver_sql(ask).scalar()))

    def unsynced() -> bool:
        asked, found[:] = set(found), []
        assert asked in ({1}, {2}, {"off"}, {"on"})
        return asked in ({1}, {"off"})

    async def main() -> None:
        journal = Journal(queue, gather=0.2)
        for ordinal in range(2):
            await journal.append("cmpl-1", ordinal, b"a")
            assert unsynced()
        await journal.write(partial(requests.put, requests=[made(2)]))
        assert not unsynced()
        await journal.write(partial(requests.put, requests=[made(3)]), synced=False)
        assert unsynced()
        await asyncio.gather(
            journal.append("cmpl-1", 2, b"b"), journal.write(partial(requests.put, requests=[made(4)]))
        )
        assert not unsynced()
        again = journal.append("cmpl-1", 2, b"b"), journal.write(partial(requests.put, requests=[made(5)]))
        outcomes = await asyncio.gather(*again, return_exceptions=True)
        assert [type(each) for each in outcomes] == [StoreError, type(None)]
        assert not unsynced(), "a transaction that is done again is what it was"
        await journal.close()

    asyncio.run(main())


def test_writes_keep_their_place_among_events(queue: QueueDatabase) -> None:
    put(queue, made(1, state="running"))

    async def main() -> None:
        journal = Journal(queue, gather=0.2)
        first = asyncio.ensure_future(journal.append("cmpl-1", 0, b"a"))
        end = asyncio.ensure_future(
            journal.write(
                lambda connection: requests.finish(connection, "cmpl-1", "done", GIVEN_UP, NOW),
            )
        )
        await asyncio.gather(first, end)
        await journal.close()

    asyncio.run(main())
    with queue.reading() as connection:
        assert requests.events(connection, "cmpl-1") == []


def test_a_lost_database_is_an_error_of_each_write_and_no_hang(queue: QueueDatabase) -> None:
    async def main() -> None:
        journal = Journal(queue)
        queue.close()
        outcomes = await asyncio.gather(
            journal.append("cmpl-1", 0, b"a"),
            journal.write(partial(requests.put, requests=[made(1)])),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [StoreError, StoreError]
        await journal.close()
        with pytest.raises(StoreError):
            await journal.append("cmpl-1", 1, b"a")

    asyncio.run(main())


def outcomes_of(queue: QueueDatabase, *writes: Callable[[Journal], Awaitable[Any]]) -> list[Any]:
    """Return the results of writes of one transaction, or what they raise."""

    async def main() -> list[Any]:
        journal = Journal(queue)
        async with asyncio.timeout(30):
            with journal._change:  # its thread takes all of them at once
                tasks = [asyncio.ensure_future(each(journal)) for each in writes]
                await asyncio.sleep(0)
            found = await asyncio.gather(*tasks, return_exceptions=True)
        await journal.close()
        return found

    return asyncio.run(main())


def appending(ordinal: int) -> Callable[[Journal], Awaitable[bool]]:
    return lambda journal: journal.append("cmpl-1", ordinal, b"a")


def writing(work: Callable[[Connection], Any]) -> Callable[[Journal], Awaitable[Any]]:
    return lambda journal: journal.write(work)


def adding(number: int, **changes: object) -> Callable[[Journal], Awaitable[Any]]:
    return writing(partial(requests.put, requests=[made(number, **changes)]))


def test_a_transaction_that_cannot_be_committed_harms_no_other(queue: QueueDatabase) -> None:
    """Constraints that are checked at its end."""
    put(queue, made(1, state="running"))

    def late(connection: Connection) -> None:
        if queue.is_sqlite:
            connection.execute(text("PRAGMA defer_foreign_keys = ON"))
            connection.execute(text("INSERT INTO queue_events VALUES ('none', 0, '')"))
        else:
            connection.execute(text("CREATE TABLE late (a INTEGER UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
            connection.execute(text("INSERT INTO late VALUES (1), (1)"))

    failed = outcomes_of(queue, appending(0), writing(late), adding(2))
    assert [type(each) for each in failed] == [StoreError] * 3
    assert outcomes_of(queue, appending(0), adding(3)) == [True, None]
    with queue.reading() as connection:
        assert requests.events(connection, "cmpl-1") == [b"a"]
        assert requests.unended_of(connection, ["cmpl-1", "cmpl-2", "cmpl-3"]) == {"cmpl-1", "cmpl-3"}


def test_a_write_of_which_the_task_was_cancelled_keeps_no_other_waiting(queue: QueueDatabase) -> None:
    put(queue, made(1, state="running"))

    async def main() -> None:
        journal = Journal(queue, gather=0.2)
        gone, stays = (asyncio.create_task(journal.append("cmpl-1", ordinal, b"a")) for ordinal in range(2))
        await asyncio.sleep(0)
        gone.cancel()
        async with asyncio.timeout(30):
            assert await stays
        await journal.close()

    asyncio.run(main())
    with queue.reading() as connection:
        assert requests.events(connection, "cmpl-1") == [b"a"] * 2


@contextmanager
def full(queue: QueueDatabase) -> Iterator[None]:
    """Leave no room for more than a few pages."""
    with queue.writing() as connection:
        pages = connection.execute(text("PRAGMA page_count")).scalar_one()
        connection.execute(text(f"PRAGMA max_page_count = {pages + 2}"))
    yield
    with queue.writing() as connection:
        connection.execute(text(f"PRAGMA max_page_count = {1 << 30}"))


def test_what_a_full_disk_has_undone_is_said_to_be_that(tmp_path: Path) -> None:
    """SQLite undoes the whole transaction where it has no room, and with it all savepoints."""
    with closing(QueueDatabase(tmp_path / "queue")) as queue:
        put(queue, made(1, state="running"))
        with full(queue):
            failed = outcomes_of(queue, appending(0), adding(2, body=os.urandom(1 << 20)), adding(3))
            assert [type(each) for each in failed] == [StoreFull] * 3
        assert outcomes_of(queue, appending(0), adding(2)) == [True, None]
        with queue.reading() as connection:
            assert requests.events(connection, "cmpl-1") == [b"a"]
            assert requests.get(connection, "cmpl-3") is None


def test_no_outcome_keeps_the_others_of_a_transaction_waiting(queue: QueueDatabase) -> None:
    """A future takes no StopIteration, the exception of a defect with `next`."""
    put(queue, made(1, state="running"))
    found = outcomes_of(queue, writing(lambda _: next(iter(()))), appending(0))
    assert isinstance(found[0], RuntimeError) and found[1] is True


@pytest.fixture
def shared(postgres_server: str) -> Iterator[QueueDatabase]:
    with closing(QueueDatabase(postgres.new_database(postgres_server))) as queue:
        put(queue, made(1, state="running"))
        yield queue


@pytest.mark.postgres
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_a_session_that_ends_within_a_transaction(shared: QueueDatabase, times: int, last: bool) -> None:
    """Once: all is done again, in another one. Each time: nothing is written, and each write has failed."""
    ended: list[int] = []

    def end(connection: Connection) -> None:
        if len(ended) < times:
            ended.append(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())
            connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    writes = [writing(end), appending(0), adding(2)]
    found = outcomes_of(shared, *writes[1:], writes[0]) if last else outcomes_of(shared, *writes)
    assert len(set(ended)) == times
    with shared.reading() as connection:
        there = requests.events(connection, "cmpl-1"), requests.get(connection, "cmpl-2")
    if times == 1:
        assert found == ([True, None, None] if last else [None, True, None]) and there == ([b"a"], made(2))
    else:
        assert [isinstance(each, StoreError) for each in found] == [True] * 3 and there == ([], None)
        assert outcomes_of(shared, appending(0), adding(2)) == [True, None]


@pytest.mark.postgres
def test_texts_that_postgresql_does_not_take_fail_alone(shared: QueueDatabase) -> None:
    """As bad input, not as a failure of the database."""
    found = outcomes_of(shared, appending(0), adding(2, model="a\0"), adding(3), appending(1))
    assert [type(each) for each in found] == [bool, InputError, type(None), bool]
    with pytest.raises(InputError), shared.reading() as connection:
        requests.get(connection, "a\0")
