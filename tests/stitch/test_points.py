"""Places of a stitch and the schedule of training steps, as pure functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch.curriculum import lesson, rate_at, unlocked
from stitch.points import StitchPoint, choose_points, parse_points, proportional
from zoo.errors import InputError


def test_proportional_places_of_the_small_family():
    assert [str(point) for point in proportional(8, 6)] == ["0:1", "1:2", "2:2", "3:3", "4:4", "5:5", "6:5"]
    assert [str(point) for point in proportional(8, 6) if not point.seen] == ["1:2", "4:4"]
    assert [str(point) for point in proportional(6, 8)] == ["0:1", "1:3", "2:4", "3:5", "4:7"]


@given(st.integers(1, 80), st.integers(1, 80))
def test_proportional_places_keep_the_depth_and_end_in_training(layers_a, layers_b):
    points = proportional(layers_a, layers_b)
    assert all(
        abs((point.a_layer + 1) / layers_a - point.b_layer / layers_b) <= 0.5 / layers_b + 1e-9 for point in points
    )
    assert list(points) == sorted(points)
    assert all(0 <= point.b_layer < layers_b for point in points)
    if points:
        assert points[0].seen and points[-1].seen


def test_given_places_are_checked():
    assert choose_points(parse_points("2:1, 0:1"), 3, 3) == (StitchPoint(0, 1), StitchPoint(2, 1))
    for text in ("", "1", "1:2:3", "a:1", "-1:2"):
        with pytest.raises(InputError, match="no place for a stitch"):
            parse_points(text)
    with pytest.raises(InputError, match="no place 3:1"):
        choose_points(parse_points("3:1"), 3, 3)
    with pytest.raises(InputError, match="twice"):
        choose_points((StitchPoint(0, 1), StitchPoint(0, 1, seen=False)), 3, 3)
    with pytest.raises(InputError, match="no place to be trained"):
        choose_points((StitchPoint(0, 1, seen=False),), 3, 3)
    with pytest.raises(InputError, match="no place to be trained"):
        choose_points(None, 1, 1)


@given(st.integers(1, 300), st.floats(0, 1), st.integers(1, 40))
def test_places_open_from_shallow_to_deep_and_all_are_open_in_the_end(steps, share, count):
    opened = [unlocked(step, steps, share, count) for step in range(steps)]
    assert opened == sorted(opened)
    assert all(1 <= each <= count for each in opened)
    assert unlocked(steps, steps, share, count) == count


def test_a_step_depends_on_its_number_and_the_seed_alone():
    points = proportional(8, 8)

    def draw(step: int, seed: int = 0):
        return lesson(step, 100, 0.3, points, 2, 50, 4, seed)

    assert draw(7) == draw(7)
    assert draw(7) != draw(8) and draw(70) != draw(70, seed=1)
    assert draw(0).points == points[:1]
    assert all(point.a_layer <= draw(step).points[-1].a_layer for step in range(100) for point in draw(step).points)
    assert {point for step in range(30, 100) for point in draw(step).points} == set(points)


def test_the_rate_rises_and_falls():
    rates = [rate_at(step, 100, 1.0) for step in range(100)]
    assert rates[0] < rates[2] == max(rates) == 1.0
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] < 0.05
