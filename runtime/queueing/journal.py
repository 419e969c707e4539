"""The journal: the thread that writes the queue beside an event loop, many writes in one transaction (group commit).

What waits when a transaction begins is written with it, in order. Events of running requests do not wait for the disk
(`Database.writing_on`); other writes do, unless asked not to. So a stream's events cost a fraction of a transaction per
step, and an event loop never waits for a disk.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection

from runtime.queueing import requests
from runtime.queueing.database import QueueDatabase
from zoo.errors import StoreError

_log = logging.getLogger(__name__)

#: Seconds for which the journal gathers events before it writes them: the sequences of a step report one by one.
GATHER = 0.002

T = TypeVar("T")


@dataclass(slots=True)
class JournalCounts:
    """What the journal has done: transactions, their seconds, batches of events, other writes, failures."""

    commits: int = 0
    seconds: float = 0.0
    appends: int = 0
    writes: int = 0
    failures: int = 0


@dataclass(slots=True)
class _PendingWrite:
    """One write. `work` is None for events, which are `row`."""

    future: asyncio.Future[Any]
    work: Callable[[Connection], Any] | None = None
    synced: bool = False
    row: tuple[str, int, bytes] | None = None


@dataclass(slots=True)
class _Writes:
    """Consecutive writes of one transaction: events together, each other write alone."""

    appends: list[_PendingWrite] = field(default_factory=list)
    write: _PendingWrite | None = None


class Journal:
    """The writer of a queue. Belongs to the event loop that it is made on; `close` ends its thread."""

    def __init__(self, database: QueueDatabase, gather: float = GATHER) -> None:
        self.database = database
        self.counts = JournalCounts()
        self._gather = gather
        self._loop = asyncio.get_running_loop()
        self._pending: list[_PendingWrite] = []
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="zoo-journal", daemon=True)
        self._thread.start()

    async def write(self, work: Callable[[Connection], T], synced: bool = True) -> T:
        """Run queries in a transaction; return their result once it is on the disk.

        Not `synced`: once it survives the end of this process, as for events. If `work` raises, its changes are undone,
        and the rest of its transaction stays. `work` may be called more than once: all of a transaction is done again
        where a part of it has failed. Raises StoreError.
        """
        result: T = await self._submit(_PendingWrite(self._loop.create_future(), work, synced))
        return result

    async def append(self, request: str, ordinal: int, events: bytes) -> bool:
        """Write events of a running request (`requests.append`); return once they survive the end of this process.

        Returns False, with nothing written, if the request has ended. Raises StoreError.
        """
        written: bool = await self._submit(_PendingWrite(self._loop.create_future(), row=(request, ordinal, events)))
        return written

    async def close(self) -> None:
        """End the thread once everything is written."""
        with self._change:
            self._closed = True
            self._change.notify()
        await asyncio.to_thread(self._thread.join)

    def _submit(self, pending: _PendingWrite) -> asyncio.Future[Any]:
        with self._change:
            if self._closed:
                raise StoreError("the queue is closed")
            self._pending.append(pending)
            if len(self._pending) == 1:
                self._change.notify()
        return pending.future

    # -- on the journal's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while pending := self._next():
            began = time.monotonic()
            outcomes = self._commit(pending)
            self.counts.commits += 1
            self.counts.seconds += time.monotonic() - began
            try:
                self._loop.call_soon_threadsafe(_tell, pending, outcomes)
            except RuntimeError:  # the loop is closed: its server has ended
                return

    def _next(self) -> list[_PendingWrite]:
        """Wait for writes; return those of the next transaction, none once the journal is closed."""
        with self._change:
            self._change.wait_for(lambda: self._pending or self._closed)
            if self._gather and not self._closed and all(each.work is None for each in self._pending):
                self._change.wait_for(lambda: self._closed, self._gather)
            pending, self._pending = self._pending, []
        return pending

    def _commit(self, pending: Sequence[_PendingWrite]) -> list[Any]:
        """Return the outcome of each write: its result, or the exception that it ended with."""
        parts, synced = _parts(pending), any(each.synced for each in pending)
        self.counts.appends += sum(len(part.appends) for part in parts)
        self.counts.writes += sum(part.write is not None for part in parts)
        try:
            try:
                with self.database.writing(synced) as connection:
                    return [outcome for part in parts for outcome in _results(connection, part)]
            except _Undone:  # seldom: savepoints would cost all transactions more than their own statements do
                with self.database.writing(synced) as connection:
                    return [outcome for part in parts for outcome in self._carry_out(connection, part)]
        except Exception as error:
            self.counts.failures += 1
            _log.error("the queue could not be written: %s", error, exc_info=not isinstance(error, StoreError))
            return [error] * len(pending)

    def _carry_out(self, connection: Connection, part: _Writes) -> list[Any]:
        """Return the outcomes of a part of the transaction; one that fails is undone alone."""
        if part.write is not None:
            return [self._attempt(connection, part.write.work or (lambda _: None))]
        outcome = self._attempt(connection, partial(_append, part.appends))
        if not isinstance(outcome, Exception):
            return list(outcome)
        if len(part.appends) == 1:
            return [outcome]
        alone = [self._attempt(connection, partial(_append, [each])) for each in part.appends]
        return [one if isinstance(one, Exception) else one[0] for one in alone]

    def _attempt(self, connection: Connection, work: Callable[[Connection], Any]) -> Any:
        """Return the result of a part of the transaction, or its exception, with what it had changed undone."""
        savepoint = connection.begin_nested()
        try:
            with self.database.explained():
                result = work(connection)
            savepoint.commit()
        except Exception as error:
            try:
                savepoint.rollback()
            except Exception:  # the database has undone the whole transaction, or is gone
                raise error from None
            self.counts.failures += 1
            # A future takes no StopIteration: all writes behind this one would wait for ever.
            return RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
        return result


class _Undone(Exception):
    """A write failed, and its transaction was rolled back."""


def _results(connection: Connection, part: _Writes) -> list[Any]:
    """Return the results of a part of the transaction. Raises _Undone."""
    try:
        if part.write is None:
            return list(_append(part.appends, connection))
        return [part.write.work(connection) if part.write.work is not None else None]
    except Exception as error:
        raise _Undone from error


def _append(appends: Sequence[_PendingWrite], connection: Connection) -> list[bool]:
    rows = [each.row for each in appends if each.row is not None]
    going = requests.append(connection, rows)
    return [request in going for request, _, _ in rows]


def _parts(pending: Sequence[_PendingWrite]) -> list[_Writes]:
    parts: list[_Writes] = []
    for each in pending:
        if each.work is not None:
            parts.append(_Writes(write=each))
        elif parts and parts[-1].write is None:
            parts[-1].appends.append(each)
        else:
            parts.append(_Writes([each]))
    return parts


def _tell(pending: Sequence[_PendingWrite], outcomes: Sequence[Any]) -> None:
    for each, outcome in zip(pending, outcomes, strict=True):
        if each.future.done():  # its task was cancelled
            continue
        if isinstance(outcome, Exception):
            each.future.set_exception(outcome)
        else:
            each.future.set_result(outcome)
