"""Lines are fed batch by batch, so many at a time, however they end; suspects alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from runtime.queueing import batches, files, requests
from runtime.queueing.database import QueueDatabase
from runtime.queueing.files import CHUNK, StoredFile
from runtime.queueing.journal import Journal
from runtime.queueing.records import DurableRequest, FileRange, StoredAnswer
from runtime.server.batches.feeding import LineFeeder
from zoo.errors import StoreError

SEATS = 8


class Runs:
    """Ends a line once `let` has a place for it; notes what ran beside what."""

    def __init__(self, journal: Journal, let: int = 1 << 20) -> None:
        self.journal = journal
        self.let = asyncio.Semaphore(let)
        self.begun: list[DurableRequest] = []
        self.bodies: list[bytes] = []
        self.inside: set[str] = set()
        self.beside: list[frozenset[str]] = []
        self.broken = 0
        self.busy = False

    async def run(self, request: DurableRequest, raw: bytes, seat: AbstractAsyncContextManager[None]) -> None:
        self.begun.append(request)
        self.bodies.append(raw)
        async with seat:
            self.inside.add(request.id)
            self.beside.append(frozenset(self.inside))
            try:
                await asyncio.wait_for(self.let.acquire(), 60)
                if self.broken:
                    self.broken -= 1
                    raise StoreError("the disk is full")
            finally:
                self.inside.remove(request.id)
        answer = StoredAnswer(200, b"{}")
        end = partial(requests.finish, request=request.id, state="done", given=answer, now=time.time_ns())
        await self.journal.write(end)

    async def cancel(self, request: DurableRequest) -> None:
        raise NotImplementedError


@asynccontextmanager
async def feeding(folder: Path, lines: dict[str, int], **runs: int) -> AsyncIterator[tuple[LineFeeder, Runs]]:
    """Make a feeder, and batches with so many lines. A line's body is its number in ten characters."""
    database = QueueDatabase(str(folder / "queue"))
    journal = Journal(database)

    def fill(connection: Connection) -> None:
        files.create(connection, StoredFile("file-1", "", "in", "batch", 1))
        content = b"".join(b"%10d" % number for number in range(3 * CHUNK // 10))
        for number in range(3):
            files.append(connection, "file-1", number, content[number * CHUNK : (number + 1) * CHUNK])
        for batch, count in lines.items():
            batches.add_lines(connection, [stored(batch, number) for number in range(count)])

    await journal.write(fill)
    made = Runs(journal, **runs)
    try:
        yield LineFeeder(database, journal, made, SEATS, lambda: made.busy), made
    finally:
        await journal.close()
        database.close()


def stored(batch: str, number: int) -> DurableRequest:
    at = number * 1000
    source = FileRange("file-1", at * 10, 10)
    return DurableRequest(f"{batch}-{number}", "completion", b"", 7, 1, source=source, batch=batch, line=number)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def test_lines_are_claimed_in_order_and_only_so_many_at_once(tmp_path: Path) -> None:
    async def go() -> None:
        async with feeding(tmp_path, {"a": 200, "b": 3}, let=0) as (feeder, runs):
            feeds = asyncio.gather(feeder.feed("a"), feeder.feed("b"))
            await until(lambda: len(runs.inside) == SEATS - 1)  # a seat is left to interactive requests
            await asyncio.sleep(0.05)
            assert feeder.under_way == 2 * SEATS and len(runs.inside) == SEATS - 1
            for _ in range(203):
                runs.let.release()
                await asyncio.sleep(0)
                assert feeder.under_way <= 2 * SEATS
            await asyncio.wait_for(feeds, 60)
            assert [request.line for request in runs.begun] == [*range(200), 0, 1, 2]
            assert [request.batch for request in runs.begun[200:]] == ["b"] * 3
            assert [int(body) for body in runs.bodies[:200]] == [number * 1000 for number in range(200)]
            assert feeder.under_way == 0 and max(map(len, runs.beside)) == SEATS - 1
            counts = runs.journal.database
            with counts.reading() as connection:
                assert batches.line_counts(connection, "a") == {"done": 200}

    asyncio.run(go())


def test_few_lines_are_open_while_interactive_requests_are_there(tmp_path: Path) -> None:
    async def go() -> None:
        async with feeding(tmp_path, {"a": 40}, let=0) as (feeder, runs):
            runs.busy = True
            feed = asyncio.create_task(feeder.feed("a"))
            await until(lambda: len(runs.inside) == 1)
            for done in range(1, 5):
                runs.let.release()
                await until(lambda done=done: len(runs.beside) == done + 1)  # type: ignore[misc]
            assert max(map(len, runs.beside)) == 1
            runs.busy = False
            await until(lambda: len(runs.inside) == SEATS - 1)
            for _ in range(40):
                runs.let.release()
            await asyncio.wait_for(feed, 60)

    asyncio.run(go())


def test_a_store_that_fails_makes_lines_wait_not_fail(tmp_path: Path) -> None:
    async def go() -> None:
        async with feeding(tmp_path, {"a": 3}) as (feeder, runs):
            runs.broken = 2
            await asyncio.wait_for(feeder.feed("a"), 60)
            assert len(runs.begun) == 5
            with runs.journal.database.reading() as connection:
                assert batches.line_counts(connection, "a") == {"done": 3}

    asyncio.run(go())


def test_what_is_stopped_is_queued_again(tmp_path: Path) -> None:
    async def go() -> None:
        async with feeding(tmp_path, {"a": 30, "b": 2}, let=4) as (feeder, runs):
            feed = asyncio.create_task(feeder.feed("a"))
            await until(lambda: feeder.under_way == 2 * SEATS and len(runs.begun) >= 2 * SEATS + 4)
            feed.cancel()
            await asyncio.gather(feed, return_exceptions=True)
            assert not runs.inside
            await feeder.put_down("a")
            assert feeder.under_way == 0
            with runs.journal.database.reading() as connection:
                assert batches.line_counts(connection, "a") == {"done": 4, "queued": 26}
                assert {each.attempts for each in requests.unfinished(connection)} == {0}
            for _ in range(40):
                runs.let.release()
            await asyncio.wait_for(asyncio.gather(feeder.feed("a"), feeder.feed("b")), 60)

    asyncio.run(go())


def test_lines_that_servers_died_with_run_one_at_a_time(tmp_path: Path) -> None:
    async def go() -> None:
        async with feeding(tmp_path, {"a": 8}) as (feeder, runs):

            def died(connection: Connection) -> None:
                for _ in range(2):
                    for each in requests.claim(connection, owner=99, ids=["a-1", "a-4", "a-6"]):
                        requests.begin(connection, each.id, "m", "v")
                    requests.recover(connection, StoredAnswer(500, b"{}"), 1)

            await runs.journal.write(died)
            await asyncio.wait_for(feeder.feed("a"), 60)
            assert len(runs.begun) == 8
            assert all(len(inside & {"a-1", "a-4", "a-6"}) <= 1 for inside in runs.beside)

    asyncio.run(go())


class Broker:
    """Gives these lines, one at a time; fails before each."""

    def __init__(self, lines: list[DurableRequest]) -> None:
        self.lines = lines
        self.acknowledged: list[str] = []
        self.fails = True

    async def put(self, given: object) -> None:
        raise NotImplementedError

    async def claim(self, most: int) -> list[DurableRequest]:
        self.fails = not self.fails
        if not self.fails:
            raise StoreError("the disk is full")
        if not self.lines:
            await asyncio.Event().wait()
        return [self.lines.pop(0)]

    async def ack(self, request: str) -> None:
        self.acknowledged.append(request)

    async def release(self, ids: object) -> None:
        raise NotImplementedError


def test_lines_of_a_broker_go_on_after_its_claims_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.server.batches.feeding._RETRY", 0.01)

    async def go() -> None:
        async with feeding(tmp_path, {"a": 3}) as (feeder, _):
            broker = Broker([stored("a", number) for number in range(3)])
            feed = asyncio.create_task(feeder.feed_broker(broker))
            await until(lambda: len(broker.acknowledged) == 3 or feed.done())
            assert not feed.done() and sorted(broker.acknowledged) == ["a-0", "a-1", "a-2"]
            feed.cancel()

    asyncio.run(go())


def test_a_line_whose_failure_cannot_be_stored_ends_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.server.batches.feeding._RETRY", 0.01)

    async def go() -> None:
        async with feeding(tmp_path, {"a": 2}) as (feeder, runs):
            write, failures = runs.journal.write, 2

            async def failing(work: Any, **options: Any) -> Any:
                nonlocal failures
                if isinstance(work, partial) and work.keywords.get("state") == "failed" and failures:
                    failures -= 1
                    raise StoreError("the disk is full")
                return await write(work, **options)

            async def run(request: DurableRequest, raw: bytes, seat: object) -> None:
                raise ValueError("a fault")

            monkeypatch.setattr(runs.journal, "write", failing)
            monkeypatch.setattr(runs, "run", run)
            await asyncio.wait_for(feeder.feed("a"), 30)
            assert failures == 0
            with runs.journal.database.reading() as connection:
                assert batches.line_counts(connection, "a") == {"failed": 2}

    asyncio.run(go())
