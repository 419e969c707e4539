"""Bring a plan up to date that was made for a problem of a moment ago.

    repaired(plan, problem now, present order) -> GroupPlan | RejectedPlan

Groups that have ended are dropped, those that have begun are at the head of their queues, and new ones are inserted
where they cost least. What is worse than the present order is rejected.
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
    kept = [[numbers[name] for name in some if name in numbers] for some in plan.orders]
    orders = insert_all(problem, [_in_place(problem, queue, kept) for queue in range(len(kept))])
    judge = judge or Evaluator(problem, kernel)
    score = judge.score(orders)
    if present is not None and score > judge.score(present):
        return RejectedPlan("worse than the present order")
    return replace(plan, orders=judge.names(orders), score=score)


def _in_place(problem: Problem, queue: int, kept: Sequence[Sequence[int]]) -> list[int]:
    """Return the kept groups of a queue: those that have begun there, whatever was planned, then the rest."""
    groups = problem.groups
    begun = [i for i, each in enumerate(groups) if each.pinned == queue]
    planned = {i: place for place, i in enumerate(kept[queue])}
    begun.sort(key=lambda i: (planned.get(i, -1), groups[i].due, i))
    return begun + [i for i in kept[queue] if groups[i].pinned is None and problem.runs(queue, groups[i].chain)]
