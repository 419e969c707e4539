"""Where requests wait for a server (QL-02): in the queue's own tables, or in a broker in front of them (`broker`).

    put -> claim -> ack                     claim -> release -> claim ...

Contract: what `put` has returned for is claimed by one server at a time, until it is acknowledged; it comes again, to
any server, if it is released or its server dies. A request may be put more often than once: its id counts once. What
has ended is never claimed again. Answers are no part of this: they are in the tables, and a request is acknowledged
once its answer is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Protocol

from runtime.queueing import requests
from runtime.queueing.journal import Journal
from runtime.queueing.records import DurableRequest


class Intake(Protocol):
    """Every method raises StoreError."""

    async def put(self, given: Sequence[DurableRequest]) -> None:
        """Keep requests; return once they survive the end of this process and of the machine."""
        ...

    async def claim(self, most: int) -> list[DurableRequest]:
        """Return at most so many requests that this server runs from now on, the first to run first."""
        ...

    async def ack(self, request: str) -> None:
        """Forget a claimed request: its answer is in the tables."""
        ...

    async def release(self, ids: Collection[str]) -> None:
        """Put claimed requests down unharmed, for any server."""
        ...


class TableIntake:
    """The queue's tables alone. `claim` returns none where none waits; `finish` has acknowledged what has ended.

    Args:
        batch: Only lines of this batch; None: all requests.
    """

    def __init__(self, journal: Journal, batch: str | None = None) -> None:
        self._journal = journal
        self._batch = batch

    async def put(self, given: Sequence[DurableRequest]) -> None:
        await self._journal.write(partial(requests.put, requests=given))

    async def claim(self, most: int) -> list[DurableRequest]:
        owner = self._journal.database.server
        return await self._journal.write(partial(requests.claim, owner=owner, batch=self._batch, limit=most))

    async def ack(self, request: str) -> None:
        pass

    async def release(self, ids: Collection[str]) -> None:
        owner = self._journal.database.server
        await self._journal.write(partial(requests.release, owner=owner, ids=ids))
