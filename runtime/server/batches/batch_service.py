"""Files and batches of one server: what the routes call, and what starts and stops with the server."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Annotated

import msgspec
from sqlalchemy import Connection

from runtime.frontend.errors import RequestError, overloaded
from runtime.queueing import batches, files
from runtime.queueing.batches import Status, StoredBatch
from runtime.queueing.broker import LINES, RabbitIntake
from runtime.queueing.database import QueueDatabase
from runtime.queueing.journal import Journal
from runtime.server.batches.batch_runs import BatchRuns
from runtime.server.batches.documents import SECOND, derived
from runtime.server.batches.feeding import LineFeeder, LineRuns
from runtime.server.batches.file_store import FileStore, no_file
from runtime.server.batches.lines import ENDPOINTS
from runtime.server.context import Service
from zoo.errors import StoreError

_log = logging.getLogger("blockzoo.batches")

#: Seconds between two looks for expired files and batches.
_TIDY = 600.0
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MOST_WINDOW = 30 * 86400
_STOPPABLE: tuple[Status, ...] = ("validating", "in_progress")


class BatchOrder(msgspec.Struct, frozen=True):
    """The body of POST /v1/batches."""

    input_file_id: Annotated[str, msgspec.Meta(max_length=128)]
    endpoint: str
    completion_window: str
    metadata: (
        Annotated[
            dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
            msgspec.Meta(max_length=16),
        ]
        | None
    ) = None


def read_order(raw: bytes) -> BatchOrder:
    """Return the parsed body. Raises RequestError 400."""
    try:
        order = msgspec.json.decode(raw, type=BatchOrder)
    except msgspec.ValidationError as error:
        raise RequestError(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is no JSON object: {error}", code="invalid_json") from None
    if order.endpoint not in ENDPOINTS:
        raise RequestError(f"endpoint must be {' or '.join(ENDPOINTS)}", param="endpoint", code="invalid_endpoint")
    seconds_of(order.completion_window)
    return order


def seconds_of(window: str) -> int:
    """Return a completion window such as `24h`, `30m` or `90s` in seconds. Raises RequestError 400."""
    found = re.fullmatch(r"([0-9]{1,8})([smhd])", window)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= _MOST_WINDOW:
        raise RequestError(
            "completion_window is a time such as 24h, 30m or 90s, of at most 30 days",
            param="completion_window",
            code="invalid_completion_window",
        )
    return seconds


class BatchService:
    """Files and batches.

    Args:
        seats: Sequences that the scheduler runs at once.
        busy: Returns whether interactive requests are in the server, on any thread.
    """

    def __init__(
        self,
        service: Service,
        database: QueueDatabase,
        journal: Journal,
        runs: LineRuns,
        seats: int,
        busy: Callable[[], bool],
    ) -> None:
        limits = service.config.batches
        self._journal = journal
        self._database = database
        self.files = FileStore(database, journal, limits)
        url = service.config.broker
        self._broker = None if url is None else RabbitIntake(url, LINES, journal, 2 * seats)
        self.feeder = LineFeeder(database, journal, runs, seats, busy, self._broker)
        self.runs = BatchRuns(service, database, journal, self.feeder, busy, self._broker)
        self._feeding: asyncio.Task[None] | None = None
        self._limits = limits
        self._tidying: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Go on with what an earlier server has left."""
        await self.files.remove_left_over()
        if self._broker is not None:
            await self._broker.open()
            self._feeding = asyncio.create_task(self.feeder.feed_broker(self._broker))
        await self.runs.recover()
        self._tidying = asyncio.create_task(self._tidy())

    async def take_over(self) -> None:
        """Go on with what servers have left since. Raises StoreError."""
        await self.files.remove_left_over()
        await self.runs.take_over()

    async def stop(self) -> None:
        """Stop all lines; they are queued in the store. May be called again. Raises StoreError."""
        if self._tidying is not None:
            self._tidying.cancel()
        if self._feeding is not None:
            self._feeding.cancel()
            await asyncio.gather(self._feeding, return_exceptions=True)
        await self.runs.stop()
        if self._broker is not None:
            await self._broker.close()

    async def create(self, principal: str, order: BatchOrder, key: str | None) -> StoredBatch:
        """Begin a batch and return it. The same key and order give the same batch.

        Raises RequestError: 404 for an unknown file, 422 for a key with another order, 429 for too many batches.
        """
        file = await self.files.get(principal, order.input_file_id)
        if len(self.runs) >= self._limits.max_unended:
            raise overloaded(f"{len(self.runs)} batches have not ended. Try again later.", retry_after=60)
        now = time.time_ns()
        batch = StoredBatch(
            id="batch_" + uuid.uuid4().hex if key is None else derived("batch_", principal, key),
            principal=principal,
            endpoint=order.endpoint,
            input_file=file.id,
            window=order.completion_window,
            created=now,
            deadline=now + seconds_of(order.completion_window) * SECOND,
            metadata=order.metadata,
            owner=self._database.server,
        )

        def work(connection: Connection) -> StoredBatch | None:
            if files.get(connection, principal, file.id) is None:
                return None
            return batch if batches.put(connection, batch) else batches.get(connection, batch.id)

        stored = await self._journal.write(work)
        if stored is None:
            raise no_file(file.id)
        if stored is batch:
            self.runs.begin(batch)
        elif _order_of(stored) != order:
            message = "This Idempotency-Key was used for another batch."
            raise RequestError(message, status=422, code="idempotency_key_reused")
        return stored

    async def get(self, principal: str, batch: str) -> StoredBatch:
        """Return a principal's batch with its counts as of now. Raises RequestError 404."""

        def work(connection: Connection) -> StoredBatch | None:
            found = batches.get(connection, batch, principal)
            return None if found is None else batches.with_counts(connection, found)

        found = await self.files.read(work)
        if found is None:
            raise _no_batch(batch)
        return found

    async def page(self, principal: str, limit: int, after: str | None) -> tuple[list[StoredBatch], bool]:
        """Return a page of a principal's batches, the latest first, and whether more follow."""

        def work(connection: Connection) -> list[StoredBatch]:
            found = batches.listed(connection, principal, limit + 1, after)
            return [batches.with_counts(connection, each) for each in found]

        found = await self.files.read(work)
        return found[:limit], len(found) > limit

    async def cancel(self, principal: str, batch: str) -> StoredBatch:
        """Stop a batch and return it. Raises RequestError: 404, 409 if it has ended or its results are written."""

        def work(connection: Connection) -> tuple[bool, StoredBatch | None]:
            if batches.get(connection, batch, principal) is None:
                return False, None
            now = time.time_ns()
            done = batches.change(connection, batch, _STOPPABLE, now, status="cancelling", becomes="cancelled")
            return done, batches.get(connection, batch)

        done, found = await self._journal.write(work)
        if found is None:
            raise _no_batch(batch)
        if not done and not found.status.startswith("cancel"):
            message = f"A batch that is {found.status} cannot be cancelled."
            raise RequestError(message, status=409, code="batch_ended")
        self.runs.cancel(batch)
        return await self.get(principal, batch)

    async def _tidy(self) -> None:
        """Remove expired files and batches, now and then."""
        while True:
            try:
                await self.files.remove_expired()
                before = time.time_ns() - self._limits.keep_seconds * SECOND
                await self._journal.write(partial(_remove_old, before=before))
            except StoreError as error:
                _log.error("what has expired could not be removed: %s", error)
            await asyncio.sleep(_TIDY)


def _remove_old(connection: Connection, before: int) -> None:
    batches.remove(connection, batches.ended_before(connection, before))


def _order_of(batch: StoredBatch) -> BatchOrder:
    return BatchOrder(batch.input_file, batch.endpoint, batch.window, batch.metadata)


def _no_batch(batch: str) -> RequestError:
    return RequestError(f"There is no batch {batch[:100]!r}.", status=404, code="batch_not_found", param="batch_id")
