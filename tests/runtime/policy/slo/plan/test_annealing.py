"""Insertion and annealing (QL-18) beside all orders of small problems."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from runtime.policy.slo.plan import kernel
from runtime.policy.slo.plan.annealing import solve, solve_quickly
from runtime.policy.slo.plan.compiled import PlanKernel
from runtime.policy.slo.plan.evaluation import Evaluator, check, evaluate
from runtime.policy.slo.plan.insertion import by_deadline, insert_all
from runtime.policy.slo.plan.problem import GroupPlan, PlanQueue, Problem, Spread
from tests.runtime.policy.slo.plan.problems import MIB, SECOND, all_orders, drawn, group, problem


@pytest.mark.parametrize("together", [False, True])
def test_small_problems_are_solved(together: bool) -> None:
    """Must show 6 in small: the best of all orders of 2 queues x 5 groups; models may fit together."""
    for seed in range(4):
        made = drawn(5, 2, seed, together=together, rounds=2000)
        judge = Evaluator(made)
        assert solve(made).score == min(map(judge.score, all_orders(5, 2)))


def test_search_improves_what_insertion_finds() -> None:
    better = 0
    for seed in range(4):
        made = drawn(16, 3, seed, models=5, together=True)
        first, found = solve(made), solve(replace(made, rounds=1500))
        assert found.score <= first.score
        assert first.solver == "insertion"
        better += found.score < first.score
    assert better == 4


def test_plan_is_never_worse_than_the_present_order() -> None:
    for seed in range(10):
        made = drawn(6, 2, seed)
        judge = Evaluator(made)
        best = min(all_orders(6, 1), key=lambda orders: judge.score((*orders, ())))
        present = (*best, ())
        plan = solve(made, present)
        assert plan.score <= judge.score(present)
        if plan.solver == "present":
            assert plan.orders == judge.names(present)


def test_insertion_puts_groups_of_one_model_together() -> None:
    """QL-20: EDF would load a model before each group."""
    made = problem([group(number, number % 2, 60 * SECOND + number) for number in range(8)])
    assert by_deadline(made) == (tuple(range(8)),)
    assert insert_all(made) == ((0, 2, 4, 6, 1, 3, 5, 7),)
    assert evaluate(made, insert_all(made)) < evaluate(made, by_deadline(made))


def test_insertion_knows_that_one_model_is_there_at_a_time() -> None:
    """The last group is on time behind the other model's only where its own is still there."""
    groups = [group(0, 0, due=1500_000), group(1, 1, due=4500_000), group(2, 0, due=6 * SECOND)]
    both = {alone: PlanQueue("q", 2048 * MIB, (0,), exclusive=alone) for alone in (False, True)}
    found = {alone: insert_all(problem(groups, queues=(queue,))) for alone, queue in both.items()}
    assert found == {False: ((0, 1, 2),), True: ((0, 2, 1),)}


def test_insertion_loads_for_an_urgent_group_first() -> None:
    made = problem([group(0, 0), group(1, 0), group(2, 1, due=4 * SECOND)])
    assert insert_all(made) == ((2, 0, 1),)


def test_groups_that_have_begun_stay_in_their_queue() -> None:
    """QL-12: whatever is gained by it."""
    for seed in range(6):
        made = drawn(8, 2, seed, rounds=1500)
        groups = tuple(replace(each, pinned=each.id % 2 if each.id < 3 else None) for each in made.groups)
        pinned = replace(made, groups=groups)
        plan = solve(pinned)
        check(pinned, plan.orders)
        assert {0, 2} <= set(plan.orders[0])
        assert 1 in plan.orders[1]


def test_an_urgent_group_goes_before_one_that_has_begun() -> None:
    """QL-09 lets its running members give way."""
    made = problem([group(0, due=60 * SECOND, pinned=0), group(1, due=SECOND)], rounds=50)
    assert solve(made).orders == ((1, 0),)


def test_slow_queue_gets_less() -> None:
    """QL-22."""
    made = problem([group(number) for number in range(12)], cells=2, rounds=1500)
    slow = replace(made.rates[0], slowness=(3072, 3072))
    fast, other = solve(replace(made, rates=(made.rates[0], slow))).orders
    assert 8 <= len(fast) <= 10
    assert len(other) == 12 - len(fast)


