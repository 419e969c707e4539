"""The queue as the event loop uses it: reads on worker threads, writes by the journal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from runtime.queueing import batches, requests, servers, usage
from runtime.queueing.database import QueueDatabase
from runtime.queueing.journal import Journal
from runtime.queueing.records import DurableRequest, State, StoredAnswer, decode_events, encode_events
from runtime.queueing.usage import RequestUsage
from runtime.types import TokenEvent
from zoo.errors import StoreError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TakenOver:
    """What a server has taken over: requests that it is to run now, without bodies, and ids of those given up."""

    requests: list[DurableRequest]
    given_up: list[str]


class RequestStore:
    """The requests of one server, between `open` and `close`. Every method raises StoreError."""

    def __init__(self, database: QueueDatabase) -> None:
        self.database = database
        self._journal: Journal | None = None

    @property
    def journal(self) -> Journal:
        if self._journal is None:
            raise StoreError("the queue is not open")
        return self._journal

    def open(self) -> None:
        """Begin to write."""
        self._journal = Journal(self.database)

    async def take_over(self, given_up: StoredAnswer) -> TakenOver:
        """Take over what servers have left that died or stopped. `given_up`: answer of what has killed too many."""
        owner = self.database.server

        def work(connection: Connection) -> TakenOver:
            servers.bury(connection, owner)
            dead = requests.recover(connection, given_up, time.time_ns())
            return TakenOver(requests.adopt(connection, owner), dead)

        return await self.journal.write(work)

    async def close(self) -> None:
        """Write what waits, and end the journal."""
        if self._journal is not None:
            await self._journal.close()

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Return the result of a query."""

        def run() -> T:
            with self.database.reading() as connection:
                return query(connection)

        return await asyncio.to_thread(run)

    def counts(self) -> dict[str, int]:
        """Return the number of requests that wait, run, and were given up (dead letters). It waits: call it on a worker
        thread.
        """
        with self.database.reading() as connection:
            found = requests.counts(connection)
        return {"waiting": found.get("queued", 0), "running": found.get("running", 0), "dead": found.get("dead", 0)}

    def uncounted(self) -> int:
        """Return the number of ended requests of which the queue still keeps the usage. It waits, as `counts`."""
        with self.database.reading() as connection:
            return usage.count(connection)

    async def put(self, request: DurableRequest) -> bool:
        """Store a request. Returns False, with nothing changed, if one of its id is there."""

        def put(connection: Connection) -> bool:
            requests.put(connection, [request])
            return requests.get(connection, request.id) == request

        return await self.journal.write(put)

    async def claim(self, request: DurableRequest) -> DurableRequest | None:
        """Return a request as it runs from now on; None if it has ended or another server has it."""
        owner = self.database.server

        def claim(connection: Connection) -> DurableRequest | None:
            # It is running where this server had put it down.
            requests.release(connection, owner, [request.id], leave=False)
            return next(iter(requests.claim(connection, owner=owner, ids=[request.id])), None)

        claimed = await self.journal.write(claim, synced=False)
        return claimed if claimed is None or request.body is None else replace(claimed, body=request.body)

    async def release(self, ids: Collection[str] | None = None) -> None:
        """Put requests down for any server; None: all that this one has."""
        await self.journal.write(partial(requests.release, owner=self.database.server, ids=ids))

    async def begin(self, request: DurableRequest, model: str, version: str) -> bool:
        """Record that a request begins now, on a model. False, with nothing changed: its batch has stopped."""

        def begin(connection: Connection) -> bool:
            # Held until the end: a batch that stops then finds what has begun, and charges it.
            if request.batch is not None and not batches.running(connection, [request.batch], hold=True):
                return False
            requests.begin(connection, request.id, model, version)
            return True

        return await self.journal.write(begin, synced=False)

    async def append(self, request: str, ordinal: int, events: list[TokenEvent]) -> bool:
        """Write events; return once they survive the end of this process. False: it has ended, nothing is written."""
        return await self.journal.append(request, ordinal, encode_events(events))

    async def events(self, request: str) -> list[TokenEvent]:
        """Return the events of a request so far."""
        payloads = await self.read(partial(requests.events, request=request))
        return decode_events(request, payloads)

    async def finish(self, request: str, state: State, answer: StoredAnswer, used: RequestUsage | None = None) -> bool:
        """End a request with its answer and its usage. Returns False, with nothing changed, if it has ended."""
        end = partial(requests.finish, request=request, state=state, given=answer, now=time.time_ns(), used=used)
        return await self.journal.write(end)

    async def abort(self, request: str, answer: StoredAnswer, events: int, used: RequestUsage | None = None) -> bool:
        """Cancel a request, whichever server runs it, with an answer and usage that were made from so many events.

        Returns False, with nothing changed, if it has ended or has more events by now.
        """

        def work() -> bool:  # not in a transaction of the journal, which may hold rows that another server waits for
            with self.database.writing() as connection:
                now = time.time_ns()
                return requests.finish(connection, request, "cancelled", answer, now, events, used)

        return await asyncio.to_thread(work)

    async def answer(self, request: str) -> StoredAnswer | None:
        """Return the answer of a request that has ended, else None."""
        return await self.read(partial(requests.answer, request=request))
