"""The life of every batch: checked, run, written; until its end, its deadline, or its client's order to stop.

    validating -> in_progress -> finalizing -> completed | expired
        |              |
        +-> failed     +-> cancelling -> cancelled

Each batch that has not ended has one task. What the store says is what a restarted server goes on from.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from runtime.queueing import batches
from runtime.queueing.batches import Status, StoredBatch
from runtime.queueing.database import QueueDatabase
from runtime.queueing.intake import Intake
from runtime.queueing.journal import Journal
from runtime.queueing.records import ENDED, DurableRequest
from runtime.server.batches.feeding import LineFeeder
from runtime.server.batches.intake import StoppedEarly, refuse, take_in
from runtime.server.batches.lines import LineError
from runtime.server.batches.results import drop_left_lines, write_results
from runtime.server.context import Service
from runtime.server.durable.charging import is_charged
from zoo.errors import StoreError

_log = logging.getLogger("blockzoo.batches")

#: Seconds until something is tried again that the store failed on.
_RETRY = 1.0
#: Seconds between two looks whether all lines have ended that a broker gives to servers.
_LOOK = 0.5
_DEFECT = LineError("server_error", "the server failed on this file")
_FED: tuple[Status, ...] = ("in_progress",)


@dataclass(slots=True, eq=False)
class _LiveBatch:
    """A batch that has not ended: its task, and whether it is to be cancelled."""

    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class BatchRuns:
    """Run batches. Belongs to one event loop.

    `busy`: returns whether interactive requests are in the server, on any thread.
    """

    def __init__(
        self,
        service: Service,
        database: QueueDatabase,
        journal: Journal,
        feeder: LineFeeder,
        busy: Callable[[], bool],
        broker: Intake | None = None,
    ) -> None:
        self._broker = broker
        self._busy = busy
        self._service = service
        self._database = database
        self._journal = journal
        self._feeder = feeder
        self._live: dict[str, _LiveBatch] = {}
        #: Files are checked one after the other, and so are results written.
        self._checking, self._writing = asyncio.Lock(), asyncio.Lock()
        self._stopping = threading.Event()

    def __len__(self) -> int:
        return len(self._live)

    async def recover(self) -> None:
        """Go on with the batches that servers have left that died or stopped."""
        self._stopping.clear()
        await run_in_threadpool(drop_left_lines, self._database)
        await self.take_over()

    async def take_over(self) -> None:
        """Begin the batches that no server has, and cancel those of this one that a client of another one cancelled."""
        owner = self._database.server

        def work(connection: Connection) -> tuple[list[StoredBatch], list[str]]:
            return batches.adopt(connection, owner), batches.cancelling(connection, owner)

        adopted, cancelled = await self._journal.write(work)
        for batch in adopted:
            if batch.id not in self._live:
                self.begin(batch)
        for name in cancelled:
            self.cancel(name)

    def begin(self, batch: StoredBatch) -> None:
        """Start the task of a batch."""
        live = self._live[batch.id] = _LiveBatch()
        live.task = asyncio.create_task(self._run(batch, live))

    def cancel(self, batch: str) -> None:
        """Stop the lines of a batch that is `cancelling` now."""
        if (live := self._live.get(batch)) is not None:
            live.cancelled.set()

    async def stop(self) -> None:
        """Stop all lines, and leave all batches to other servers."""
        self._stopping.set()
        live = dict(self._live)
        tasks = [each.task for each in live.values() if each.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._live.clear()
        for batch in live:
            await self._feeder.put_down(batch)
        if live:
            await self._journal.write(partial(batches.leave, owner=self._database.server))

    # -- one batch -----------------------------------------------------------------------------------------------------

    async def _run(self, batch: StoredBatch, live: _LiveBatch) -> None:
        """Bring a batch from the status that the store has for it to its end."""
        while True:
            try:
                await self._step(batch, live)
            except StoreError as error:
                _log.error("batch %s: %s", batch.id, error)
                await asyncio.sleep(_RETRY)
            except StoppedEarly:
                return
            except Exception:
                _log.exception("batch %s", batch.id)
                await asyncio.sleep(_RETRY)
            found = await self._stored(batch)
            if found is None or found.status not in batches.OPEN:
                self._live.pop(batch.id, None)
                return
            batch = found

    async def _step(self, batch: StoredBatch, live: _LiveBatch) -> None:
        if batch.status == "validating":
            async with self._checking:
                try:
                    put = None if self._broker is None else self._put_from_thread(self._broker)
                    await run_in_threadpool(
                        take_in, self._service, self._database, batch, self._stopping, put, self._busy
                    )
                except (StoreError, StoppedEarly):
                    raise
                except Exception:
                    _log.exception("the lines of batch %s could not be checked", batch.id)
                    await run_in_threadpool(refuse, self._database, batch, [_DEFECT])
        elif batch.status == "in_progress":
            becomes = await self._feed(batch, live)
            self._feeder.drop_batch(batch.id)
            if becomes is not None:
                await self._journal.write(partial(_finalize, batch=batch.id, becomes=becomes))
        else:
            if is_charged(self._service, batch.principal):
                await self._feeder.cancel_begun(batch.id)
            async with self._writing:
                keep, most = self._service.config.batches.keep_seconds, self._service.config.max_body_bytes
                await run_in_threadpool(write_results, self._database, batch, most, keep, self._stopping, self._busy)

    async def _feed(self, batch: StoredBatch, live: _LiveBatch) -> Status | None:
        """Run the lines of a batch; return the status that it comes to, None if the store says what is next."""
        feeding = asyncio.create_task(
            self._feeder.feed(batch.id) if self._broker is None else self._lines_elsewhere(batch)
        )
        cancelled = asyncio.create_task(live.cancelled.wait())
        try:
            # The wall clock may be set meanwhile: look at it again now and then.
            while not feeding.done() and not live.cancelled.is_set():
                left = (batch.deadline - time.time_ns()) / 1e9
                if left <= 0:
                    break
                await asyncio.wait((feeding, cancelled), timeout=min(left, 60.0), return_when=asyncio.FIRST_COMPLETED)
            if live.cancelled.is_set():
                return None
            if not feeding.done():
                return "expired"
            if feeding.exception() is None and not await self._is_unfinished(batch):
                return "completed"
        finally:
            for task in (feeding, cancelled):
                task.cancel()
            await asyncio.gather(feeding, cancelled, return_exceptions=True)
        # Something failed that is no line's fault: what ran is queued again, and fed again in a moment.
        _log.error("feeding of batch %s failed: %r", batch.id, feeding.exception())
        await self._feeder.put_down(batch.id)
        await asyncio.sleep(_RETRY)
        return None

    async def _lines_elsewhere(self, batch: StoredBatch) -> None:
        """Wait until all lines of a batch have ended, which come to servers by the broker."""
        while await self._is_unfinished(batch):
            await asyncio.sleep(_LOOK)

    def _put_from_thread(self, broker: Intake) -> Callable[[list[DurableRequest]], None]:
        loop = asyncio.get_running_loop()

        def put(lines: list[DurableRequest]) -> None:
            asyncio.run_coroutine_threadsafe(broker.put(lines), loop).result()

        return put

    async def _is_unfinished(self, batch: StoredBatch) -> bool:
        """Return whether lines of a batch have not ended."""

        def work() -> bool:
            with self._database.reading() as connection:
                counts = batches.line_counts(connection, batch.id)
                return sum(counts.get(state, 0) for state in ENDED) < batch.total

        return await run_in_threadpool(work)

    async def _stored(self, batch: StoredBatch) -> StoredBatch | None:
        def work() -> StoredBatch | None:
            with self._database.reading() as connection:
                return batches.get(connection, batch.id)

        while True:
            try:
                return await run_in_threadpool(work)
            except StoreError as error:
                _log.error("batch %s: %s", batch.id, error)
                await asyncio.sleep(_RETRY)


def _finalize(connection: Connection, batch: str, becomes: Status) -> bool:
    return batches.change(connection, batch, _FED, time.time_ns(), status="finalizing", becomes=becomes)
