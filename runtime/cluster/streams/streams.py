"""Deliver token events to consumers: `Stream` for an event loop, `Inbox` for a plain thread.

Each event is delivered once, in order, in lists of everything since the last read. The iteration ends after the last
sequence's last event. A consumer slower than the engine gets longer lists; no events are lost. A consumer that leaves
early must close the stream, which aborts unfinished sequences.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Generator, Iterable
from types import TracebackType
from typing import Protocol

from runtime.types import TokenEvent

Abort = Callable[[Iterable[str]], None]


class Sink(Protocol):
    """Where a driver puts one stream's events of a step.

    `loop`: the event loop that must call `push`; None: any thread.
    """

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None: ...

    def push(self, events: list[TokenEvent]) -> None: ...


class Stream:
    """The events of some sequences, for `async for events in stream`. Belongs to one event loop.

    Use it as `async with`, or call `aclose` in a `finally`.
    """

    def __init__(self, seqs: Iterable[str], loop: asyncio.AbstractEventLoop, abort: Abort) -> None:
        self._loop = loop
        self._abort = abort
        self._open = set(seqs)
        self._ready: list[TokenEvent] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def push(self, events: list[TokenEvent]) -> None:
        """Add events. Called on the loop."""
        for event in events:
            if event.seq in self._open:
                self._ready.append(event)
                if event.finish is not None:
                    self._open.remove(event.seq)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        while not self._ready:
            if not self._open:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            await self._waiter
        events, self._ready = self._ready, []
        return events

    async def aclose(self) -> None:
        """Abort unfinished sequences and end the iteration. May be called again."""
        unfinished = tuple(self._open)
        self._open.clear()
        self._ready.clear()
        if unfinished:
            self._abort(unfinished)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Inbox:
    """The events of some sequences, for a plain thread: `drain` yields them until the last sequence has ended."""

    loop = None

    def __init__(self, seqs: Iterable[str], abort: Abort) -> None:
        self._abort = abort
        self._open = set(seqs)
        self._queue: queue.SimpleQueue[list[TokenEvent]] = queue.SimpleQueue()

    def push(self, events: list[TokenEvent]) -> None:
        self._queue.put(events)

    def drain(self) -> Generator[TokenEvent, None, None]:
        try:
            while self._open:
                for event in self._queue.get():
                    if event.finish is not None:
                        self._open.discard(event.seq)
                    yield event
        finally:
            if self._open:
                self._abort(tuple(self._open))
