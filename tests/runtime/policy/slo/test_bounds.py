"""Bounds set by outcomes: they hold as often as they say, for distributions that are far from normal."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from runtime.policy.slo.bounds import OutcomeBounds

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
        bounds.add(score)
    assert 0.94 < sum(within[1000:]) / 5000 < 0.96


def test_until_there_are_outcomes_the_normal_width_holds() -> None:
    bounds = OutcomeBounds()
    for _ in range(60):
        bounds.add(9.0)
    assert bounds.sigmas == 1.96
    for _ in range(10):
        bounds.add(9.0)
    assert bounds.sigmas == 9.0


def test_a_change_is_followed() -> None:
    bounds = OutcomeBounds()
    for _ in range(1000):
        bounds.add(9.0)
    for _ in range(512):
        bounds.add(1.0)
    assert bounds.sigmas == 1.0
