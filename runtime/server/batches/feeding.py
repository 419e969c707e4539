"""Feed the lines of batches to the scheduler: batch by batch, the first one first, so many at a time.

Contract: lines are claimed a few at a time and their bodies read when they are, so memory does not grow with a batch.
Of the claimed lines so many are open in the scheduler that some of its seats stay free for interactive requests, and
few while there are any (`LineSeats`). A line that servers have died with runs while no other such line does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from runtime.frontend.errors import RequestError
from runtime.queueing import files, requests
from runtime.queueing.database import QueueDatabase
from runtime.queueing.files import CHUNK
from runtime.queueing.intake import Intake, TableIntake
from runtime.queueing.journal import Journal
from runtime.queueing.records import DurableRequest, FileRange, StoredAnswer
from runtime.server.batches.line_seats import LineSeats
from runtime.server.openai.responses import dump
from zoo.errors import StoreError

_log = logging.getLogger("blockzoo.batches")

#: Lines of one claim.
_LOT = 64
#: Chunks of input files that are kept: lines are claimed in about the order of their file.
_CHUNKS = 4
_ERROR = RequestError("The server failed on this request.", status=500, kind="server_error")
_FAILED = StoredAnswer(_ERROR.status, dump(_ERROR.body()))
#: Seconds until a line is tried again that the store failed on.
_RETRY = 1.0


class LineRuns(Protocol):
    """Runs lines."""

    async def run(self, request: DurableRequest, raw: bytes, seat: AbstractAsyncContextManager[None]) -> None:
        """Run a claimed request and end it in the store, whatever happens; hold `seat` while it is scheduled.

        A cancelled run aborts its sequences and leaves the request running in the store. Raises StoreError.
        """
        ...

    async def cancel(self, request: DurableRequest) -> None:
        """End a request, wherever it runs, unless it has ended; its client is charged what it has used until now.

        Raises StoreError.
        """
        ...


class LineFeeder:
    """Feed lines of batches.

    Args:
        seats: Sequences that the scheduler runs at once.
        busy: Returns whether interactive requests are in the server (`LineSeats`).
        broker: Where lines of all batches wait; None: in the tables, batch by batch.
    """

    def __init__(
        self,
        database: QueueDatabase,
        journal: Journal,
        runs: LineRuns,
        seats: int,
        busy: Callable[[], bool],
        broker: Intake | None = None,
    ) -> None:
        self._broker = broker
        self._database = database
        self._journal = journal
        self._runs = runs
        self._bodies = _LineBodies(database)
        #: One batch at a time claims lines.
        self._turn = asyncio.Lock()
        self._claimed = _LineSlots(2 * seats)
        self._seats = LineSeats(seats, busy)
        self._suspect = asyncio.Lock()
        #: Claimed lines that have not ended, with their batches.
        self._mine: dict[str, str | None] = {}

    @property
    def under_way(self) -> int:
        """Lines that are claimed and have not ended."""
        return len(self._mine)

    async def feed(self, batch: str) -> None:
        """Run the lines of a batch that have not ended. Cancelled: its lines stop."""
        async with asyncio.TaskGroup() as group, self._turn:
            await self._feed_from(TableIntake(self._journal, batch), group)

    async def feed_broker(self, broker: Intake) -> None:
        """Run lines of all batches as the broker gives them, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    return await self._feed_from(broker, group)
                except StoreError as error:
                    _log.error("the broker's lines: %s", error)
                    await asyncio.sleep(_RETRY)

    async def _feed_from(self, intake: Intake, group: asyncio.TaskGroup) -> None:
        """Run lines until there is none."""
        while lines := await self._claim(intake):
            for line in lines:
                # A task that is cancelled before it begins runs no `finally`.
                group.create_task(self._run(line, intake)).add_done_callback(lambda _: self._claimed.give_back(1))

    async def put_down(self, batch: str) -> None:
        """Queue the lines of a batch again that ran when feeding was cancelled or failed."""
        lines = tuple(line for line, of in self._mine.items() if of == batch)
        if lines:
            await (self._broker or TableIntake(self._journal, batch)).release(lines)
        self.drop_batch(batch)

    async def cancel_begun(self, batch: str) -> None:
        """End the lines of a batch that has stopped, as far as any server has begun them. Raises StoreError."""

        def begun() -> list[DurableRequest]:
            with self._database.reading() as connection:
                return requests.begun_lines(connection, batch)

        for line in await run_in_threadpool(begun):
            await self._runs.cancel(replace(line, body=await self._bodies.body_of(line)))

    def drop_batch(self, batch: str) -> None:
        """Leave the lines of a batch alone that has stopped before its end."""
        self._mine = {line: of for line, of in self._mine.items() if of != batch}

    async def _claim(self, intake: Intake) -> Sequence[DurableRequest]:
        """Return the next lines, once there is room for some; none at the end."""
        await self._claimed.wait()
        free = self._claimed.take_some(_LOT)
        claiming = asyncio.create_task(intake.claim(free))
        lines: Sequence[DurableRequest] = ()
        try:
            lines = await asyncio.shield(claiming)
        except asyncio.CancelledError:
            if self._broker is not None:  # it may wait for ever; what it was given comes again
                claiming.cancel()
            else:
                self._mine |= {line.id: line.batch for line in await claiming}
            raise
        finally:
            self._claimed.give_back(free - len(lines))
        self._mine |= {line.id: line.batch for line in lines}
        return lines

    async def _run(self, line: DurableRequest, intake: Intake) -> None:
        """Run a line until it has ended in the store; then acknowledge it."""
        await self._run_to_end(line)
        self._mine.pop(line.id, None)
        await intake.ack(line.id)

    async def _run_to_end(self, line: DurableRequest) -> None:
        failed = False
        while True:
            try:
                if failed:
                    end = partial(requests.finish, request=line.id, state="failed", given=_FAILED, now=time.time_ns())
                    await self._journal.write(end)
                    return
                body = await self._bodies.body_of(line)
                async with self._alone(line):
                    await self._runs.run(line, body, self._seats.hold_seat())
                return
            except StoreError as error:
                _log.error("line %s of %s could not be run: %s", line.line, line.batch, error)
                if (again := await self._claim_again(line)) is None:
                    return
                line = again
            except Exception:
                _log.exception("line %s of %s failed", line.line, line.batch)
                failed = True

    async def _claim_again(self, line: DurableRequest) -> DurableRequest | None:
        """Return a line that was put down as the store has it, once it has it; its journal may have begun meanwhile.

        None if it has ended, another server has it, or it was removed with its batch.
        """

        def work(connection: Connection) -> list[DurableRequest]:
            owner = self._database.server
            requests.release(connection, owner, [line.id], leave=False)
            return requests.claim(connection, owner=owner, ids=[line.id])

        while True:
            await asyncio.sleep(_RETRY)
            try:
                return next(iter(await self._journal.write(work, synced=False)), None)
            except StoreError as error:
                _log.error("line %s of %s cannot be claimed again: %s", line.line, line.batch, error)

    @asynccontextmanager
    async def _alone(self, line: DurableRequest) -> AsyncIterator[None]:
        if line.attempts < 2:
            yield
            return
        async with self._suspect:
            yield


