"""Put groups into queues one by one, the earliest deadline first, each where it costs least by mean times.

A group goes to the end of a queue, or directly behind the last group of its chain there, so that the weights are loaded
once for both. Always fast: O(groups x queues). It looks at means only; `evaluation` judges the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.policy.slo.plan.problem import SAME_SPEED, Orders, PlanGroup, Problem


@dataclass(slots=True)
class _Filling:
    """A queue that is being filled.

    Fields:
        free: When its last group has drained.
        order: Groups so far.
        ends: When each of them ends.
        held: Chains of which the weights are there at the end, the latest use last.
        last: Place of the last group of each chain.
        until: When all groups of each chain have ended.
        loads: Time to load each chain at the end, and when what leaves for it has ended, as far as asked for.
        begun: Groups that are pinned.
    """

    number: int
    free: int
    order: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)
    until: dict[int, int] = field(default_factory=dict)
    loads: dict[int, tuple[int, int]] = field(default_factory=dict)
    begun: int = 0


def insert_all(problem: Problem, begun: Sequence[Sequence[int]] = ()) -> Orders:
    """Return an order of all groups.

    `begun`: groups that stay where they are, by queue and in their order; at first pinned ones alone.
    """
    work = _Insertion(problem)
    groups = problem.groups
    there = [list(some) for some in begun] or [
        sorted((i for i, each in enumerate(groups) if each.pinned == queue), key=lambda i: _urgency(groups, i))
        for queue in range(len(problem.queues))
    ]
    for line, some in zip(work.lines, there, strict=True):
        for each in some:
            work.append(line, each)
    known = {each for some in there for each in some}
    rest = (i for i in range(len(groups)) if i not in known)
    for each in sorted(rest, key=lambda i: _urgency(groups, i)):
        work.insert(each)
    return tuple(tuple(line.order) for line in work.lines)


def by_deadline(problem: Problem) -> Orders:
    """Return the order by deadline alone (EDF): each group to the queue that is free first, whatever is loaded."""
    lines = [_Filling(number, queue.busy.mean) for number, queue in enumerate(problem.queues)]
    work = _Insertion(problem)
    pinned = [i for i, each in enumerate(problem.groups) if each.pinned is not None]
    free = [i for i, each in enumerate(problem.groups) if each.pinned is None]
    for i in (
        *sorted(pinned, key=lambda i: _urgency(problem.groups, i)),
        *sorted(free, key=lambda i: _urgency(problem.groups, i)),
    ):
        group = problem.groups[i]
        able = [line for line in lines if work.able(line, group)]
        line = min(able, key=lambda line: (line.free, line.number))
        line.order.append(i)
        line.free += work.time(line, group, group.drain.mean)
    return tuple(tuple(line.order) for line in lines)


class _Insertion:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._blocks = [frozenset(blocks) for blocks in problem.chains]
        self._able = [
            [problem.runs(queue, chain) for chain in range(len(problem.chains))] for queue in range(len(problem.queues))
        ]
        self.lines = [
            _Filling(
                number,
                queue.busy.mean,
                held=list(queue.resident),
                until=dict(zip(queue.resident, queue.ends, strict=False)),
            )
            for number, queue in enumerate(problem.queues)
        ]

    def able(self, line: _Filling, group: PlanGroup) -> bool:
        return self._able[line.number][group.chain] and group.pinned in (None, line.number)

    def time(self, line: _Filling, group: PlanGroup, mean: int) -> int:
        return mean * self._problem.rates[line.number].slowness[group.chain] // SAME_SPEED

    def insert(self, i: int) -> None:
        """Insert a group where it costs least."""
        group = self._problem.groups[i]
        due = group.due - self._problem.now
        best: tuple[int, int, int] | None = None
        chosen: tuple[_Filling, int] | None = None
        for line in self.lines:
            if not self._able[line.number][group.chain]:
                continue
            finish = self.time(line, group, self._finish(group))
            load, leaves = self._load(line, group.chain)
            end = max(line.free, leaves) + load + finish
            cost = (max(end - due, 0) * group.members, load, end)
            if best is None or cost < best:
                best, chosen = cost, (line, len(line.order))
            place = line.last.get(group.chain, len(line.order)) + 1
            if line.begun <= place < len(line.order):
                drain = self.time(line, group, group.drain.mean)
                before = line.ends[place - 1]
                start = before - self.time(line, group, self._finish(self._problem.groups[line.order[place - 1]]))
                start += self.time(line, group, self._problem.groups[line.order[place - 1]].drain.mean)
                harm = self._delayed(line, place, drain)
                cost = (max(start + finish - due, 0) * group.members + harm, 0, start + finish)
                if cost < best:
                    best, chosen = cost, (line, place)
        if chosen is None:
            raise ValueError(f"no queue can run group {group.id}")
        line, place = chosen
        if place == len(line.order):
            self.append(line, i)
        else:
            self._squeeze(line, place, i)

    def append(self, line: _Filling, i: int) -> None:
        """Put a group at the end of a queue."""
        group = self._problem.groups[i]
        load, leaves = self._load(line, group.chain)
        start = max(line.free, leaves) + load
        line.last[group.chain] = len(line.order)
        line.begun += group.pinned is not None
        line.order.append(i)
        line.ends.append(start + self.time(line, group, self._finish(group)))
        line.until[group.chain] = max(line.until.get(group.chain, 0), line.ends[-1])
        line.free = start + self.time(line, group, group.drain.mean)
        line.loads.clear()
        self._hold(line, group.chain)

    def _squeeze(self, line: _Filling, place: int, i: int) -> None:
        group = self._problem.groups[i]
        previous = self._problem.groups[line.order[place - 1]]
        start = line.ends[place - 1] + self.time(line, previous, previous.drain.mean - self._finish(previous))
        drain = self.time(line, group, group.drain.mean)
        line.order.insert(place, i)
        line.ends.insert(place, start + self.time(line, group, self._finish(group)))
        for at in range(place + 1, len(line.ends)):
            line.ends[at] += drain
            chain = self._problem.groups[line.order[at]].chain
            line.until[chain] = max(line.until[chain], line.ends[at])
        line.until[group.chain] = max(line.until[group.chain], line.ends[place])
        line.free += drain
        line.loads.clear()
        for chain, at in line.last.items():
            if at >= place:
                line.last[chain] = at + 1
        line.last[group.chain] = place

    def _delayed(self, line: _Filling, place: int, drain: int) -> int:
        """Return the lateness that groups from a place on get more by so much delay."""
        more = 0
        for at in range(place, len(line.order)):
            group = self._problem.groups[line.order[at]]
            over = line.ends[at] + drain - (group.due - self._problem.now)
            if over > 0:
                more += min(over, drain) * group.members
        return more

    def _finish(self, group: PlanGroup) -> int:
        waits = group.drain.mean * (group.members - 1) // group.members
        return waits if group.waits_only else waits + group.execution.mean

    def _load(self, line: _Filling, chain: int) -> tuple[int, int]:
        """Return the time to load a chain at the end of a queue, and when what leaves for it has ended."""
        found = line.loads.get(chain)
        if found is None:
            found = line.loads[chain] = self._load_now(line, chain)
        return found

    def _load_now(self, line: _Filling, chain: int) -> tuple[int, int]:
        if chain in line.held:
            return 0, 0
        rates = self._problem.rates[line.number]
        there = frozenset().union(*(self._blocks[each] for each in line.held))
        time = rates.load_us
        for block in self._blocks[chain] - there:
            time += (self._problem.sizes[block] * (rates.warm_us if block in rates.warm else rates.cold_us)) >> 20
        gone = line.held[: self._leaving(line, [*line.held, chain])]
        return time, max((line.until.get(each, 0) for each in gone), default=0)

    def _hold(self, line: _Filling, chain: int) -> None:
        """Note that a chain is used at the end of a queue; what was used longest ago leaves if it does not fit."""
        if chain in line.held:
            line.held.remove(chain)
            line.held.append(chain)
            return
        line.held.append(chain)
        del line.held[: self._leaving(line, line.held)]

    def _leaving(self, line: _Filling, held: Sequence[int]) -> int:
        """Return how many of these chains, from the first on, leave so that the rest fits; the last one stays."""
        room, sizes = self._problem.room_with(line.number, held[-1]), self._problem.sizes
        for gone in range(len(held) - 1):
            if sum(sizes[block] for block in frozenset().union(*(self._blocks[each] for each in held[gone:]))) <= room:
                return gone
        return len(held) - 1


def _urgency(groups: Sequence[PlanGroup], i: int) -> tuple[int, int, int]:
    return groups[i].priority, groups[i].due, i
