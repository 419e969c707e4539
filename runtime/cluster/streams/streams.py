"""Where the events of some sequences come out: an asynchronous iterator for a server, a plain one for a command line.

Contract: a stream hands out each event once, in order, in lists (all that has happened since the last look), and ends
after the last sequence's last event. A consumer that is slower than the engine gets longer lists, never lost events.
Whoever leaves early must close it, which aborts what is unfinished. It does not know agents, engines or threads beyond
the hand-over.
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
    """Where a driver puts a step's events of one stream. `loop`: the event loop that must do it, None for any
    thread.
    """

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None: ...

    def push(self, events: list[TokenEvent]) -> None: ...


class Stream:
    """Events of some sequences, for `async for events in stream`. All of it belongs to one event loop.

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
        """Called on the loop."""
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
        """Abort what is unfinished and end the iteration. Closing again is nothing to do."""
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
    """The same for a plain thread: `drain` yields events until the last sequence has ended."""

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
