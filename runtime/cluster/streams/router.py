"""Route token events to streams, with one call per event loop and step.

Not thread-safe by itself: the driver holds its lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from runtime.cluster.streams.streams import Sink
from runtime.types import SequenceRequest, TokenEvent


@dataclass(frozen=True, slots=True)
class _Route:
    sink: Sink
    request: str


#: One stream's events of one step.
_Part = tuple[Sink, list[TokenEvent]]


class StreamRouter:
    """The streams of running sequences: each from `add` until the sequence's last event is delivered."""

    def __init__(self) -> None:
        self._routes: dict[str, _Route] = {}

    def __len__(self) -> int:
        return len(self._routes)

    def any_of(self, seqs: set[str]) -> bool:
        return not seqs.isdisjoint(self._routes)

    def add(self, requests: Iterable[SequenceRequest], sink: Sink) -> None:
        for one in requests:
            self._routes[one.seq] = _Route(sink, one.request)

    def deliver(self, events: Iterable[TokenEvent]) -> list[str]:
        """Deliver events; return the sequences that run for nothing because their stream's event loop is closed."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Part]] = {}
        for sink, its in self._by_sink(events).items():
            if sink.loop is None:
                sink.push(its)
            else:
                by_loop.setdefault(sink.loop, []).append((sink, its))
        deaf: dict[str, None] = {}
        for loop, parts in by_loop.items():
            try:
                loop.call_soon_threadsafe(_push_all, parts)
            except RuntimeError:  # the loop was closed with streams still open
                deaf.update((event.seq, None) for _, its in parts for event in its if event.seq in self._routes)
        for seq in deaf:
            del self._routes[seq]
        return list(deaf)

    def ends(self, error: str) -> list[TokenEvent]:
        """Return a final error event for every sequence that is still open, for use when the scheduler has ended."""
        return [
            TokenEvent(seq, route.request, 0, None, finish="error", error=error) for seq, route in self._routes.items()
        ]

    def _by_sink(self, events: Iterable[TokenEvent]) -> dict[Sink, list[TokenEvent]]:
        parts: dict[Sink, list[TokenEvent]] = {}
        for event in events:
            route = self._routes.get(event.seq) if event.finish is None else self._routes.pop(event.seq, None)
            if route is not None:
                parts.setdefault(route.sink, []).append(event)
        return parts


def _push_all(parts: list[_Part]) -> None:
    for sink, events in parts:
        sink.push(events)
