"""Exact solvers beside all orders of small problems."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.policy.slo.plan.cp_sat import solve_by_cp_sat
from runtime.policy.slo.plan.evaluation import Evaluator, check
from runtime.policy.slo.plan.milp import solve_by_milp
from runtime.policy.slo.plan.pairs import neighbours_decide
from runtime.policy.slo.plan.problem import Problem
from tests.runtime.policy.slo.plan.problems import all_orders, drawn


def _least(made: Problem) -> object:
    assert neighbours_decide(made)
    return min(map(Evaluator(made).score, all_orders(len(made.groups), 2)))


def test_cp_sat_finds_the_best_order() -> None:
    pytest.importorskip("ortools", reason="SKIPPED: ortools is not installed (extra `cp-sat`)")
    for seed in range(4):
        made = drawn(5, 2, seed)
        groups = tuple(replace(each, priority=each.id % 2) if seed == 3 else each for each in made.groups)
        made = replace(made, groups=groups)
        plan = solve_by_cp_sat(made, 60.0)
        assert plan is not None
        assert plan.score == _least(made)


def test_cp_sat_keeps_groups_that_have_begun() -> None:
    pytest.importorskip("ortools", reason="SKIPPED: ortools is not installed (extra `cp-sat`)")
    made = drawn(5, 2, 1)
    groups = tuple(replace(each, pinned=1 if each.id in (2, 4) else None) for each in made.groups)
    made = replace(made, groups=groups)
    plan = solve_by_cp_sat(made, 30.0)
    assert plan is not None
    check(made, plan.orders)


def test_milp_finds_the_best_order() -> None:
    pytest.importorskip("scipy", reason="SKIPPED: scipy is not installed (extra `cp-sat`)")
    for seed in range(2):
        made = drawn(4, 2, seed, scenarios=4)
        plan = solve_by_milp(made, 60.0)
        assert plan is not None
        assert plan.score == _least(made)


def test_neighbours_do_not_decide_where_models_fit_together() -> None:
    assert neighbours_decide(drawn(4, 2, 0))
    assert not neighbours_decide(drawn(4, 2, 0, together=True))
    kept = drawn(4, 2, 0)
    rates = tuple(replace(each, warm_us=1, keeps=True) for each in kept.rates)
    assert not neighbours_decide(replace(kept, rates=rates))
