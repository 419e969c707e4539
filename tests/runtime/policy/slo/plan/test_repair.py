"""Plans that are late: groups have ended, begun, and come."""

from __future__ import annotations

from dataclasses import replace

from runtime.policy.slo.plan.annealing import solve
from runtime.policy.slo.plan.evaluation import Evaluator, evaluate
from runtime.policy.slo.plan.problem import GroupPlan, Problem, RejectedPlan
from runtime.policy.slo.plan.repair import repaired
from tests.runtime.policy.slo.plan.problems import SECOND, drawn, group, problem


def _without(made: Problem, *gone: int) -> Problem:
    return replace(made, groups=tuple(each for each in made.groups if each.id not in gone))


def _repaired(plan: GroupPlan, made: Problem) -> GroupPlan:
    found = repaired(plan, made)
    assert isinstance(found, GroupPlan)
    return found


def test_groups_that_have_ended_are_dropped() -> None:
    made = drawn(8, 2, 0, rounds=500)
    plan = solve(made)
    later = _without(made, 0, 3)
    found = _repaired(plan, later)
    assert found.orders == tuple(tuple(each for each in some if each not in (0, 3)) for some in plan.orders)
    numbers = {each.id: at for at, each in enumerate(later.groups)}
    assert found.score == evaluate(later, [[numbers[each] for each in some] for some in found.orders])


def test_new_groups_are_inserted() -> None:
    plan = solve(problem([group(0, 0), group(1, 1)], cells=1))
    found = _repaired(plan, problem([group(0, 0), group(1, 1), group(2, 0), group(3, 1)]))
    assert found.orders == ((0, 2, 1, 3),)


def test_group_that_has_begun_elsewhere_stays_there() -> None:
    made = problem([group(number) for number in range(4)], cells=2)
    plan = solve(made)
    moved = plan.orders[0][-1]
    groups = tuple(replace(each, pinned=1 if each.id == moved else None) for each in made.groups)
    found = _repaired(plan, replace(made, groups=groups))
    assert moved in found.orders[1]


def test_plan_worse_than_the_present_order_is_rejected() -> None:
    made = problem([group(0, due=SECOND), group(1)])
    judge = Evaluator(made)
    late = GroupPlan(((1, 0),), judge.score(((1, 0),)), "annealing")
    assert repaired(late, made, ((0, 1),)) == RejectedPlan("worse than the present order")
    assert isinstance(repaired(late, made, ((1, 0),)), GroupPlan)
    assert isinstance(repaired(late, made), GroupPlan)


def test_plan_of_groups_that_have_all_ended_is_rejected() -> None:
    plan = solve(problem([group(0)]))
    assert repaired(plan, problem([group(7)])) == RejectedPlan("all its groups have ended")
    assert repaired(plan, problem([group(0)], cells=2)) == RejectedPlan("other queues")