class _LineSlots:
    """Count free slots. For one taker at a time."""

    def __init__(self, count: int) -> None:
        self._free = count
        #: Fewer are not worth a transaction: as many lines again as are open are prepared.
        self._least = max(1, min(count // 4, _LOT))
        self._given = asyncio.Event()

    async def wait(self) -> None:
        while self._free < self._least:
            self._given.clear()
            await self._given.wait()

    def take_some(self, most: int) -> int:
        taken = min(self._free, most)
        self._free -= taken
        return taken

    def give_back(self, count: int) -> None:
        self._free += count
        self._given.set()


class _LineBodies:
    """Read the bodies of lines from their files, a chunk at a time."""

    def __init__(self, database: QueueDatabase) -> None:
        self._database = database
        self._chunks: dict[tuple[str, int], bytes] = {}
        self._reading = asyncio.Lock()

    async def body_of(self, line: DurableRequest) -> bytes:
        """Return a line's body."""
        source = line.source or FileRange("", 0, 0)
        first, last = source.offset // CHUNK, (source.offset + source.length - 1) // CHUNK
        async with self._reading:
            whole = b"".join([await self._chunk(source.file, number) for number in range(first, last + 1)])
        begin = source.offset - first * CHUNK
        return whole[begin : begin + source.length]

    async def _chunk(self, file: str, number: int) -> bytes:
        key = file, number
        data = self._chunks.pop(key, None)
        if data is None:
            data = await run_in_threadpool(self._read, file, number)
        self._chunks[key] = data
        while len(self._chunks) > _CHUNKS:
            del self._chunks[next(iter(self._chunks))]
        return data

    def _read(self, file: str, number: int) -> bytes:
        with self._database.reading() as connection:
            return files.read(connection, file, number * CHUNK, CHUNK)
