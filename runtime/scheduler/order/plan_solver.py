"""Solve a scheduler's planning problem, on whatever thread or clock the driver has."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from runtime.control.scheduler_io import SolvePlan
from runtime.policy.slo.plan.annealing import solve
from runtime.policy.slo.plan.compiled import PLAIN, PlanKernel
from runtime.policy.slo.plan.paper import solve_as_paper
from runtime.policy.slo.plan.problem import GroupPlan

#: Rounds of the plain kernel beside a running server: 0.1 s of the interpreter for 10 groups of a queue, 1.4 s for 100.
PLAIN_ROUNDS = 500
#: Groups that the paper's program is given, and seconds for each round of its tangents.
_PAPER_GROUPS, _PAPER_SECONDS = 12, 2.0


class Solution(NamedTuple):
    """A plan, or why there is none."""

    plan: GroupPlan | None
    why: str


def solution_of(command: SolvePlan, kernel: PlanKernel = PLAIN, rounds: int | None = None) -> Solution:
    """Solve a problem; `rounds`: fewer than it has, where the kernel is slow."""
    problem = command.problem
    if command.method == "search":
        return Solution(solve(problem if rounds is None else replace(problem, rounds=rounds), kernel=kernel), "")
    if len(problem.groups) > _PAPER_GROUPS:
        return Solution(None, f"the paper's program is not tried with more than {_PAPER_GROUPS} groups")
    try:
        found = solve_as_paper(problem, _PAPER_SECONDS)
    except ImportError:
        return Solution(None, "the paper's program needs scipy: pip install 'blockzoo[plan]'")
    return Solution(found, "") if isinstance(found, GroupPlan) else Solution(None, found.why)
