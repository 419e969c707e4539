"""The store of one server: what is accepted and what is answered is on the disk before the call returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text

from runtime.queueing import batches, requests
from runtime.queueing.database import QueueDatabase
from runtime.queueing.journal import Journal
from runtime.server.durable.store import RequestStore
from tests import postgres
from tests.runtime.queueing.test_batches import NOW, batch, line
from tests.runtime.queueing.test_requests import GIVEN_UP, made
from zoo.errors import StoreBusy


def test_requests_and_answers_wait_for_the_disk_and_starts_do_not(tmp_path: Path, monkeypatch: Any) -> None:
    synced: list[bool] = []
    write = Journal.write

    async def spied(self: Journal, work: Callable[[Connection], Any], synced_: bool = True, **options: Any) -> Any:
        synced.append(options.get("synced", synced_))
        return await write(self, work, **options)

    monkeypatch.setattr(Journal, "write", spied)

    async def main(store: RequestStore) -> None:
        store.open()
        assert (await store.take_over(GIVEN_UP)).requests == []
        synced.clear()
        request = made(1, state="running")
        assert await store.put(request)
        assert not await store.put(made(1, seed=9))
        assert await store.finish("cmpl-1", "done", GIVEN_UP)
        assert not await store.finish("cmpl-1", "failed", GIVEN_UP)
        assert synced == [True] * 4
        await store.put(made(2))
        synced.clear()
        claimed = await store.claim(made(2))
        assert claimed is not None and (claimed.state, claimed.attempts) == ("running", 0)
        assert await store.begin(claimed, "m", "v")
        assert synced == [False] * 2
        assert await store.claim(request) is None
        await store.close()

    with closing(QueueDatabase(tmp_path / "queue")) as database:
        asyncio.run(main(RequestStore(database)))


def test_a_line_does_not_begin_once_its_batch_has_stopped(tmp_path: Path) -> None:
    """As where a broker gave it to another server: what it used then would be charged to no key."""

    async def main(store: RequestStore, queue: QueueDatabase) -> None:
        store.open()
        for number, stopped in ((1, False), (2, True)):
            with queue.writing() as connection:
                batches.put(connection, batch(number, status="in_progress"))
                batches.add_lines(connection, [line(at, f"batch_{number}") for at in range(2)])
                (claimed,) = requests.claim(connection, owner=queue.server, batch=f"batch_{number}", limit=1)
                if stopped:
                    batches.change(connection, f"batch_{number}", ("in_progress",), NOW, status="cancelling")
            assert await store.begin(claimed, "m", "v") is not stopped
            with queue.reading() as connection:
                begun = requests.begun_lines(connection, f"batch_{number}")
                assert [each.id for each in begun] == ([] if stopped else [claimed.id])
        await store.close()

    with closing(QueueDatabase(tmp_path / "queue")) as database:
        asyncio.run(main(RequestStore(database), database))


@pytest.mark.postgres
def test_no_server_stops_a_batch_while_another_one_begins_a_line_of_it(postgres_server: str) -> None:
    """It would not find what has begun, and charge it to no key."""
    shared = postgres.new_database(postgres_server)
    stop = partial(batches.change, batch="batch_1", since=("in_progress",), now=NOW, status="cancelling")

    async def main(store: RequestStore, queue: QueueDatabase, other: QueueDatabase) -> None:
        with queue.writing() as connection:
            batches.put(connection, batch(1, status="in_progress"))
            batches.add_lines(connection, [line(1)])
            (claimed,) = requests.claim(connection, owner=queue.server, batch="batch_1")

        def stop_beside(_: Connection) -> None:
            with pytest.raises(StoreBusy), other.writing() as connection:
                connection.execute(text("SET LOCAL lock_timeout = 100"))
                stop(connection)

        store.open()
        with store.journal._change:  # its thread takes both at once
            both = asyncio.gather(store.begin(claimed, "m", "v"), store.journal.write(stop_beside))
            await asyncio.sleep(0)
        assert await both == [True, None] and store.journal.counts.commits == 1
        with other.writing() as connection:
            assert stop(connection)
            assert [each.id for each in requests.begun_lines(connection, "batch_1")] == [claimed.id]
        await store.close()

    with closing(QueueDatabase(shared)) as first, closing(QueueDatabase(shared)) as second:
        asyncio.run(main(RequestStore(first), first, second))
