"""Virtual time: what is due, in one order that nothing but the inputs decides; and random numbers that do not disturb
each other.

Entries lie in a heap by (time, event class, number of their scheduling). At one moment what was *caused* comes before
what is *new*: ends of steps, arrays on their way, then requests, then what is due by time alone, and last the begin of
a step, which takes all that is there.
Nothing runs inside `at`: an entry without delay is played after the one that scheduled it, never within it. Knows not
what entries mean.
"""

from __future__ import annotations

import heapq
import zlib
from enum import IntEnum
from typing import Any

import numpy as np


class EventClass(IntEnum):
    """What goes first at the same nanosecond."""

    DONE = 0
    LOADED = 1
    ARRIVED = 2
    REQUEST = 3
    TICK = 4
    BEGIN = 5


class VirtualClock:
    """The heap and the moment that it has come to. `now`: integer nanoseconds, never decreasing."""

    __slots__ = ("_heap", "_scheduled", "now", "played")

    def __init__(self) -> None:
        self.now = 0
        self.played = 0
        self._heap: list[tuple[int, int, int, Any]] = []
        self._scheduled = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, time: int, kind: EventClass, what: Any) -> None:
        """Schedule `what`. Raises ValueError for a time that is over."""
        if time < self.now:
            raise ValueError(f"{time} ns is over: it is {self.now} ns")
        self._scheduled += 1
        heapq.heappush(self._heap, (time, kind, self._scheduled, what))

    def pop(self) -> Any:
        """Go on to the next entry, and take it. Raises IndexError when nothing is left."""
        self.now, _, _, what = heapq.heappop(self._heap)
        self.played += 1
        return what


class Streams:
    """Random streams by name: each a function of the seed and its name alone, so that drawing more from one changes no
    other.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._made: dict[str, np.random.Generator] = {}

    def named(self, name: str) -> np.random.Generator:
        """The stream of this name; the same object each time."""
        if name not in self._made:
            self._made[name] = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        return self._made[name]
