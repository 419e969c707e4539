"""Forecasts of lengths against the same questions put to the distribution itself, length by length."""

from __future__ import annotations

import random

import pytest

from runtime.policy.lengths.forecast import LengthForecast


def lengths(forecast: LengthForecast, made: int, limit: int) -> dict[int, float]:
    """Return the probability of each length above `made`; longer ones than the limit count as the limit."""
    found: dict[int, float] = {}
    last = max(limit, *forecast.edges)
    for at, (low, mass) in enumerate(zip(forecast.edges, forecast.mass, strict=True)):
        end = forecast.edges[at + 1] if at + 1 < len(forecast.edges) else last + 1
        some = range(max(low, 1), max(end, 2))
        for length in some:
            if length > made:
                found[min(length, limit)] = found.get(min(length, limit), 0.0) + mass / len(some)
    whole = sum(found.values())
    return {length: mass / whole for length, mass in found.items()} if whole else {}


def test_means_and_quantiles_equal_those_of_the_lengths_themselves() -> None:
    draw = random.Random(3)
    for _ in range(500):
        edges = (0, *sorted(draw.sample(range(1, 60), draw.randrange(1, 5))))
        mass = tuple(draw.choice((0.0, draw.random())) for _ in edges)
        if not sum(mass):
            continue
        forecast, limit = LengthForecast(edges, mass), draw.randrange(1, 90)
        made = draw.randrange(limit)
        known = lengths(forecast, made, limit)
        if not known:
            continue
        assert forecast.mean(made, limit) == pytest.approx(sum(length * share for length, share in known.items()))
        share = draw.uniform(0.01, 0.99)
        quantile = forecast.quantile(share, made, limit)
        # lengths are equally likely within a bucket, so the quantile is within one token of the exact one
        below = sum(each for length, each in known.items() if length < quantile)
        upto = sum(each for length, each in known.items() if length <= quantile + 1)
        assert below <= share + 1e-9 and upto >= share - 1e-9


def test_the_lower_end_is_that_of_the_most_likely_bucket_of_those_that_are_left() -> None:
    forecast = LengthForecast((0, 200, 400), (0.7, 0.2, 0.1))
    assert forecast.bucket == 0
    assert forecast.lower(0, 1000) == 1  # not 0, which would reserve nothing
    assert forecast.lower(100, 1000) == 101
    assert forecast.lower(250, 1000) == 251
    assert forecast.lower(399, 1000) == 400


def test_what_outlives_its_forecast_is_in_the_bucket_where_it_is() -> None:
    forecast = LengthForecast((0, 200, 400), (1.0, 0.0, 0.0))
    assert forecast.lower(199, 1000) == 200
    assert forecast.mean(199, 1000) == (200 + 399) / 2
    assert forecast.quantile(0.5, 399, 1000) == 400 + 300
    assert forecast.mean(999, 1000) == 1000
    assert forecast.quantile(0.9, 1000, 1000) == 1001  # above what there is, never nothing


def test_what_is_forecast_to_be_longer_than_the_limit_is_as_long_as_the_limit() -> None:
    forecast = LengthForecast((0, 20, 40), (0.1, 0.0, 0.9))
    assert forecast.lower(0, 10) == 10 and forecast.quantile(0.5, 0, 10) == 10
    assert forecast.mean(0, 10) == pytest.approx(0.9 * 10 + 0.1 * (10 * 10 + 45) / 19)
    assert forecast.lower(0, 45) == 40, "the bucket begins there, though most of it is above the limit"


@pytest.mark.parametrize(
    ("edges", "mass"),
    [((), ()), ((1,), (1.0,)), ((0, 5, 5), (1.0, 1.0, 1.0)), ((0, 5), (1.0,)), ((0,), (0.0,)), ((0,), (-1.0,)),
     ((0,), (float("nan"),)), ((0,), (float("inf"),))],
)  # fmt: skip
def test_what_is_no_distribution_is_refused(edges: tuple[int, ...], mass: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"edges|mass"):
        LengthForecast(edges, mass)
