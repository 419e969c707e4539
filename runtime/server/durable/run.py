"""One durable request while it waits or runs, and those that follow it. It outlives connections, not the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from runtime.frontend.errors import RequestError
from runtime.queueing.records import Kind, StoredAnswer
from runtime.queueing.usage import RequestUsage
from runtime.server.durable.transcript import Chunk, joined


class DurableRun:
    """The published part of an answer. Belongs to the event loop that it is made on.

    Attributes:
        id, kind, principal, digest: Of the request (`DurableRequest`).
        answer: The stored answer, once ended.
        error: Why this server has put the request down without an answer.
        task: The task that runs it.
        delivered: Set once the broker has given the request to this server.
        stored: Set once the store has the request, or the run is over.
        elsewhere: Another server runs it, and the task reads what that one writes.
        used: Returns what its client is charged if it ends now.
    """

    def __init__(self, id: str, kind: Kind, principal: str, digest: bytes) -> None:
        self.id = id
        self.kind = kind
        self.principal = principal
        self.digest = digest
        self.answer: StoredAnswer | None = None
        self.error: Exception | None = None
        self.task: asyncio.Task[None] | None = None
        self.delivered = asyncio.Event()
        self.stored = asyncio.Event()
        self.elsewhere = False
        self.used: Callable[[], RequestUsage | None] = lambda: None
        self._chunks: list[Chunk] = []
        self._over = False
        self._news: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def published(self) -> Sequence[Chunk]:
        """The chunks so far."""
        return self._chunks

    def publish(self, chunks: Sequence[Chunk]) -> None:
        """Add chunks with events that are in the store; those of numbers that it has are left out, and all once it has
        ended.
        """
        last = self._chunks[-1].number if self._chunks else -1
        if not self._over and (fresh := [chunk for chunk in chunks if chunk.number > last]):
            self._chunks += fresh
            self._tell_followers()

    def close(self, answer: StoredAnswer | None, error: Exception | None = None) -> None:
        """End with an answer that is in the store, or put the request down. Later calls change nothing."""
        if not self._over:
            self.answer, self.error, self._over = answer, error, True
            self.stored.set()
            self._tell_followers()

    async def answered(self) -> StoredAnswer | None:
        """Wait for the answer; None if this server has put the request down, for `error`."""
        while not self._over:
            await asyncio.shield(self._news)
        return self.answer

    async def follow(self, number: int = -1) -> AsyncIterator[bytes]:
        """Yield server-sent events behind those of `number`, all that there are at once; end with the answer.

        Raises `error` where the request was put down.
        """
        position = 0
        while True:
            fresh, position = self._chunks[position:], len(self._chunks)
            if data := joined([chunk for chunk in fresh if chunk.number > number]):
                yield data
            elif self._over:
                if self.error is not None:
                    raise self.error
                return
            elif position == len(self._chunks):
                await asyncio.shield(self._news)

    def _tell_followers(self) -> None:
        news, self._news = self._news, asyncio.get_running_loop().create_future()
        news.set_result(None)


def matching_run(run: DurableRun | None, digest: bytes) -> DurableRun | None:
    """Return the run. Raises RequestError 422 if it is of another body."""
    if run is not None and run.digest != digest:
        raise key_reused()
    return run


def unknown_request() -> RequestError:
    """Return the error for a request that the store has not got, or not any more."""
    message = "There is no durable request of that id."
    return RequestError(message, status=404, param="id", code="request_not_found")


def key_reused() -> RequestError:
    """Return the error for an `Idempotency-Key` that came with another body before."""
    message = "This Idempotency-Key came with another body before."
    return RequestError(message, status=422, param="Idempotency-Key", code="idempotency_key_reused")
