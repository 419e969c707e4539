"""The journal: writes of many tasks in few transactions, in order; a failed one harms no other."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from sqlalchemy import Connection, event

from runtime.queueing import requests
from runtime.queueing.database import QueueDatabase
from runtime.queueing.journal import Journal
from tests.runtime.queueing.test_requests import GIVEN_UP, NOW, made, put
from zoo.errors import StoreError


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
