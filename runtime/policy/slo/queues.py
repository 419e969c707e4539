"""Virtual queues: the order in which groups run, one queue per cell (QL-04).

Without a plan all groups of a cell have the place 0, so that deadlines alone order them. A plan gives its groups the
odd places 1, 3, 5 …; a group that it does not name, or that comes later, gets the even place before the first planned
group of a later deadline (the greedy insertion of EDF), so that a plan stays usable while requests arrive. A plan is
over when all of its groups have ended. Queues hold numbers of groups only. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence

from runtime.policy.slo.groups import Group, WaitingGroups


class VirtualQueues:
    """The planned orders of one scheduler, by cell."""

    def __init__(self) -> None:
        self.groups = WaitingGroups(self._opened, self._close)
        self._planned: dict[str, dict[int, Group]] = {}
        #: Names of the cells; empty where there are none.
        self.cells: tuple[str, ...] = ()
        #: Returns the cell of a new group.
        self.choose: Callable[[Group], str] = lambda group: ""

    def follow(self, orders: Mapping[str, Sequence[int]]) -> None:
        """Let groups run in these orders, by cell. Raises ValueError if a group is named twice.

        A group is assigned to the cell that names it. What a plan cannot know is left out: groups that have ended, or
        have started elsewhere, and cells that are no more. Where there is one cell, its name does not matter.
        """
        named = [number for order in orders.values() for number in order]
        if len(set(named)) != len(named):
            raise ValueError("a plan names a group twice")
        for group in self.groups.all():
            group.place, group.planned = 0, False
        self._planned = {}
        for named_cell, order in orders.items():
            cell = self.cells[0] if len(self.cells) == 1 else named_cell
            if self.cells and cell not in self.cells:
                continue
            found = (self.groups.get(number) for number in order)
            known = [each for each in found if each is not None and (not each.started or each.cell == cell)]
            for at, group in enumerate(known):
                group.cell, group.place, group.planned = cell, 2 * at + 1, True
            if known:
                self._planned[cell] = {group.id: group for group in known}
        before = {cell: _before(planned.values()) for cell, planned in self._planned.items()}
        for group in self.groups.waiting():
            if not group.planned and group.cell in before:
                keys, places = before[group.cell]
                group.place = places[bisect_right(keys, (group.key.priority, group.due))]
        self.groups.reorder()

    def assign(self, group: Group, cell: str) -> None:
        """Assign a group to another cell, where it stands by its deadline."""
        self._leave_plan(group)
        group.cell, group.place, group.planned = cell, 0, False
        if len(group):
            self._put(group)
        self.groups.reorder()

    def orders(self) -> dict[str, list[int]]:
        """Return the numbers of the groups with waiting members, in their order, by cell."""
        found: dict[str, list[int]] = {}
        for group in self.groups:
            found.setdefault(group.cell, []).append(group.id)
        return found

    def _opened(self, group: Group) -> None:
        group.cell = self.choose(group)
        self._put(group)

    def _put(self, group: Group) -> None:
        """Give a group that no plan names its place among those that a plan does."""
        planned = self._planned.get(group.cell)
        if planned is None:
            return
        keys, places = _before(planned.values())
        group.place = places[bisect_right(keys, (group.key.priority, group.due))]

    def _close(self, group: Group) -> None:
        self._leave_plan(group)

    def _leave_plan(self, group: Group) -> None:
        """Take a group out of its cell's plan, which is over with its last group."""
        planned = self._planned.get(group.cell)
        if planned is not None and planned.pop(group.id, None) is not None and not planned:
            del self._planned[group.cell]
            for each in self.groups.all():
                if each.cell == group.cell:
                    each.place = 0
            self.groups.reorder()


def _before(planned: Collection[Group]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return priorities and deadlines of planned groups in order, and the place before the first one from each on.

    The last place is behind all of them.
    """
    ordered = sorted(((each.key.priority, each.due), each.place - 1) for each in planned if len(each))
    places = [max((each.place for each in planned), default=0) + 1]
    for _, place in reversed(ordered):
        places.append(min(place, places[-1]))
    return [key for key, _ in ordered], places[::-1]
