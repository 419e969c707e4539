"""Costs learned from outcomes: they follow the machine, stay nonnegative, and start from what was assumed."""

from __future__ import annotations

import random

import pytest

from runtime.policy.measured_cost import MeasuredCost


def test_before_any_outcome_the_assumed_points_hold():
    cost = MeasuredCost([((1, 1000), 0.002), ((1, 11_000), 0.012)])
    assert cost.at((1, 5000)) == pytest.approx(0.006, rel=1e-3)
    assert cost.count == 0


@pytest.mark.parametrize("seed", range(5))
def test_outcomes_replace_a_wrong_assumption(seed: int):
    draw = random.Random(seed)
    cost = MeasuredCost([((1, 1 << 20), 1.0)])
    for _ in range(60):
        nbytes = draw.choice([1 << 16, 1 << 20, 1 << 24])
        cost.add((1, nbytes), (0.003 + nbytes / 2e9) * draw.uniform(0.95, 1.05))
    for nbytes in (1 << 16, 1 << 20, 1 << 24):
        assert cost.at((1, nbytes)) == pytest.approx(0.003 + nbytes / 2e9, rel=0.1)


def test_the_fit_follows_a_machine_that_becomes_slower():
    cost = MeasuredCost([((1, 1e6), 0.01)])
    for speed in (1.0, 2.5):
        for at in range(80):
            nbytes = 1e5 * (1 + at % 7)
            cost.add((1, nbytes), speed * nbytes / 1e8)
    assert cost.at((1, 5e5)) == pytest.approx(2.5 * 5e5 / 1e8, rel=0.1)


def test_a_single_stall_changes_little():
    cost = MeasuredCost([((1, 1e6), 0.01)])
    for _ in range(30):
        cost.add((1, 1e6), 0.01)
    cost.add((1, 1e6), 5.0)
    assert cost.at((1, 1e6)) < 0.012


def test_no_coefficient_is_negative():
    cost = MeasuredCost([((1, 1.0), 1.0)])
    for x, seconds in (((1, 1.0), 10.0), ((1, 2.0), 5.0), ((1, 4.0), 1.0)) * 5:
        cost.add(x, seconds)
    assert min(cost.coefficients) >= 0


def test_what_no_outcome_tells_is_as_assumed_times_the_ratio_of_what_was_measured():
    cost = MeasuredCost([((1, 0, 0), 0.01), ((1, 1e8, 0), 0.11), ((1, 0, 1e8), 0.05)])
    for _ in range(20):
        cost.add((1, 1e8, 0), 0.22)
    assert cost.at((1, 0, 1e8)) == pytest.approx(2 * 0.05, rel=0.05)
    assert cost.at((1, 1e7, 0)) == pytest.approx(2 * 0.02, rel=0.05), "proportions hold until outcomes say otherwise"


def test_one_outcome_is_enough_where_the_assumption_was_far_off():
    cost = MeasuredCost([((1, 1 << 12), 4e-6), ((1, 1 << 24), 0.016)])
    cost.add((1, 1 << 20), 0.5)
    assert cost.at((1, 1 << 20)) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("assumed", [[], [((1, 2), 1.0), ((1,), 1.0)]])
def test_a_cost_without_points_is_refused(assumed: list[tuple[tuple[int, ...], float]]):
    with pytest.raises(ValueError, match="assumed point"):
        MeasuredCost(assumed)
