"""How long solving a plan takes, by its size: simulated time must not depend on the machine that simulates."""

from __future__ import annotations

from runtime.control.scheduler_io import PlanSolved, SolvePlan
from runtime.scheduler.order.plan_solver import solution_of

#: Most rounds of a search; simulators have the plain kernel, so that a run is the same on every machine in fair time.
SIMULATED_ROUNDS = 1_000
#: Time in ns of each round of the search, more by groups per queue, and of the rest by group. Assumed: about what
#: the compiled kernel takes on two cores; `benchmarks.queue.planner time` measures it.
_ROUND, _ROUND_GROUP, _GROUP = 1_000, 400, 100_000
#: Time in ns of the paper's program, by group squared.
_PAPER = 5_000_000


def solved(command: SolvePlan) -> PlanSolved:
    """Return what a scheduler is told once its problem is solved, with the time of the table."""
    found = solution_of(command, rounds=min(command.problem.rounds, SIMULATED_ROUNDS))
    return PlanSolved(command.number, found.plan, found.why, solving_ns(command))


def solving_ns(command: SolvePlan) -> int:
    """Return the time that a plan takes, in ns."""
    groups, queues = len(command.problem.groups), len(command.problem.queues)
    if command.method == "paper":
        return _PAPER * groups * groups
    return groups * _GROUP + min(command.problem.rounds, SIMULATED_ROUNDS) * (
        _ROUND + _ROUND_GROUP * -(-groups // queues)
    )
