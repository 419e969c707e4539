"""Write the waiting groups and the devices as a planning problem (QL-04, QL-18, QL-22).

Queues are those of the serving cells (`scheduler.order.cells`). A group may run in the cells that are homes of its
chain (`policy.residency.homes`), mostly one, so what a plan decides is the order there; one that has begun stays in its
cell (QL-12). A cell's times are those that the scheduler has measured there (QL-22), and loads cost what it has
measured, by the tier that blocks come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from runtime.chains import Chain
from runtime.policy.slo.cells import ServingCell
from runtime.policy.slo.forecast import Occupancy
from runtime.policy.slo.groups import Group
from runtime.policy.slo.plan.problem import (
    MOST_MEMBERS,
    SAME_SPEED,
    Orders,
    PlanGroup,
    PlanQueue,
    Problem,
    QueueRates,
    Spread,
)
from runtime.scheduler.order.deadlines import DeadlineOrder
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

#: Most groups of a problem; the most urgent ones are planned.
MOST_GROUPS = 256
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Planning:
    """A problem with what its numbers stand for.

    Fields:
        cells: Name of each queue; empty where there is one cell.
        present: The order now, numbers of groups by queue.
    """

    problem: Problem
    cells: tuple[str, ...]
    present: Orders


def planning_of(state: ClusterState, order: DeadlineOrder, rounds: int, now: int) -> Planning | None:
    """Return the problem at this moment; None where an order of groups gains nothing over deadlines.

    That is so where all chains of a cell fit together, or there are fewer than two groups that some cell can run.
    """
    if state.config.residency != "swap":
        return None
    chains = {chain.version: chain for chain in state.in_use()}
    waiting = [group for group in order.forecasts.groups if group.key.chain in chains][:MOST_GROUPS]
    if len(waiting) < 2:
        return None
    made = _Builder(state, order, chains, waiting)
    able = _fewest([group for group in waiting if made.runs(group)])
    return made.planning(able, rounds, now) if len(able) > 1 and made.contended else None


def _fewest(waiting: Sequence[Group]) -> list[Group]:
    """Return the first groups, as far as a problem can count their members."""
    until = accumulate(len(group) for group in waiting)
    return [group for group, members in zip(waiting, until, strict=True) if members <= MOST_MEMBERS]


def _cells(state: ClusterState) -> list[ServingCell]:
    """Return the serving cells; one of all devices where there are none."""
    found = () if state.cells is None else state.cells.cells
    return list(found) or [ServingCell("", frozenset(device.name for device in state.devices))]


class _Builder:
    def __init__(
        self, state: ClusterState, order: DeadlineOrder, chains: Mapping[str, Chain], waiting: Sequence[Group]
    ) -> None:
        self._state, self._order, self._alone = state, order, state.config.order.excludes
        loaded = {stage.model for device in state.devices for stage in device.stages.loaded}
        wanted = {group.key.chain for group in waiting}
        some = {version: chain for version, chain in chains.items() if version in wanted or chain.loaded_as in loaded}
        self._chains = [some[version] for version in sorted(some)]
        self._numbers = {chain.version: at for at, chain in enumerate(self._chains)}
        sizes: dict[str, int] = {}
        for chain in self._chains:
            sizes.update(state.sizes_of(use.block for use in chain.uses))
            own = sum(use.adapter_bytes for use in chain.uses)
            if own:
                sizes[f"adapters {chain.version}"] = own
        self._sizes = sizes
        self._blocks = {name: at for at, name in enumerate(sorted(sizes))}
        cells = _cells(state)
        self._names_of_cells = [cell.name for cell in cells]
        self._cells = [tuple(sorted(cell.devices)) for cell in cells]
        self._rooms = [self._room(cell) for cell in self._cells]

    @property
    def contended(self) -> bool:
        """Whether the chains of some cell do not fit together."""
        for cell, room in zip(self._cells, self._rooms, strict=True):
            names = {name for chain in self._chains if self._at_home(chain, cell) for name in self._names(chain)}
            if room and sum(self._sizes[name] for name in names) > room:
                return True
            if self._alone and sum(self._at_home(chain, cell) for chain in self._chains) > 1:
                return True
        return False

    def runs(self, group: Group) -> bool:
        """Return whether the cell that a group waits for has all of its chain; if not, it waits for another one."""
        return self._at_home(self._chains[self._numbers[group.key.chain]], self._cells[self._queue_of(group)])

    def planning(self, waiting: Sequence[Group], rounds: int, now: int) -> Planning:
        largest = max(sum(self._sizes[name] for name in self._names(chain)) for chain in self._chains)
        places = [max(self._order.forecasts.places(name), 1) for name in self._names_of_cells]
        present = [self._queue_of(group) for group in waiting]
        groups = tuple(self._group(group, max(places), at) for group, at in zip(waiting, present, strict=True))
        queues = tuple(
            self._queue(name, cell, max(room or sum(self._sizes.values()), largest), count)
            for name, cell, room, count in zip(self._names_of_cells, self._cells, self._rooms, places, strict=True)
        )
        problem = Problem(
            now // 1000,
            groups,
            queues,
            tuple(tuple(self._blocks[name] for name in self._names(chain)) for chain in self._chains),
            tuple(self._sizes[name] for name in sorted(self._sizes)),
            tuple(
                self._rates(cell, self._slowness(name, cell, waiting), max(places) / count)
                for name, cell, count in zip(self._names_of_cells, self._cells, places, strict=True)
            ),
            alpha=self._state.config.order.plan_alpha,
            rounds=rounds,
            common=min(round(SAME_SPEED * self._order.forecasts.common_error), SAME_SPEED),
        )
        order = tuple(tuple(i for i, queue in enumerate(present) if queue == at) for at in range(len(queues)))
        return Planning(problem, tuple(self._names_of_cells), order)

    def _queue(self, name: str, cell: Sequence[str], room: int, places: int) -> PlanQueue:
        running = self._running(cell)
        ends: dict[str, float] = {}
        for each in running:
            rest = self._order.forecasts.rest(each).mean
            ends[each.chain.loaded_as] = max(ends.get(each.chain.loaded_as, 0.0), rest)
        loaded = [chain for chain in self._chains if self._loaded(chain, cell)]
        for chain in loaded:  # what is being loaded does not leave before it is there
            loading = 1e9 * self._loading(chain, cell)
            if loading > ends.get(chain.loaded_as, 0.0):
                ends[chain.loaded_as] = loading
        return PlanQueue(
            name,
            room,
            tuple(self._numbers[chain.version] for chain in loaded),
            self._busy(running, places),
            tuple(int(ends.get(chain.loaded_as, 0.0) / 1000) for chain in loaded),
            self._alone,
        )

    def _queue_of(self, group: Group) -> int:
        """Return the number of a group's cell; of its chain's first home where it is assigned to none."""
        if group.cell in self._names_of_cells:
            return self._names_of_cells.index(group.cell)
        chain = self._chains[self._numbers[group.key.chain]]
        return next((at for at, cell in enumerate(self._cells) if self._at_home(chain, cell)), 0)

    def _group(self, group: Group, places: int, queue: int) -> PlanGroup:
        """Return a group as it would be in a cell of a mean pace with so many places. `queue`: where it waits."""
        work, count = self._order.forecasts.work_in(group, None), len(group)
        objective, due = group.key.objective, group.due
        waits = objective is not None and objective.first_token
        if waits:  # its start has to be in time for its first token
            due -= int(self._order.forecasts.promised(group).mean)
        return PlanGroup(
            group.id,
            self._numbers[group.key.chain],
            count,
            due // 1000,
            _spread(Occupancy(work.mean * count / places, work.variance * count / places**2)),
            _spread(work),
            group.key.priority,
            waits,
            queue if group.started else None,
        )

    def _slowness(self, cell: str, devices: Sequence[str], waiting: Sequence[Group]) -> tuple[int, ...]:
        """Return by chain how long what waits takes in a cell, in 1/1024 of one of a mean pace (QL-22)."""
        there, usual = [0.0] * len(self._chains), [0.0] * len(self._chains)
        home = [self._at_home(chain, devices) for chain in self._chains]
        for group in waiting:
            number = self._numbers[group.key.chain]
            if home[number]:
                there[number] += len(group) * self._order.forecasts.work_in(group, cell).mean
                usual[number] += len(group) * self._order.forecasts.work_in(group, None).mean
        return tuple(
            (max(round(SAME_SPEED * time / mean), 1) if mean else SAME_SPEED) if here else 0
            for here, time, mean in zip(home, there, usual, strict=True)
        )

    def _names(self, chain: Chain) -> list[str]:
        names = list(self._state.sizes_of(use.block for use in chain.uses))
        adapters = f"adapters {chain.version}"
        return [*names, adapters] if adapters in self._sizes else names

    def _at_home(self, chain: Chain, cell: Sequence[str]) -> bool:
        """Return whether a cell has all blocks of a chain; elsewhere may be those that chains share, too."""
        where = self._state.block_map.instances
        return all(any(name in cell for name in where.get(use.block, ())) for use in chain.uses)

    def _loaded(self, chain: Chain, cell: Sequence[str]) -> bool:
        devices = (self._state.devices[name] for name in cell)
        return any(
            stage.model == chain.loaded_as
            for device in devices
            for stage in (*device.stages.loaded, *device.stages.loading)
        )

    def _loading(self, chain: Chain, cell: Sequence[str]) -> float:
        """Return the seconds until what a cell is loading of a chain is there."""
        devices = (self._state.devices[name] for name in cell)
        some = [each.name for each in devices if any(stage.model == chain.loaded_as for stage in each.stages.loading)]
        return max(map(self._state.times.loads.pending, some), default=0.0)

    def _room(self, cell: Sequence[str]) -> int:
        """Return the bytes of weights that a cell's devices hold beside the pages in use; 0: no limit."""
        room = 0
        for name in cell:
            device = self._state.devices[name]
            if not device.plan.limit:
                return 0
            room += min(device.plan.limit, device.pages.weights_beside(device.pages.used_pages))
        return max(room, 1)

    def _running(self, cell: Sequence[str]) -> list[ScheduledSequence]:
        return [each for each in self._state.running.values() if each.path and each.path[0].device in cell]

    def _busy(self, running: Sequence[ScheduledSequence], places: int) -> Spread:
        """Return how long what runs in a cell holds its places on average."""
        mean = variance = 0.0
        for each in map(self._order.forecasts.rest, running):
            mean, variance = mean + each.mean, variance + each.variance
        return _spread(Occupancy(mean / places, variance / places**2))

    def _rates(self, cell: Sequence[str], slowness: tuple[int, ...], crowding: float) -> QueueRates:
        """Return the rates of a cell. `crowding`: how many times as long a drain takes there for its fewer places."""
        loads, device = self._state.times.loads, cell[0]
        each = {name: round(1e6 * loads.block_seconds(device, name, _MIB)) for name in self._blocks}
        known = [time for time in each.values() if time] or [round(1e6 * loads.seconds_per_byte * _MIB)]
        cold, warm = max(known), min(known)
        return QueueRates(
            slowness,
            round(1e6 * loads.fixed(device)),
            cold,
            warm,
            frozenset(at for name, at in self._blocks.items() if each[name] < cold),
            keeps=warm < cold,
            drains=tuple(round(each * crowding) for each in slowness) if crowding > 1.0 else (),
        )


def _spread(work: Occupancy) -> Spread:
    return Spread(int(work.mean / 1000), int(work.variance**0.5 / 1000))
