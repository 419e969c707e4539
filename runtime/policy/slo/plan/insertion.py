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
    """

    number: int
    free: int
    order: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)
    until: dict[int, int] = field(default_factory=dict)
    loads: dict[int, tuple[int, int]] = field(default_factory=dict)


def insert_all(problem: Problem, kept: Sequence[Sequence[int]] = ()) -> Orders:
    """Return an order of all groups. `kept`: groups that stay where they are, by queue and in their order."""
    work, groups = _Insertion(problem), problem.groups
    for line, some in zip(work.lines, kept, strict=False):
        for each in some:
            work.append(line, each)
    known = {each for some in kept for each in some}
    rest = (i for i in range(len(groups)) if i not in known)
    for each in sorted(rest, key=lambda i: _urgency(groups, i)):
        work.insert(each)
    return tuple(tuple(line.order) for line in work.lines)


def by_deadline(problem: Problem) -> Orders:
    """Return the order by deadline alone (EDF): each group to the queue that is free first, whatever is loaded."""
    lines = [_Filling(number, queue.busy.mean) for number, queue in enumerate(problem.queues)]
    work = _Insertion(problem)
    for i in sorted(range(len(problem.groups)), key=lambda i: _urgency(problem.groups, i)):
        group = problem.groups[i]
        able = [line for line in lines if work.able(line, i)]
        line = min(able, key=lambda line: (line.free, line.number))
        line.order.append(i)
        line.free += work.drain(line, group)
    return tuple(tuple(line.order) for line in lines)


class _Insertion:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._blocks = [frozenset(blocks) for blocks in problem.chains]
        self._able = [[problem.able(queue, each) for each in problem.groups] for queue in range(len(problem.queues))]
        self.lines = [
            _Filling(
                number,
                queue.busy.mean,
                held=list(queue.resident),
                until=dict(zip(queue.resident, queue.ends, strict=False)),
            )
            for number, queue in enumerate(problem.queues)
        ]

    def able(self, line: _Filling, i: int) -> bool:
        return self._able[line.number][i]

    def drain(self, line: _Filling, group: PlanGroup) -> int:
        """Return the time until the queue is free for the next group."""
        return group.drain.mean * self._problem.rates[line.number].drain_factor(group.chain) // SAME_SPEED

    def finish(self, line: _Filling, group: PlanGroup) -> int:
        """Return the time from a group's start to what its deadline is about."""
        rates = self._problem.rates[line.number]
        time = group.drain.mean * (group.members - 1) // group.members * rates.drain_factor(group.chain)
        if not group.waits_only:
            time += group.execution.mean * rates.slowness[group.chain]
        return time // SAME_SPEED

    def insert(self, i: int) -> None:
        """Insert a group where it costs least."""
        group = self._problem.groups[i]
        due = group.due - self._problem.now
        best: tuple[int, int, int] | None = None
        chosen: tuple[_Filling, int] | None = None
        for line in self.lines:
            if not self.able(line, i):
                continue
            finish = self.finish(line, group)
            load, leaves = self._load(line, group.chain)
            end = max(line.free, leaves) + load + finish
            cost = (max(end - due, 0) * group.members, load, end)
            if best is None or cost < best:
                best, chosen = cost, (line, len(line.order))
            place = line.last.get(group.chain, len(line.order)) + 1
            if place < len(line.order):
                start = self._after(line, place - 1)
                harm = self._delayed(line, place, self.drain(line, group))
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
        line.order.append(i)
        line.ends.append(start + self.finish(line, group))
        line.until[group.chain] = max(line.until.get(group.chain, 0), line.ends[-1])
        line.free = start + self.drain(line, group)
        line.loads.clear()
        self._hold(line, group.chain)

    def _squeeze(self, line: _Filling, place: int, i: int) -> None:
        group = self._problem.groups[i]
        start, drain = self._after(line, place - 1), self.drain(line, group)
        line.order.insert(place, i)
        line.ends.insert(place, start + self.finish(line, group))
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

    def _after(self, line: _Filling, place: int) -> int:
        """Return when the group at a place has drained."""
        group = self._problem.groups[line.order[place]]
        return line.ends[place] - self.finish(line, group) + self.drain(line, group)

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
