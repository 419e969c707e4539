"""Solve a problem by CP-SAT: one circuit through all queues, each followed by its groups (extra `cp-sat`, `ortools`).

    queue 0 -> a -> c -> queue 1 -> b -> queue 0          the orders (a, c) and (b)

The terms of the score are minimised one after the other, each with those before it held. Optimal, if the time suffices
and neighbours decide (`pairs`); good up to 30 groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from runtime.policy.slo.plan.evaluation import Evaluator
from runtime.policy.slo.plan.insertion import insert_all
from runtime.policy.slo.plan.pairs import PairCosts, busy, latest, times
from runtime.policy.slo.plan.problem import GroupPlan, Orders, Problem

#: Groups up to which this solver is worth its time.
MOST_GROUPS = 30


def solve_by_cp_sat(problem: Problem, seconds: float = 1.0, workers: int = 1) -> GroupPlan | None:
    """Return the best plan found within so many seconds of search, None without any.

    Raises ImportError without ortools.
    """
    model = _CircuitModel(problem)
    best = insert_all(problem)
    model.hint(best)
    left = seconds
    for number in range(len(model.terms)):
        found, took, proven = model.minimise(number, left, workers)
        left -= took
        if found is not None:
            best = found
        if not proven or left <= 0:
            break
    judge = Evaluator(problem)
    return GroupPlan(judge.names(best), judge.score(best), "cp-sat")


class _CircuitModel:
    def __init__(self, problem: Problem) -> None:
        from ortools.sat.python import cp_model

        self._cp, self._problem, self._judge = cp_model, problem, Evaluator(problem)
        self.model: Any = cp_model.CpModel()
        self._costs = PairCosts(self._judge)
        # Of loose bounds (2^42) presolve has found feasible problems infeasible.
        self._latest = latest(self._judge, self._costs)
        self._queues, self._groups = range(len(problem.queues)), range(len(problem.groups))
        make = self.model.new_bool_var
        self._in = [[make("") for _ in self._queues] for _ in self._groups]
        self._ahead: dict[tuple[int, int], Any] = {}
        self._first: dict[tuple[int, int], Any] = {}
        self._last: dict[tuple[int, int], Any] = {}
        self._starts = [
            [self.model.new_int_var(0, self._latest, "") for _ in range(problem.scenarios)] for _ in self._groups
        ]
        #: When a group, and all ahead of it in its queue, have ended.
        self._ended = [[self.model.new_int_var(0, self._latest, "") for _ in each] for each in self._starts]
        self._circuit()
        self._assignment()
        self._times()
        self.terms = self._score()

    def hint(self, orders: Orders) -> None:
        """Give the search an order to begin with."""
        behind = dict.fromkeys(self._ahead, False)
        for queue, some in enumerate(orders):
            behind |= dict.fromkeys(pairwise(some), True)
            for i in some:
                for other in self._queues:
                    self.model.add_hint(self._in[i][other], other == queue)
        for pair, value in behind.items():
            self.model.add_hint(self._ahead[pair], value)

    def minimise(self, number: int, seconds: float, workers: int) -> tuple[Orders | None, float, bool]:
        """Minimise a term and hold it; return the order, the seconds taken, and whether it is proven to be optimal."""
        solver = self._cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(seconds, 0.01)
        solver.parameters.num_workers = workers
        solver.parameters.random_seed = self._problem.seed % (1 << 31)
        self.model.minimize(self.terms[number])
        status = solver.solve(self.model)
        if status not in (self._cp.OPTIMAL, self._cp.FEASIBLE):
            return None, solver.wall_time, False
        orders = self._orders(solver)
        self.model.add(self.terms[number] <= round(solver.objective_value))
        self.model.clear_hints()
        self.hint(orders)
        return orders, solver.wall_time, status == self._cp.OPTIMAL

    def _circuit(self) -> None:
        arcs, count, queues = [], len(self._groups), len(self._queues)
        for i in self._groups:
            for j in self._groups:
                if i != j:
                    self._ahead[i, j] = self.model.new_bool_var("")
                    arcs.append((i, j, self._ahead[i, j]))
            for queue in self._queues:
                self._first[queue, i], self._last[queue, i] = self.model.new_bool_var(""), self.model.new_bool_var("")
                arcs.append((count + queue, i, self._first[queue, i]))
                arcs.append((i, count + (queue + 1) % queues, self._last[queue, i]))
        if queues > 1:
            for queue in self._queues:
                arcs.append((count + queue, count + (queue + 1) % queues, self.model.new_bool_var("")))
        self.model.add_circuit(arcs)

    def _assignment(self) -> None:
        for i, group in enumerate(self._problem.groups):
            self.model.add_exactly_one(self._in[i])
            for queue in self._queues:
                if not self._problem.able(queue, group):
                    self.model.add(self._in[i][queue] == 0)
                self.model.add_implication(self._first[queue, i], self._in[i][queue])
                self.model.add_implication(self._last[queue, i], self._in[i][queue])
        for (i, j), behind in self._ahead.items():
            for queue in self._queues:
                self.model.add(self._in[i][queue] == self._in[j][queue]).only_enforce_if(behind)

    def _times(self) -> None:
        t, groups = self._judge.layout, self._problem.groups
        drains = {(q, i): times(self._judge, t.drain, q, i) for q in self._queues for i in self._groups}
        finish = {(q, i): times(self._judge, t.finish, q, i) for q in self._queues for i in self._groups}
        free = [busy(self._judge, queue) for queue in self._queues]
        scenarios = range(self._problem.scenarios)
        alike = (
            len(
                {
                    (each.slowness, each.drains, each.load_us, each.cold_us, each.warm_us, each.warm)
                    for each in self._problem.rates
                }
            )
            == 1
        )
        for queue in self._queues:
            for i in self._groups:
                if self._problem.runs(queue, groups[i].chain):
                    chain = groups[i].chain
                    load, left = self._costs.load(queue, -1, chain), self._costs.ends(queue, chain)
                    own = self._costs.own_end(queue, chain)
                    for s in scenarios:
                        made = self.model.add(self._starts[i][s] >= max(free[queue][s], left) + load)
                        made.only_enforce_if(self._first[queue, i])
                        self.model.add(self._ended[i][s] >= own).only_enforce_if(self._first[queue, i])
                        self.model.add(self._ended[i][s] >= self._starts[i][s] + finish[queue, i][s]).only_enforce_if(
                            self._in[i][queue]
                        )
        for (i, j), behind in self._ahead.items():
            for queue in self._queues[:1] if alike else self._queues:
                if not (self._problem.runs(queue, groups[i].chain) and self._problem.runs(queue, groups[j].chain)):
                    continue
                load = self._costs.load(queue, groups[i].chain, groups[j].chain)
                literals = [behind] if alike else [behind, self._in[j][queue]]
                leaves = self._costs.leaves(queue, groups[i].chain, groups[j].chain)
                for s in scenarios:
                    made = self.model.add(self._starts[j][s] >= self._starts[i][s] + drains[queue, i][s] + load)
                    made.only_enforce_if(literals)
                    then = self._starts[j][s] - load if leaves else self._ended[j][s]
                    self.model.add(then >= self._ended[i][s]).only_enforce_if(literals)

    def _score(self) -> list[Any]:
        t, data, count = self._judge.layout, self._judge.data, self._problem.scenarios
        terms: list[Any] = [0] * t.terms
        for i in self._groups:
            judged = [times(self._judge, t.judged, queue, i) for queue in self._queues]
            finish = [times(self._judge, t.finish, queue, i) for queue in self._queues]
            ends = [self._starts[i][s] + sum(self._in[i][q] * finish[q][s] for q in self._queues) for s in range(count)]
            terms[-1] += data[t.members + i] * self._mean(ends)
            if not data[t.weight + i]:
                continue
            overs, late = [], []
            for s in range(count):
                over, is_late = self.model.new_int_var(0, 2 * self._latest, ""), self.model.new_bool_var("")
                end = self._starts[i][s] + sum(self._in[i][q] * judged[q][s] for q in self._queues)
                self.model.add(over >= end - data[t.due + i])
                self.model.add(over == 0).only_enforce_if(is_late.negated())
                overs.append(over)
                late.append(is_late)
            counted = self.model.new_bool_var("")
            self.model.add(sum(late) <= self._problem.spare + count * counted)
            rank = 2 * data[t.rank + i]
            terms[rank] += data[t.weight + i] * counted
            terms[rank + 1] += data[t.weight + i] * self._mean(overs)
        return terms

    def _mean(self, values: Sequence[Any]) -> Any:
        """Return the mean, rounded down as the evaluator does."""
        mean, count = self.model.new_int_var(0, 2 * self._latest, ""), len(values)
        self.model.add(count * mean >= sum(values) - (count - 1))
        return mean

    def _orders(self, solver: Any) -> Orders:
        after = {i: j for (i, j), behind in self._ahead.items() if solver.boolean_value(behind)}
        made = []
        for queue in self._queues:
            some = [i for i in self._groups if solver.boolean_value(self._first[queue, i])]
            while some and some[-1] in after:
                some.append(after[some[-1]])
            made.append(tuple(some))
        return tuple(made)
