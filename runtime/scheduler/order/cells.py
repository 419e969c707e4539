"""Assign waiting groups to cells: to the one that begins with them first, by forecast (QL-04, QL-12).

    a group's first member comes, the placement of blocks changes, a device dies or returns -> `choose`
    a cell has places left, and nothing waits for it -> `balance`: it gets the most urgent members that wait elsewhere

Until a cell begins with a group, it loads what the group's model lacks there, and serves what is before the group in
the order: what runs and is behind it gives way, where that is on (QL-09). What the group takes longer there than in the
fastest cell counts as well (QL-22). Of equal cells the one with less work is taken.
A group stays in its cell while that has a living path for it, and what runs never moves. When a cell has none any more,
its groups go to other cells that have one; else they wait for it. The queues of other cells change no further (QL-06).
Where there is one cell there is nothing to choose, and nothing is limited. With `assign = "turns"` groups go to the
cells in turn, and stay: the paper's baseline.
"""

from __future__ import annotations

from collections.abc import Collection

from runtime.chains import Chain
from runtime.config import ClusterConfig
from runtime.policy.slo.cells import ServingCell, cells_of
from runtime.policy.slo.groups import Group
from runtime.scheduler.devices.devices import Devices
from runtime.scheduler.observe.load_times import LoadTimes
from runtime.scheduler.order.forecasts import Forecasts
from runtime.scheduler.placement.block_map import BlockMap
from runtime.scheduler.sequences.sequence import ScheduledSequence

#: Cells whose times for a group differ by this share at most are equally fast.
_ALIKE = 0.1


class CellAssignment:
    """The cells of one scheduler, and which of them its groups are assigned to."""

    def __init__(
        self, config: ClusterConfig, devices: Devices, placed: BlockMap, forecasts: Forecasts, loads: LoadTimes
    ) -> None:
        self._most, self._devices, self._placed, self._forecasts = config.max_num_seqs, devices, placed, forecasts
        self._loads, self._evicts = loads, config.order.evicts
        self._in_turn, self._turn = config.order.assign == "turns", 0
        self._cells: dict[str, ServingCell] = {}
        self._chains: dict[str, Chain] = {}
        forecasts.queues.choose = self.choose

    @property
    def cells(self) -> tuple[ServingCell, ...]:
        """The cells, in the order of their first devices."""
        return tuple(self._cells.values())

    def devices_of(self, sequence: ScheduledSequence) -> frozenset[str] | None:
        """Return the devices that a waiting sequence may run on; None for all of them."""
        group = self._forecasts.groups.group_of(sequence.seq) if len(self._cells) > 1 else None
        cell = None if group is None else self._cells.get(group.cell)
        return None if cell is None else cell.devices

    def review(self, chains: Collection[Chain]) -> None:
        """Partition the devices again, and assign the groups that have no living path in their cell any more.

        `chains`: all that new or live sequences need.
        """
        where = self._placed.instances
        names = [device.name for device in self._devices if not device.final]
        self._chains = {chain.version: chain for chain in chains} if len(names) > 1 else {}
        living = set(names)
        holders = [
            [[name for name in where.get(use.block, ()) if name in living] for use in chain.uses]
            for chain in self._chains.values()
        ]
        found = cells_of(names, [blocks for blocks in holders if all(blocks)], self._devices.roles.apart)
        self._cells = {cell.name: cell for cell in found}
        self._forecasts.queues.cells = tuple(self._cells)
        for group in self._forecasts.groups.all():
            if not self._runs(group.cell, group):
                self._forecasts.queues.assign(group, self.choose(group))

    def choose(self, group: Group) -> str:
        """Return the cell that would begin with a group first; or the next one in turn."""
        able = [name for name in self._cells if self._runs(name, group)]
        if not able:
            return group.cell if group.cell in self._cells else next(iter(self._cells), "")
        if self._in_turn:
            self._turn += 1
            return able[self._turn % len(able)]
        if len(able) == 1:
            return able[0]
        own = {name: self._own(name, group) for name in able}
        fastest = min(own.values())

        def ends(name: str) -> tuple[float, float]:
            begins, whole = self._begins(name, group)
            return begins + _longer(own[name], fastest), whole

        return min(able, key=ends)

    def balance(self) -> bool:
        """Assign members that wait to cells with places left for which none waits; return whether there were any."""
        groups, moved = self._forecasts.groups, False
        if len(self._cells) < 2 or self._in_turn:
            return False
        waited_for = {group.cell for group in groups.waiting()}
        for name in self._cells:
            free = self._most - self._forecasts.running(name)
            if name in waited_for or free < 1:
                continue
            others = (group for group in groups if group.cell in waited_for and not group.planned)
            group = next((group for group in others if self._runs(name, group) and self._sooner(name, group)), None)
            if group is not None:
                self._forecasts.queues.assign(groups.take_first(group, free), name)
                moved = True
        return moved

    def _sooner(self, name: str, group: Group) -> bool:
        """Return whether a cell for which nothing waits serves a waiting group before the group's own cell does."""
        later = self._load(name, group) + _longer(self._own(name, group), self._own(group.cell, group))
        return not later or group.cell not in self._cells or later < self._begins(group.cell, group)[0]

    def _own(self, name: str, group: Group) -> float:
        """Return the time that a group takes once a cell has begun with it, in ns (QL-22)."""
        count = len(group)
        return self._forecasts.work_in(group, name).mean * (1 + (count - 1) / self._most) if count else 0.0

    def _begins(self, name: str, group: Group) -> tuple[float, float]:
        """Return the time until a cell begins with a group, and that of all its work, in ns."""
        whole, ahead = self._forecasts.backlog(name), 0.0
        if len(group):
            ahead = self._forecasts.ahead(name, group.rank, self._evicts and group.key.objective is not None)
        return self._load(name, group) + ahead, whole

    def _load(self, name: str, group: Group) -> float:
        """Return the time to load what a cell lacks of a group's chain, in ns."""
        cell, chain = self._cells[name], self._chains[group.key.chain]
        lacking: dict[str, dict[str, int]] = {}
        for use in chain.uses:
            here = [device for device in self._placed.instances.get(use.block, ()) if device in cell.devices]
            if here and not any(use.block in self._devices[device].stages.warm for device in here):
                lacking.setdefault(here[0], {})[use.block] = self._placed.block(use.block).nbytes
        return 1e9 * max((self._loads.seconds(device, sizes) for device, sizes in lacking.items()), default=0.0)

    def _runs(self, name: str, group: Group) -> bool:
        """Return whether a cell has a living path for a group's chain."""
        cell, chain = self._cells.get(name), self._chains.get(group.key.chain)
        if cell is None or chain is None:
            return cell is not None
        alive, where = self._devices.alive, self._placed.instances
        return all(
            any(device in cell.devices and alive(device) for device in where.get(use.block, ())) for use in chain.uses
        )


def _longer(time: float, other: float) -> float:
    """Return by how much a time is longer than another one; 0 where they are nearly the same."""
    return time - other if time > (1 + _ALIKE) * other else 0.0
