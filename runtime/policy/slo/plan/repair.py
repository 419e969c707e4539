"""Bring a plan up to date that was made for a problem of a moment ago.

    repaired(plan, problem now, present order) -> GroupPlan | RejectedPlan

Groups that have ended are dropped, and new ones are inserted where they cost least, as are those that have begun
elsewhere meanwhile. What is worse than the present order is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runtime.policy.slo.plan.compiled import PLAIN, PlanKernel
from runtime.policy.slo.plan.evaluation import Evaluator
from runtime.policy.slo.plan.insertion import insert_all
from runtime.policy.slo.plan.problem import GroupPlan, Problem, RejectedPlan


def repaired(
    plan: GroupPlan,
    problem: Problem,
    present: Sequence[Sequence[int]] | None = None,
    kernel: PlanKernel = PLAIN,
    judge: Evaluator | None = None,
) -> GroupPlan | RejectedPlan:
    """Return the plan as it is for the problem now, or why it is of no use.

    Args:
        present: The order now, numbers of groups by queue; None: there is none.
        judge: The problem's evaluator, where there is one already.
    """
    if len(plan.orders) != len(problem.queues):
        return RejectedPlan("other queues")
    numbers = {group.id: i for i, group in enumerate(problem.groups)}
    if not any(name in numbers for some in plan.orders for name in some):
        return RejectedPlan("all its groups have ended")
    kept = [
        [numbers[name] for name in some if name in numbers and problem.able(queue, problem.groups[numbers[name]])]
        for queue, some in enumerate(plan.orders)
    ]
    orders = insert_all(problem, kept)
    judge = judge or Evaluator(problem, kernel)
    score = judge.score(orders)
    if present is not None and score > judge.score(present):
        return RejectedPlan("worse than the present order")
    return replace(plan, orders=judge.names(orders), score=score)
