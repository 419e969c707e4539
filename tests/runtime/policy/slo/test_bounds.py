"""Bounds set by outcomes: they hold as often as they say, for distributions that are far from normal."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from runtime.policy.slo.bounds import CommonError, OutcomeBounds, independence

#: Scores of forecasts whose standard deviation is taken to be 1.
DRAWS: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda rng: abs(rng.gauss(0, 1)),
    "twice as wide": lambda rng: abs(rng.gauss(0, 2)),
    "heavy tail": lambda rng: abs(rng.paretovariate(1.5)),
    "narrow": lambda rng: rng.random() / 4,
}


@pytest.mark.parametrize("kind", DRAWS)
def test_bounds_cover_what_they_say(kind: str) -> None:
    rng, bounds, within = random.Random(kind), OutcomeBounds(), []
    for _ in range(6000):
        score = DRAWS[kind](rng)
        within.append(score <= bounds.sigmas)
        bounds.add(score, within[-1])
    assert 0.94 < sum(within[1000:]) / 5000 < 0.96


def test_until_there_are_outcomes_the_normal_width_holds() -> None:
    bounds = OutcomeBounds()
    for _ in range(60):
        bounds.add(9.0, True)
    assert bounds.sigmas == 1.96
    for _ in range(10):
        bounds.add(9.0, True)
    assert bounds.sigmas == 9.0


def test_a_change_is_followed() -> None:
    bounds = OutcomeBounds()
    for _ in range(1000):
        bounds.add(9.0, True)
    for _ in range(4096):
        bounds.add(1.0, True)
    assert bounds.sigmas == 1.0


def test_bounds_hold_although_errors_grow() -> None:
    """The quantile of earlier errors alone is too small then; the one that follows the outcomes is not."""
    rng, bounds, within = random.Random(5), OutcomeBounds(), []
    for number in range(12000):
        score = abs(rng.gauss(0, 1)) * 1.5 ** (number / 2000)
        within.append(score <= bounds.sigmas)
        bounds.add(score, within[-1])
    assert 0.94 < sum(within[2000:]) / 10000 < 0.96


def test_of_outcomes_at_the_same_time_each_counts_little() -> None:
    """The share of outcomes within is right over waves that are off by one error each, not only for the latest ones."""
    shares = list[float]()
    for seed in range(12):
        rng, bounds, within = random.Random(seed), OutcomeBounds(), list[bool]()
        for _ in range(60):
            off, sigmas = abs(rng.gauss(0, 1)), bounds.sigmas  # told when the wave before has ended
            for _ in range(400):
                within.append(off <= sigmas)
                bounds.add(off, within[-1], independence(1.0, 400.0))
        shares.append(sum(within[8000:]) / (len(within) - 8000))
    assert 0.93 < sum(shares) / 12 < 0.97, shares


def test_what_is_kept_is_worth_enough_or_as_many_as_may_be() -> None:
    for own, kept in ((1.0, 4096), (1 / 128, 8192), (0.0, 16384)):
        bounds = OutcomeBounds()
        for _ in range(kept // 2):
            bounds.add(9.0, True, own)
        for _ in range(kept - 1):
            bounds.add(1.0, True, own)
        assert bounds._sorted[-1] == 9.0, "the last of the first ones"
        bounds.add(1.0, True, own)
        bounds.add(1.0, True, own)
        assert bounds._sorted[-1] == 1.0


def test_independence_is_the_share_of_a_wait_since_the_outcome_before() -> None:
    assert [independence(each, 50.0) for each in (0.0, 1.0, 50.0, 80.0)] == [0.0, 0.02, 1.0, 1.0]
    assert independence(1.0, 0.0) == 1.0


def outcomes(common: float, own: float, waves: int = 60) -> CommonError:
    """Record waves of 50 forecasts, all of a wave wrong by one factor, and each by some seconds of its own."""
    rng, found = random.Random(7), CommonError()
    for _ in range(waves):
        factor = 1 + rng.gauss(0, common)
        for number in range(50):
            told = 2.0 + number / 5
            found.add(told * 1e9, own * 1e9, (told * factor + rng.gauss(0, own)) * 1e9)
    return found


@pytest.mark.parametrize("own", [0.1, 0.5])
def test_the_error_in_common_is_told_apart_from_the_own(own: float) -> None:
    assert outcomes(0.1, own).relative == pytest.approx(0.1, rel=0.25)
    assert outcomes(0.0, own).relative < 0.03


def test_until_there_are_outcomes_an_error_is_assumed() -> None:
    assert CommonError().relative == 0.05


def test_one_outcome_far_off_counts_little() -> None:
    found = outcomes(0.02, 0.1)
    before = found.relative
    found.add(1e9, 1e7, 1e12)
    assert found.relative < before + 0.01
