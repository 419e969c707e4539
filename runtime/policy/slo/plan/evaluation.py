"""The one exact evaluator of orders, for all solvers (QL-18, equations 10 to 12).

    evaluate(problem, orders) -> PlanScore

A group ends after all groups ahead of it in its queue have drained, and after every load of weights on the way. What
leaves for a load first has to end: all members of groups of the chains that leave, and what runs of them now. (The
paper's queues drain only; without this, small groups of many models seem to take no longer than their loads.)
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.policy.slo.plan.compiled import PLAIN, PlanKernel
from runtime.policy.slo.plan.problem import Orders, PlanScore, Problem
from runtime.policy.slo.plan.tables import Tables, tables_of


class Evaluator:
    """A problem made ready for many evaluations. Orders are numbers of groups, by queue."""

    def __init__(self, problem: Problem, kernel: PlanKernel = PLAIN) -> None:
        self.problem, self.kernel = problem, kernel
        plain = tables_of(problem)
        self.layout = plain.layout
        self.data = kernel.column(plain.with_weights(_weights(plain)).data)
        self.work = kernel.column([0] * plain.layout.work)

    @property
    def hopeless(self) -> int:
        """Requests of groups that would be late alone and first: they have no weight in any order."""
        t = self.layout
        return sum(int(self.data[t.members + i]) for i in range(t.groups) if not self.data[t.weight + i])

    def score(self, orders: Sequence[Sequence[int]]) -> PlanScore:
        """Return the score of an order. Raises ValueError for one that is none."""
        cells, lengths = self.cells(orders)
        return self.score_of(cells, lengths)

    def score_of(self, cells: Sequence[int], lengths: Sequence[int]) -> PlanScore:
        """Return the score of an order in the kernel's form."""
        t, total = self.layout, [0] * self.layout.terms
        for queue in range(t.queues):
            self.kernel.queue_cost(t, self.data, queue, cells, lengths[queue], self.work)
            for term in range(t.terms):
                total[term] += int(self.work[t.costs + queue * t.terms + term])
        return PlanScore(tuple(zip(total[:-1:2], total[1::2], strict=True)), total[-1])

    def cells(self, orders: Sequence[Sequence[int]]) -> tuple[Sequence[int], Sequence[int]]:
        """Return an order in the kernel's form. Raises ValueError for one that is none."""
        check(self.problem, orders)
        count = self.layout.groups
        flat = [-1] * (count * self.layout.queues)
        for queue, some in enumerate(orders):
            flat[queue * count : queue * count + len(some)] = some
        return self.kernel.column(flat), self.kernel.column([len(some) for some in orders])

    def orders(self, cells: Sequence[int], lengths: Sequence[int]) -> Orders:
        """Return the order from the kernel's form."""
        count = self.layout.groups
        return tuple(
            tuple(int(group) for group in cells[queue * count : queue * count + int(length)])
            for queue, length in enumerate(lengths)
        )

    def names(self, orders: Orders) -> Orders:
        """Return the ids of the groups of an order."""
        return tuple(tuple(self.problem.groups[group].id for group in some) for some in orders)


def evaluate(problem: Problem, orders: Sequence[Sequence[int]]) -> PlanScore:
    """Return the score of an order: numbers of groups, by queue. Raises ValueError for one that is none."""
    return Evaluator(problem).score(orders)


def check(problem: Problem, orders: Sequence[Sequence[int]]) -> None:
    """Raise ValueError unless each group is in one queue that can run it, pinned ones in theirs."""
    if len(orders) != len(problem.queues) or sorted(i for some in orders for i in some) != list(
        range(len(problem.groups))
    ):
        raise ValueError("an order has each group once, in one of the problem's queues")
    for queue, some in enumerate(orders):
        for each in some:
            if not problem.able(queue, group := problem.groups[each]):
                raise ValueError(
                    f"queue {problem.queues[queue].name} cannot run group {group.id}, or it has begun elsewhere"
                )


def _weights(tables: Tables) -> list[int]:
    """Return the weight of each group: none for one that is late alone and first in every queue that can run it."""
    t, alone = tables.layout, _Alone(tables)
    return [tables.data[t.members + group] if alone.on_time(group) else 0 for group in range(t.groups)]


class _Alone:
    """Groups as if each were alone in its queue."""

    def __init__(self, tables: Tables) -> None:
        self._t, self._data = tables.layout, tables.data
        self._work = [0] * self._t.work
        self._cells = [0] * (self._t.queues * self._t.groups)
        self._loads: dict[tuple[int, int], tuple[int, int]] = {}

    def on_time(self, group: int) -> bool:
        """Return whether some queue may have a group on time: it has in more scenarios than may be left out."""
        t, data = self._t, self._data
        chain, due = data[t.chain + group], data[t.due + group]
        for queue in range(t.queues):
            if not data[t.able + queue * t.groups + group]:
                continue
            at, busy = (data[t.rate + queue] * t.groups + group) * t.scenarios, t.busy + queue * t.scenarios
            load, ends = self._load(queue, chain, group)
            latest = due - load
            late = sum(max(data[busy + s], ends) + data[t.judged + at + s] > latest for s in range(t.scenarios))
            if late < t.scenarios - t.spare:
                return True
        return False

    def _load(self, queue: int, chain: int, group: int) -> tuple[int, int]:
        """Return the time to load a group's chain, and when what leaves for it has ended."""
        if (queue, chain) not in self._loads:
            t, work = self._t, self._work
            self._cells[queue * t.groups] = group
            PLAIN.load_times(t, self._data, queue, self._cells, 1, work)
            gone = work[t.leaves : t.leaves + work[t.upto]]
            ends = max((self._data[t.ends + queue * t.chains + m] for m in gone), default=0)
            self._loads[queue, chain] = work[t.loads], ends
        return self._loads[queue, chain]
