"""Costs between neighbours, for solvers that know only which group is directly ahead.

The evaluator counts what is on a device after all groups ahead. Where no two chains fit together, and a load costs the
same each time, the group directly ahead decides (`neighbours_decide`), and these solvers are exact.
"""

from __future__ import annotations

from runtime.policy.slo.plan.compiled import PLAIN
from runtime.policy.slo.plan.evaluation import Evaluator
from runtime.policy.slo.plan.problem import Problem
from runtime.policy.slo.plan.tables import Layout


def neighbours_decide(problem: Problem) -> bool:
    """Return whether the loads of an order depend on neighbours alone."""
    chains, sizes = [frozenset(blocks) for blocks in problem.chains], problem.sizes
    for queue, rates in zip(problem.queues, problem.rates, strict=True):
        again = rates.warm_us != rates.cold_us and len(rates.warm) < len(sizes)
        if again and rates.keeps:
            return False
        for m, blocks in enumerate(chains):
            for other in chains[:m]:
                both = sum(sizes[block] for block in blocks | other)
                if other != blocks and both <= queue.room and not queue.exclusive:
                    return False
    return True


class PairCosts:
    """Load times by queue and chains, in us."""

    def __init__(self, judge: Evaluator) -> None:
        if judge.kernel is not PLAIN:
            raise ValueError("pair costs are computed by the plain kernel")
        self._judge, self._known = judge, dict[tuple[int, int, int], int]()
        self._gone: dict[tuple[int, int, int], tuple[int, ...]] = {}

    def load(self, queue: int, before: int, chain: int) -> int:
        """Return the time to load a chain behind another one; `before` -1: behind what is there at first."""
        key = (queue, before, chain)
        if key not in self._known:
            self._known[key] = self._load(*key)
        return self._known[key]

    def leaves(self, queue: int, before: int, chain: int) -> bool:
        """Return whether the chain before leaves for a load of another one, so that its groups have to end first."""
        self.load(queue, before, chain)
        return before in self._gone[queue, before, chain]

    def ends(self, queue: int, chain: int) -> int:
        """Return when what runs now of the chains that leave for the first load of a queue has ended."""
        self.load(queue, -1, chain)
        t = self._judge.layout
        return max((self._judge.data[t.ends + queue * t.chains + m] for m in self._gone[queue, -1, chain]), default=0)

    def own_end(self, queue: int, chain: int) -> int:
        """Return when what runs now of a chain has ended."""
        return int(self._judge.data[self._judge.layout.ends + queue * self._judge.layout.chains + chain])

    def _load(self, queue: int, before: int, chain: int) -> int:
        t, work = self._judge.layout, self._judge.work
        self._gone[queue, before, chain] = ()
        data = list(self._judge.data)
        if before == chain:
            return 0
        if before >= 0:
            row = t.resident + queue * t.chains
            data[row : row + t.chains] = [int(m == before) for m in range(t.chains)]
        group = self._judge.problem.groups.index(next(g for g in self._judge.problem.groups if g.chain == chain))
        cells = [-1] * (t.queues * t.groups)
        cells[queue * t.groups] = group
        PLAIN.load_times(t, data, queue, cells, 1, work)
        self._gone[queue, before, chain] = tuple(work[t.leaves : t.leaves + work[t.upto]])
        return int(work[t.loads])


def times(judge: Evaluator, column: int, queue: int, group: int) -> list[int]:
    """Return a group's times by scenario from a column of the layout: `drain`, `judged` or `finish`."""
    t: Layout = judge.layout
    at = column + (judge.data[t.rate + queue] * t.groups + group) * t.scenarios
    return [int(each) for each in judge.data[at : at + t.scenarios]]


def busy(judge: Evaluator, queue: int) -> list[int]:
    """Return when a queue is free, by scenario."""
    at = judge.layout.busy + queue * judge.layout.scenarios
    return [int(each) for each in judge.data[at : at + judge.layout.scenarios]]


def latest(judge: Evaluator, costs: PairCosts) -> int:
    """Return an upper bound of any end: all groups in the slowest queue, with the longest load before each."""
    problem, t = judge.problem, judge.layout
    chains = {-1, *(each.chain for each in problem.groups)}
    found = 0
    for queue in range(len(problem.queues)):
        total = max(*busy(judge, queue), *judge.data[t.ends + queue * t.chains :][: t.chains])
        for i, group in enumerate(problem.groups):
            if problem.runs(queue, group.chain):
                total += max(costs.load(queue, before, group.chain) for before in chains)
                total += max(*times(judge, t.finish, queue, i), *times(judge, t.drain, queue, i))
        found = max(found, total)
    return found
