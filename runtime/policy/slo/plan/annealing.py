"""Find an order of groups: insertion, then threshold accepting (QL-18, `kernel.search`).

    solve(problem, present) -> GroupPlan

Rounds are fixed and random numbers are drawn beforehand, so that a problem has one plan on any machine, with the
compiled kernel and without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runtime.policy.slo.plan.compiled import PLAIN, PlanKernel
from runtime.policy.slo.plan.evaluation import Evaluator
from runtime.policy.slo.plan.insertion import insert_all
from runtime.policy.slo.plan.problem import GroupPlan, PlanScore, Problem
from runtime.policy.slo.plan.scenarios import draws

#: Times that the search starts again from its best order.
_CYCLES = 4


def solve(problem: Problem, present: Sequence[Sequence[int]] | None = None, kernel: PlanKernel = PLAIN) -> GroupPlan:
    """Return the best order found, never a worse one than the present order.

    Args:
        present: The order now, numbers of groups by queue; None: there is none.
    """
    judge = Evaluator(problem, kernel)
    quick = _inserted(judge, present, None if present is None else judge.score(present))
    if problem.rounds and len(problem.groups) > 1:
        cells, lengths = judge.cells(quick.orders)
        moves = kernel.column(draws(4 * problem.rounds, problem.seed))
        kernel.search(judge.layout, judge.data, cells, lengths, moves, problem.rounds, _CYCLES, judge.work)
        found = judge.score_of(cells, lengths)
        if found < quick.score:
            quick = GroupPlan(judge.orders(cells, lengths), found, "annealing")
    return replace(quick, orders=judge.names(quick.orders))


def solve_quickly(judge: Evaluator, present: Sequence[Sequence[int]], score: PlanScore) -> GroupPlan:
    """Return the present order, which has that score, or the one that insertion finds where it is better."""
    quick = _inserted(judge, present, score)
    return replace(quick, orders=judge.names(quick.orders))


def _inserted(judge: Evaluator, present: Sequence[Sequence[int]] | None, score: PlanScore | None) -> GroupPlan:
    """Return the plan with numbers of groups instead of ids."""
    orders = insert_all(judge.problem)
    found = GroupPlan(orders, judge.score(orders), "insertion")
    if present is not None and score is not None and score <= found.score:
        return GroupPlan(tuple(map(tuple, present)), score, "present")
    return found
