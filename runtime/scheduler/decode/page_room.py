"""Make room for the pages of a sequence's next row, on all devices of its path.

Cached prefixes are evicted first; then idle stages leave where pages can have their memory; then pages held for other
devices go back to those that have room; then page sets of the sequence itself are lent to another device, where that is
allowed; then the sequence of the lowest rank is preempted, at once or when its row returns.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.scheduler.lending.lending import Lending
from runtime.scheduler.residency.residency import Residency
from runtime.scheduler.sequences.lifecycle import SequenceLifecycle
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState


class PageRoom:
    """The pages of one scheduler's devices."""

    def __init__(self, state: ClusterState, seating: SequenceLifecycle, residency: Residency, lending: Lending) -> None:
        self._state, self._seating, self._residency, self._lending = state, seating, residency, lending

    def make(self, sequence: ScheduledSequence, groups: int, now: int) -> bool:
        """Return whether the path has room for this many more page sets; may evict prefixes and preempt sequences."""
        for name, pages in sequence.place.weights:
            device = self._state.devices[name]
            while device.pages.free < pages * groups:
                if self._seating.prefix_cache.give_way(name) or self._residency.make_pages({name: pages * groups}, now):
                    continue
                if self._lending.recalls.reclaim(name, now):
                    return False
                if self._lending.make_room(sequence, name, pages * groups - device.pages.free, now):
                    return False
                victim = self._victim(sequence, name)
                if victim is None:
                    return False
                if victim.flying:
                    victim.doom("pages")
                    return False
                self._seating.preempt(victim, now)
        return True

    def may_come(self, starved: Iterable[ScheduledSequence], now: int) -> bool:
        """Return whether these sequences may get pages although nothing else runs: each asks for a loan again."""
        return self._lending.asks_soon(starved, now)

    def _victim(self, sequence: ScheduledSequence, device: str) -> ScheduledSequence | None:
        """Return the sequence of the lowest rank behind `sequence` with pages on a device.

        None if there is none, or if one is marked for preemption already.
        """
        last, rank_of = None, self._state.waiting.rank
        rank = lowest = rank_of(sequence)
        debtors = self._lending.debtors(device)
        for other in (*self._state.devices[device].passing.here.values(), *debtors):
            theirs = rank_of(other)
            if theirs <= rank or not other.pages.groups:
                continue
            doomed = other.waits.doomed
            if (doomed or theirs > lowest) and (device in dict(other.place.weights) or device in other.lenders):
                if doomed:
                    return None
                last, lowest = other, theirs
        return last
