"""Let urgent sequences start on a model that is about to leave, if what it leaves for is on time all the same (QL-13).

    residency: close stages -> `begin`: when what runs there will most likely have ended
    admission: a waiting sequence of that model -> `keeps_out`

A model leaves once the longest of its running answers has ended, and comes back after two loads at least. A sequence
that would be late by waiting for that may still start. What can wait does not: it would make the steps longer, and so
keep the model for longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from runtime.chains import Stage
from runtime.scheduler.residency.demand_loads import DemandLoads
from runtime.scheduler.residency.waiters import RoomWaiter
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

#: Loads until a model that leaves is back: that of the next one, and its own.
_LOADS = 2.0


class Drains:
    """The models of one cluster that leave while answers still run on them. Times in ns."""

    def __init__(self, state: ClusterState, loads: DemandLoads) -> None:
        self._state, self._loads, self._order = state, loads, state.order
        self._on = state.config.order.fills_drains
        self._ends: dict[tuple[str, Stage], int] = {}

    def begin(self, device: str, stages: Iterable[Stage], now: int) -> None:
        """Record that stages of a device are about to leave: see `keeps_out`."""
        if not self._on or self._order is None:
            return
        here = self._state.devices[device].passing.here.values()
        for stage in stages:
            running = [
                each
                for each in here
                if any(hop.device == device and each.chain.stage(hop.lo, hop.hi) == stage for hop in each.path)
            ]
            self._ends[device, stage] = now + max(map(self._order.rest, running), default=0)

    def keeps_out(self, sequence: ScheduledSequence, waiters: Mapping[str, RoomWaiter], now: int) -> bool:
        """Return whether stages of a sequence's chain are about to leave, and it may not start on them any more.

        It may if it can be on time, but would be late by waiting until they are back; and if it ends before what runs
        on them, or early enough for what they leave for. What has started since they began to leave does not count.

        Args:
            waiters: By device, the sequence for which stages leave.
        """
        leaving = [
            (device, stage, each.sequence)
            for device, each in waiters.items()
            for stage in each.closed
            if stage.model == sequence.chain.loaded_as
        ]
        order = self._order
        if not leaving or not self._on or order is None:
            return bool(leaving)
        if now + order.shortest(sequence) > (due := order.due_of(sequence)):
            return True
        ends, away = now + order.forecasts.longest(sequence, anew=True), self._state.config.order.floor + _LOADS
        for device, stage, first in leaving:
            drained = self._ends.get((device, stage), 0)
            if drained + away * self._loads.duration + order.longest(sequence) <= due:
                return True
            if ends > max(drained, first.rank.order - self._loads.duration - order.longest(first)):
                return True
        return False

    def end(self, device: str, stages: Iterable[Stage]) -> None:
        """Record that stages of a device have left."""
        for stage in stages:
            self._ends.pop((device, stage), None)

    def remove_device(self, device: str) -> None:
        """Forget a device that has died."""
        self._ends = {key: end for key, end in self._ends.items() if key[0] != device}
