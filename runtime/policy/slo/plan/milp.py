"""Solve a problem as a mixed-integer linear program over slots: group i is the j-th of queue g (extra `plan`, scipy).

Times are in ms, in floating point. The terms of the score are minimised one after the other, each with those before it
held. Meant for few groups; `benchmarks.queue.planner` shows how few.
"""

from __future__ import annotations

from collections import defaultdict

from runtime.policy.slo.plan.evaluation import Evaluator
from runtime.policy.slo.plan.linear import LinearProgram, Slots, Terms
from runtime.policy.slo.plan.pairs import PairCosts, busy, latest, times
from runtime.policy.slo.plan.problem import GroupPlan, Problem

_US_PER_MS = 1000.0


def solve_by_milp(problem: Problem, seconds: float = 1.0) -> GroupPlan | None:
    """Return the best plan found within so many seconds for each term of the score, None without any.

    Exact where neighbours decide (`pairs`), up to the solver's tolerance. Raises ImportError without scipy.
    """
    model, judge = _SlotModel(problem), Evaluator(problem)
    best: GroupPlan | None = None
    for terms in model.terms:
        values, final = model.program.minimise(terms, seconds)
        if values is None:
            break
        orders = model.orders(values)
        plan = GroupPlan(judge.names(orders), judge.score(orders), "milp")
        best = plan if best is None else min(best, plan, key=lambda each: each.score)
        if not final:
            break
        model.program.at_most(terms, sum(cost * values[each] for each, cost in terms.items()) + 1e-3)
    return best


class _SlotModel:
    def __init__(self, problem: Problem) -> None:
        self._problem, self._judge, self.program = problem, Evaluator(problem), LinearProgram()
        self._costs = PairCosts(self._judge)
        slots = Slots(problem, self.program)
        self._x, self._by_slot, self.orders = slots.x, slots.there, slots.orders
        self._by_group: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for g, i, j in self._x:
            self._by_group[i].append((g, j))
        self._starts: dict[tuple[int, int, int], int] = {}
        #: When the group of a slot, and all ahead of it in the queue, have ended.
        self._ended: dict[tuple[int, int, int], int] = {}
        self._longest = latest(self._judge, self._costs) / _US_PER_MS
        self._assign()
        self._time()
        self.terms = self._score()

    def _assign(self) -> None:
        program = self.program
        for i, places in self._by_group.items():
            program.equal({self._x[g, i, j]: 1.0 for g, j in places}, 1.0)
        for (g, j), some in self._by_slot.items():
            here = {self._x[g, i, j]: 1.0 for i in some}
            program.at_most(here, 1.0)
            if j:  # no empty slot before a full one
                program.at_most(here | {self._x[g, i, j - 1]: -1.0 for i in some}, 0.0)

    def _time(self) -> None:
        """Rows of the start of each slot, in each scenario: after the slot before, and the load between them."""
        program, t, groups = self.program, self._judge.layout, self._problem.groups
        for g, j in sorted(self._by_slot):
            some = self._by_slot[g, j]
            load, left = program.positive(), program.positive()
            chains = sorted({groups[i].chain for i in some})
            of = {m: {self._x[g, i, j]: 1.0 for i in some if groups[i].chain == m} for m in chains}
            leaving: list[dict[int, float]] = []
            for m in chains:
                if not j:
                    cost, ends = self._costs.load(g, -1, m) / _US_PER_MS, self._costs.ends(g, m) / _US_PER_MS
                    program.at_least({load: 1.0} | dict.fromkeys(of[m], -cost), 0.0)
                    program.at_least({left: 1.0} | dict.fromkeys(of[m], -ends), 0.0)
                    continue
                for before in chains:
                    cost = self._costs.load(g, before, m) / _US_PER_MS
                    there = {self._x[g, i, j - 1]: 1.0 for i in some if groups[i].chain == before}
                    if cost:
                        program.at_least({load: 1.0} | dict.fromkeys(of[m], -cost) | _scaled(there, -cost), -cost)
                    if self._costs.leaves(g, before, m):
                        leaving.append(dict.fromkeys(of[m], 1.0) | there)
            for s in range(self._problem.scenarios):
                start, ended = program.positive(), program.positive()
                self._starts[g, j, s], self._ended[g, j, s] = start, ended
                for i in some:
                    finish = times(self._judge, t.finish, g, i)[s] / _US_PER_MS
                    last = self._longest
                    program.at_least({ended: 1.0, start: -1.0, self._x[g, i, j]: -last}, finish - last)
                if not j:
                    program.at_least({start: 1.0, load: -1.0}, busy(self._judge, g)[s] / _US_PER_MS)
                    program.at_least({start: 1.0, load: -1.0, left: -1.0}, 0.0)
                    for m in chains:
                        own = self._costs.own_end(g, m) / _US_PER_MS
                        program.at_least({ended: 1.0} | dict.fromkeys(of[m], -own), 0.0)
                    continue
                drains = {self._x[g, i, j - 1]: -times(self._judge, t.drain, g, i)[s] / _US_PER_MS for i in some}
                program.at_least({start: 1.0, load: -1.0, self._starts[g, j - 1, s]: -1.0} | drains, 0.0)
                before_it = self._ended[g, j - 1, s]
                program.at_least({ended: 1.0, before_it: -1.0}, 0.0)
                for both in leaving:  # of these chains one is in this slot and one in the slot before
                    program.at_least(
                        {start: 1.0, load: -1.0, before_it: -1.0} | _scaled(both, -self._longest), -2 * self._longest
                    )

    def _score(self) -> list[dict[int, float]]:
        program, t, data = self.program, self._judge.layout, self._judge.data
        count, longest = self._problem.scenarios, self._longest
        terms: list[dict[int, float]] = [{} for _ in range(t.terms)]
        for i, places in self._by_group.items():
            weight, due = data[t.weight + i], data[t.due + i] / _US_PER_MS
            late = program.binary()
            misses: dict[int, float] = {}
            most = longest - min(due, 0.0)
            for s in range(count):
                over, end, missed = program.positive(), program.positive(), program.binary()
                for g, j in places:
                    start, placed = self._starts[g, j, s], self._x[g, i, j]
                    judged = times(self._judge, t.judged, g, i)[s] / _US_PER_MS
                    finish = times(self._judge, t.finish, g, i)[s] / _US_PER_MS
                    program.at_least({over: 1.0, start: -1.0, placed: -most}, judged - due - most)
                    program.at_least({end: 1.0, start: -1.0, placed: -longest}, finish - longest)
                program.at_most({over: 1.0, missed: -most}, 0.0)
                misses[missed] = 1.0
                terms[-1][end] = data[t.members + i] / count
                if weight:
                    terms[2 * data[t.rank + i] + 1][over] = weight / count
            program.at_most(misses | {late: -float(count)}, float(self._problem.spare))
            if weight:
                terms[2 * data[t.rank + i]][late] = float(weight)
        return terms


def _scaled(terms: Terms, factor: float) -> dict[int, float]:
    return {variable: factor * value for variable, value in terms.items()}
