"""The paper's formulation beside all orders of small problems (QL-18, equations 6 to 13)."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import pytest

from runtime.policy.slo.plan.paper import penalties, solve_as_paper
from runtime.policy.slo.plan.problem import GroupPlan, Orders, Problem, RejectedPlan, Spread
from tests.runtime.policy.slo.plan.problems import SECOND, all_orders, drawn, group, problem

pytest.importorskip("scipy", reason="SKIPPED: scipy is not installed (extra `plan`)")


def _sum(made: Problem, orders: Orders) -> float:
    return sum(mean for mean, _ in penalties(made, orders))


def _holds(made: Problem, orders: Orders) -> bool:
    z = NormalDist().inv_cdf(made.alpha)
    return all(mean + z * sigma <= 1e-3 for mean, sigma in penalties(made, orders))


def _loosened(made: Problem, least: int) -> Problem:
    return replace(made, groups=tuple(replace(each, due=2 * each.due + least * SECOND) for each in made.groups))


def test_plan_has_the_least_penalties_of_all_that_meet_the_deadlines() -> None:
    found = 0
    for seed in range(5):
        made = _loosened(drawn(4, 2, seed), 2)
        able = [orders for orders in all_orders(4, 2) if _holds(made, orders)]
        plan = solve_as_paper(made, 30.0)
        if not able:
            assert plan == RejectedPlan("no order meets all deadlines")
            continue
        assert isinstance(plan, GroupPlan)
        assert _holds(made, plan.orders)
        assert _sum(made, plan.orders) == pytest.approx(min(_sum(made, orders) for orders in able), abs=0.01)
        found += 1
    assert found >= 2


def test_penalties_by_hand() -> None:
    """Completion less SLO, in ms: swaps add up, and the first slot is compared with what is loaded."""
    made = problem([group(0, 1, due=5 * SECOND), group(1, 0, due=9 * SECOND)])
    assert [mean for mean, _ in penalties(made, ((0, 1),))] == pytest.approx([2000 + 900 - 5000, 5900 - 9000], abs=2)
    assert [mean for mean, _ in penalties(made, ((1, 0),))] == pytest.approx([900 - 9000, 3900 - 5000], abs=2)


def test_chance_constraint_is_that_of_normal_times() -> None:
    """Two groups: means alone would meet the deadline, and twice the mean does with the root of the variances."""
    sure = [group(0), group(1, due=round(2.4 * SECOND))]
    spread = [replace(each, drain=Spread(SECOND, 200_000)) for each in sure]
    # The second one ends at 1.9 s, sigma sqrt(0.2^2 + 0.18^2) = 0.269 s, so 2.34 s at 95 % and 2.53 s at 99 %.
    first = [replace(spread[0], due=round(1.35 * SECOND)), spread[1]]
    assert isinstance(solve_as_paper(problem(first, alpha=0.95), 30.0), GroupPlan)
    assert isinstance(solve_as_paper(problem(first, alpha=0.99), 30.0), RejectedPlan)


def test_objective_is_blind_to_deadlines_that_are_met() -> None:
    """Equation 13 is the sum of completions less a constant: the shortest group goes first."""
    made = problem([group(0, drain=3 * SECOND, due=20 * SECOND), group(1, drain=SECOND, due=50 * SECOND)])
    plan = solve_as_paper(made, 30.0)
    assert isinstance(plan, GroupPlan)
    assert plan.orders == ((1, 0),)


def test_there_is_no_plan_where_deadlines_cannot_be_met() -> None:
    assert solve_as_paper(problem([group(0, due=SECOND // 2)]), 30.0) == RejectedPlan("no order meets all deadlines")
