"""Ranks for a budget: never above it, monotone in it, greedy by gain per element; the smallest rank for a target."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surgery.deltas.ranks import even, largest, smallest, spread

GAINS = st.lists(
    st.lists(st.floats(0, 1e3), min_size=1, max_size=6).map(lambda x: np.sort(np.array(x))[::-1]),
    min_size=1,
    max_size=5,
)


def test_the_budget_goes_where_an_element_gains_most():
    gains = [np.array([8.0, 1.0]), np.array([9.0, 9.0, 9.0])]
    # Gain per element: 4 and 0.5 in the first, 3 each in the second: first, second, second; one more exceeds the
    # budget.
    assert spread(9, gains, [2, 3]) == (1, 2)
    assert spread(1, gains, [2, 3]) == (0, 0)
    assert spread(1000, gains, [2, 3]) == (2, 3)
    assert even(2, gains) == (2, 2)
    assert even(3, gains) == (2, 3)


@given(GAINS, st.data())
def test_more_never_gives_fewer_and_nothing_passes_the_budget(gains, data):
    costs = data.draw(st.lists(st.integers(1, 9), min_size=len(gains), max_size=len(gains)))
    small = data.draw(st.integers(0, 100))
    large = small + data.draw(st.integers(0, 100))
    few, more = spread(small, gains, costs), spread(large, gains, costs)
    assert all(a <= b <= len(each) for a, b, each in zip(few, more, gains, strict=True))
    assert sum(rank * cost for rank, cost in zip(few, costs, strict=True)) <= small


@pytest.mark.parametrize("highest", [0, 1, 2, 7, 64, 65])
def test_the_smallest_rank_is_found_wherever_it_lies(highest):
    for wanted in range(1, highest + 3):
        asked = []
        found = smallest(lambda rank, wanted=wanted, asked=asked: bool(asked.append(rank)) or rank >= wanted, highest)
        assert found == (wanted if wanted <= highest else None)
        assert all(1 <= rank <= highest for rank in asked) and len(asked) <= 2 * highest.bit_length() + 1


@pytest.mark.parametrize("highest", [0, 1, 2, 7, 64])
def test_the_largest_rank_is_found_wherever_it_lies(highest):
    for limit in range(highest + 3):
        assert largest(lambda rank, limit=limit: rank <= limit, highest) == min(limit, highest)
