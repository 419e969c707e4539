"""Sums of the waiting work before a place in a cell's order, for forecasts beside very many groups (QL-14).

Groups stand in their order with running sums, so that a sum costs two searches and not a look at every group. Groups
that have changed since are looked at one by one; the sums are made anew when many have, when places or cells have, and
when better times or lengths are known. Beside many groups the last waits for a moment, as means hardly change in it.
Pure; times in ns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from runtime.policy.slo.forecast import NOTHING, Occupancy, Queued
from runtime.policy.slo.groups import Group, Rank, WaitingGroups

#: Up to so many groups the sums always follow the latest times; beside more, those of at most so long ago.
_FEW, _FRESH = 256, 100_000_000


class _Counted(NamedTuple):
    """What a group is counted as in the sums of its cell."""

    cell: str
    rank: Rank
    work: Queued


class QueuedWork:
    """The waiting work of one scheduler.

    Args:
        work: Returns the work of a group's mean waiting member.
        version: Returns a value that changes with what `work` is found from.
    """

    def __init__(
        self, groups: WaitingGroups, work: Callable[[Group], Occupancy], version: Callable[[], tuple[int, int]]
    ) -> None:
        self._groups, self._work, self._version = groups, work, version
        self._made: tuple[int, tuple[int, int], int] | None = None
        self._ranks: dict[str, list[Rank]] = {}
        self._sums: dict[str, list[Queued]] = {}
        self._counted: dict[int, _Counted] = {}

    def before(self, own: Group, rank: Rank, now: int) -> Queued:
        """Return the work that waits in the cell of `own` before a rank or at it, and all of `own` but one member."""
        if self._is_stale(now):
            self._make(now)
        total = NOTHING
        ranks = self._ranks.get(own.cell)
        if ranks is not None:
            total = self._sums[own.cell][bisect_right(ranks, rank)]
        for group in (own, *(each for each in self._groups.touched.values() if each is not own)):
            counted = self._counted.get(group.id)
            if counted is not None and counted.cell == own.cell and counted.rank <= rank:
                total = total.plus(counted.work, -1)
            if group is own:
                total = total.plus(self._all_of(group, len(group) - 1))
            elif len(group) and group.cell == own.cell and group.rank <= rank:
                total = total.plus(self._all_of(group, len(group)))
        return total

    def _is_stale(self, now: int) -> bool:
        if self._made is None or self._made[0] != self._groups.version:
            return True
        _, version, at = self._made
        return version != self._version() and (len(self._counted) <= _FEW or not 0 <= now - at < _FRESH)

    def _make(self, now: int) -> None:
        self._groups.begin_version()
        self._made = self._groups.version, self._version(), now
        self._ranks, self._sums, self._counted = {}, {}, {}
        for group in self._groups:
            ranks, sums = self._ranks.setdefault(group.cell, []), self._sums.setdefault(group.cell, [NOTHING])
            rank, work = group.rank, self._all_of(group, len(group))
            self._counted[group.id] = _Counted(group.cell, rank, work)
            ranks.append(rank)
            sums.append(sums[-1].plus(work))

    def _all_of(self, group: Group, count: int) -> Queued:
        return Queued.work_of(count, self._work(group)) if count > 0 else NOTHING
