"""Sums of the waiting work before a place in a cell's order, for forecasts beside very many groups (QL-14).

Groups stand in their order with running sums, so that a sum costs two searches and not a look at every group. Groups
that have changed since are looked at one by one; the sums are made anew when many have, when places or cells have, and
when better times or lengths are known. Beside many groups the last waits for a moment, as means hardly change in it.
Pure; times in ns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.policy.slo.forecast import NOTHING, Occupancy, Queued
from runtime.policy.slo.groups import Group, Rank, WaitingGroups

#: Up to so many groups the sums always follow the latest times; beside more, those of at most so long ago.
_FEW, _FRESH = 256, 100_000_000


class _Counted(NamedTuple):
    """What a group is counted as in the sums of its cell: so many members of this work."""

    cell: str
    rank: Rank
    number: int
    each: Occupancy


@dataclass(slots=True)
class _CellSums:
    """The groups of a cell: their ranks in order, and the sums before each and behind the last, as in `Queued`."""

    ranks: list[Rank] = field(default_factory=list)
    sums: list[tuple[int, float, float, float]] = field(default_factory=lambda: [(0, 0.0, 0.0, 0.0)])


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
        self._lines: dict[str, _CellSums] = {}
        self._counted: dict[int, _Counted] = {}

    def before(self, own: Group, rank: Rank, now: int) -> Queued:
        """Return the work that waits in the cell of `own` before a rank or at it, and all of `own` but one member."""
        if self._is_stale(now):
            self._make(now)
        line = self._lines.get(own.cell)
        total = NOTHING if line is None else Queued(*line.sums[bisect_right(line.ranks, rank)])
        for group in (own, *(each for each in self._groups.touched.values() if each is not own)):
            counted = self._counted.get(group.id)
            if counted is not None and counted.cell == own.cell and counted.rank <= rank:
                total = total.plus(Queued.work_of(counted.number, counted.each), -1)
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
        self._lines, self._counted = {}, {}
        # Thousands of groups: no more is made for each than is needed.
        for rank, number, group in sorted((group.rank, group.id, group) for group in self._groups.waiting()):
            line = self._lines.get(group.cell)
            if line is None:
                line = self._lines[group.cell] = _CellSums()
            count, each = len(group), self._work(group)
            mean, variance = each
            self._counted[number] = _Counted(group.cell, rank, count, each)
            line.ranks.append(rank)
            n, m, v, q = line.sums[-1]
            line.sums.append((n + count, m + count * mean, v + count * variance, q + count * (mean * mean + variance)))

    def _all_of(self, group: Group, count: int) -> Queued:
        return Queued.work_of(count, self._work(group)) if count > 0 else NOTHING
