"""Virtual queues: the order in which groups run, one queue per cell (QL-04).

Without a plan all groups of a cell have the place 0, so that deadlines alone order them. A plan gives its groups the
odd places 1, 3, 5 …; a group that it does not name, or that comes later, gets the even place before the first planned
group of a later deadline (the greedy insertion of EDF), so that a plan stays usable while requests arrive. A plan is
over when all of its groups have ended. Queues hold numbers of groups only. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runtime.policy.slo.groups import Group, WaitingGroups


class VirtualQueues:
    """The planned orders of one scheduler, by cell."""

    def __init__(self) -> None:
        self.groups = WaitingGroups(self._opened, self._close)
        self._planned: dict[str, dict[int, Group]] = {}

    def follow(self, orders: Mapping[str, Sequence[int]]) -> None:
        """Let groups run in these orders, by cell; the numbers of groups that have ended are left out.

        A group is assigned to the cell that names it. Raises ValueError if a group is named twice.
        """
        named = [number for order in orders.values() for number in order]
        if len(set(named)) != len(named):
            raise ValueError("a plan names a group twice")
        for group in self.groups.all():
            group.place, group.planned = 0, False
        self._planned = {}
        for cell, order in orders.items():
            known = [found for number in order if (found := self.groups.get(number)) is not None]
            for at, group in enumerate(known):
                group.cell, group.place, group.planned = cell, 2 * at + 1, True
            if known:
                self._planned[cell] = {group.id: group for group in known}
        for group in self.groups:
            if not group.planned:
                self._opened(group)

    def orders(self) -> dict[str, list[int]]:
        """Return the numbers of the groups with waiting members, in their order, by cell."""
        found: dict[str, list[int]] = {}
        for group in self.groups:
            found.setdefault(group.cell, []).append(group.id)
        return found

    def _opened(self, group: Group) -> None:
        """Give a group that no plan names its place among those that a plan does."""
        planned = self._planned.get(group.cell)
        if planned is None:
            return
        mine = (group.key.priority, group.due)
        later = (each.place - 1 for each in planned.values() if len(each) and mine < (each.key.priority, each.due))
        group.place = min(later, default=max(each.place for each in planned.values()) + 1)

    def _close(self, group: Group) -> None:
        planned = self._planned.get(group.cell)
        if planned is not None and planned.pop(group.id, None) is not None and not planned:
            del self._planned[group.cell]
            for each in self.groups.all():
                if each.cell == group.cell:
                    each.place = 0
