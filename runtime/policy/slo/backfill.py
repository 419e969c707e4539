"""Let later sequences run while the first waiting one lacks room, where its start does not wait for them (backfill).

The first sequence is promised the moment at which, of what runs, enough has ended for it. A later sequence may run if
it ends before that moment, and if there is room for all that it may come to hold beside what runs: so it takes nothing
that the first one waits for, and drives nothing out. (EASY backfilling; Lifka, JSSPP 1995.)

Room is counted by device: pages and places. What runs ends when it is expected to; later sequences count with an upper
bound of their time. Where that holds, the first sequence never starts later for them. Pure; times in ns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holding:
    """A sequence that runs, or might: the time until it ends, and what it may come to hold until then, by resource."""

    ends: int
    most: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Reservation:
    """What the first waiting sequence is promised.

    Fields:
        start: Time until its start.
        free: What later sequences may hold until then, by resource.
    """

    start: int
    free: Mapping[str, int]

    def admits(self, later: Holding) -> bool:
        """Return whether a later sequence may run."""
        return later.ends <= self.start and all(count <= self.free.get(name, 0) for name, count in later.most.items())

    def beside(self, later: Holding) -> Reservation:
        """Return the reservation once a later sequence runs."""
        left = {name: count - later.most.get(name, 0) for name, count in self.free.items()}
        return Reservation(self.start, left)


def reserve(needed: Mapping[str, int], capacity: Mapping[str, int], running: Sequence[Holding]) -> Reservation | None:
    """Return what the first waiting sequence is promised; None if it can start at no end of what runs.

    Args:
        needed: What it needs to start, by resource.
        capacity: All that there is, of these resources at least.
    """
    left = {name: count - sum(each.most.get(name, 0) for each in running) for name, count in capacity.items()}
    free = {name: max(count, 0) for name, count in left.items()}
    for each in sorted(running, key=lambda each: each.ends):
        for name in left:
            left[name] += each.most.get(name, 0)
        if all(left.get(name, 0) >= count for name, count in needed.items()):
            return Reservation(each.ends, free)
    return None
