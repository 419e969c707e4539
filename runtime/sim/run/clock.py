"""Order events in virtual time, and draw independent random numbers.

Events are kept in a heap by (time, event class, sequence number), so that their order depends on the inputs only. At
one moment, effects of earlier events come before new events: ends of steps and arrays that arrive, then requests, then
timers, and last the begins of steps, which take everything that is there. `at` never runs an event: one without delay
runs after the event that scheduled it, not within it.
"""

from __future__ import annotations

import heapq
import zlib
from enum import IntEnum
from typing import Any

import numpy as np


class EventClass(IntEnum):
    """Order of events at the same nanosecond: lower values first."""

    DONE = 0
    LOADED = 1
    ARRIVED = 2
    REQUEST = 3
    TICK = 4
    BEGIN = 5


class VirtualClock:
    """The event heap and the current time.

    Attributes: `now`: virtual time in ns, never decreasing; `played`: number of events taken.
    """

    __slots__ = ("_heap", "_scheduled", "now", "played")

    def __init__(self) -> None:
        self.now = 0
        self.played = 0
        self._heap: list[tuple[int, int, int, Any]] = []
        self._scheduled = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, time: int, kind: EventClass, what: Any) -> None:
        """Schedule an event. Raises ValueError for a time in the past."""
        if time < self.now:
            raise ValueError(f"{time} ns is over: it is {self.now} ns")
        self._scheduled += 1
        heapq.heappush(self._heap, (time, kind, self._scheduled, what))

    def pop(self) -> Any:
        """Advance to the next event and return it. Raises IndexError if there is none."""
        self.now, _, _, what = heapq.heappop(self._heap)
        self.played += 1
        return what


class Streams:
    """Random generators by name.

    Each is a function of the seed and its name alone, so that drawing more from one changes no other.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._made: dict[str, np.random.Generator] = {}

    def named(self, name: str) -> np.random.Generator:
        """Return the generator of this name; the same object each time."""
        if name not in self._made:
            self._made[name] = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        return self._made[name]
