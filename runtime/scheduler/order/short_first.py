"""Let short answers go first among equals, where no plan orders the groups (`policy.slo.short_first`).

    tick: review -> the groups of each cell -> how much later their deadlines count -> the next admission

A plan has mean completion as its last term, so that it has short groups first by itself.
"""

from __future__ import annotations

from runtime.policy.slo.groups import Group
from runtime.policy.slo.short_first import EqualGroup, delays
from runtime.scheduler.order.forecasts import Forecasts

#: Most groups of a cell that are ordered: the most urgent ones.
_MOST = 256


class ShortFirst:
    """The delays of one scheduler. `limit`: the aging limit in ns; `soft`: the time of requests without objective."""

    def __init__(self, forecasts: Forecasts, limit: int, soft: int) -> None:
        self._forecasts, self._limit, self._soft = forecasts, limit, soft

    def review(self, now: int) -> None:
        """Set how much later the deadlines of waiting groups count. Call it on every tick."""
        forecasts, cells = self._forecasts, dict[str, list[Group]]()
        for group in forecasts.groups:
            cells.setdefault(group.cell, []).append(group)
        changed = False
        for cell, groups in cells.items():
            some = [] if any(group.planned for group in groups) else groups[:_MOST]
            equals = [self._equal(group, now) for group in some]
            found = delays(equals, forecasts.busy(cell), forecasts.places(cell)) if len(equals) > 1 else {}
            for group in groups:
                later = found.get(group.id, 0)
                changed |= later != group.later
                group.later = later
        if changed:
            forecasts.groups.reorder()

    def _equal(self, group: Group, now: int) -> EqualGroup:
        key, objective = group.key, group.key.objective
        time = self._soft if objective is None else objective.ms * 1_000_000
        return EqualGroup(
            group.id,
            (key.priority, (objective, key.late)),
            self._forecasts.length(group),
            len(group),
            group.due - now,
            group.last_due - now,
            self._forecasts.work(group).mean,
            min(self._limit, time // 2),
        )