def test_queue_that_runs_fewer_at_a_time_gets_less() -> None:
    """QL-22: its members take as long as elsewhere, but the queue is free later."""
    made = problem([group(number) for number in range(12)], cells=2, rounds=1500)
    few = replace(made.rates[0], drains=(3072, 3072))
    large, small = solve(replace(made, rates=(made.rates[0], few))).orders
    assert 8 <= len(large) <= 10
    # The last of ten members starts after 2.7 s in one, and after 2.4 s in the other, which is busy for 1.5 s.
    lines = (made.queues[0], replace(made.queues[1], busy=Spread(3 * SECOND // 2)))
    assert insert_all(replace(made, groups=made.groups[:1], queues=lines, rates=(few, made.rates[0]))) == ((), (0,))
    assert len(small) == 12 - len(large)


def test_plan_is_a_function_of_its_problem() -> None:
    made = drawn(12, 3, 5, rounds=800)
    assert solve(made) == solve(made)
    assert solve(replace(made, seed=6)) != solve(made)


def test_empty_problem_has_an_empty_plan() -> None:
    plan = solve(problem([], rounds=10))
    assert isinstance(plan, GroupPlan)
    assert plan.orders == ((),)


def test_members_are_weighed() -> None:
    """Two groups of which one can be on time: the larger one is."""
    small = replace(group(0, due=SECOND), members=2)
    large = replace(group(1, due=SECOND + 1), members=20)
    plan = solve(problem([small, large], rounds=50))
    assert plan.orders == ((1, 0),)


def test_bounds_of_a_problem() -> None:
    made: Problem = problem([group(0, members=1 << 19), group(1, members=1 << 19, drain=1 << 50)])
    assert solve(made).score.completion > 0
    with pytest.raises(ValueError, match="at most 1,048,576 requests"):
        problem([group(0, members=(1 << 20) + 1)])
    with pytest.raises(ValueError, match="alpha is between"):
        problem([group(0)], alpha=1.0)
    assert Spread(1).sigma == 0


def test_insertion_counts_what_has_to_end_before_a_load() -> None:
    """Of two queues one is free at once, but what is on it ends after 20 s; the other is free after 3 s."""
    slow = PlanQueue("b", 1024 * MIB, (0,), Spread(3 * SECOND))
    runs = problem([group(0, 1)], cells=2, queues=(PlanQueue("a", 1024 * MIB, (0,), ends=(20 * SECOND,)), slow))
    assert insert_all(runs) == ((), (0,))
    long = group(0, 0, execution=Spread(20 * SECOND), pinned=0)
    ahead = problem([long, group(1, 1)], cells=2, queues=(PlanQueue("a", 1024 * MIB, (0,)), slow))
    assert insert_all(ahead) == ((0,), (1,))


def test_a_worse_order_does_not_stay_for_being_the_present_one() -> None:
    made = problem([group(number, number % 2) for number in range(6)])
    judge = Evaluator(made)
    present = ((0, 1, 2, 3, 4, 5),)
    score = judge.score(present)
    for plan in (solve(made, present), solve_quickly(judge, present, score)):
        assert plan.solver == "insertion"
        assert plan.score < score


def test_no_group_goes_to_a_queue_that_cannot_run_it() -> None:
    """There it would take no time at all, as its times are those of a queue of slowness 0."""
    for seed in range(3):
        made = drawn(16, 3, seed, models=5, together=True, rounds=1500)
        rates = [
            replace(each, slowness=tuple(1024 * ((m + at) % 3 > 0) for m in range(5)))
            for at, each in enumerate(made.rates)
        ]
        made = replace(made, rates=tuple(rates))
        plan = solve(made)
        check(made, plan.orders)
        assert plan.solver == "annealing"


def test_search_stays_within_64_bits() -> None:
    """Must show 6, one digest with numba: compiled code has no larger integers."""
    huge = [group(number, number % 2, members=1 << 17, drain=1 << 50) for number in range(8)]
    made = problem(huge, rounds=1600, scenarios=1)
    arrays = PlanKernel(kernel.queue_cost, kernel.search, kernel.load_times, compiled=True)
    with np.errstate(over="raise"):
        assert solve(made, kernel=arrays) == solve(made)
