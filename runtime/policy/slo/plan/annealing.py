"""Find an order of groups: insertion, then threshold accepting (QL-18, `kernel.search`).

    solve(problem, present) -> GroupPlan

Rounds are fixed and random numbers are drawn beforehand, so that a problem has one plan on any machine, with the
compiled kernel and without.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.policy.slo.plan.compiled import PLAIN, PlanKernel
from runtime.policy.slo.plan.evaluation import Evaluator
from runtime.policy.slo.plan.insertion import insert_all
from runtime.policy.slo.plan.problem import GroupPlan, Problem, Solver
from runtime.policy.slo.plan.scenarios import draws

#: Times that the search starts again from its best order.
_CYCLES = 4


def solve(problem: Problem, present: Sequence[Sequence[int]] | None = None, kernel: PlanKernel = PLAIN) -> GroupPlan:
    """Return the best order found, never a worse one than the present order.

    Args:
        present: The order now, numbers of groups by queue; None: there is none.
    """
    judge = Evaluator(problem, kernel)
    best = insert_all(problem)
    score, solver = judge.score(best), "insertion"
    if present is not None and (there := judge.score(present)) <= score:
        best, score, solver = tuple(map(tuple, present)), there, "present"
    if problem.rounds and len(problem.groups) > 1:
        cells, lengths = judge.cells(best)
        moves = kernel.column(draws(4 * problem.rounds, problem.seed))
        kernel.search(judge.layout, judge.data, cells, lengths, moves, problem.rounds, _CYCLES, judge.work)
        found = judge.score_of(cells, lengths)
        if found < score:
            best, score, solver = judge.orders(cells, lengths), found, "annealing"
    return GroupPlan(judge.names(best), score, _named(solver))


def _named(solver: str) -> Solver:
    return "annealing" if solver == "annealing" else "present" if solver == "present" else "insertion"
