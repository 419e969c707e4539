"""A block's batch limit is where its profile says that more rows gain little (BL-14)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.policy.batching.block_limits import block_limit, rows_in_memory
from runtime.policy.profiles import Grid

#: A step takes 10 ms up to 16 rows, and from there on as long per row.
KNEE = Grid((1, 4, 16, 64), (64, 256), ((0.01, 0.01), (0.01, 0.01), (0.01, 0.01), (0.04, 0.04)))


@pytest.mark.parametrize(("gain", "limit"), [(0.01, 16), (0.1, 16), (0.9, 16)])
def test_behind_the_knee_more_rows_gain_nothing(gain: float, limit: int) -> None:
    assert block_limit(KNEE, gain, 256) == limit


def test_a_block_that_only_reads_weights_has_no_limit_of_its_own() -> None:
    flat = Grid((1, 64), (64,), ((0.01,), (0.01,)))
    assert block_limit(flat, 0.1, 200) == 200


def test_a_time_that_was_measured_too_long_does_not_end_the_search() -> None:
    noisy = Grid((1, 4, 16, 64), (64,), ((0.01,), (0.06,), (0.06,), (0.24,)))
    assert block_limit(noisy, 0.1, 256) == 16


def test_a_block_that_gains_nothing_takes_one_row() -> None:
    steep = Grid((1, 2, 4), (64,), ((0.01,), (0.02,), (0.04,)))
    assert block_limit(steep, 0.1, 256) == 1


def test_the_limit_is_that_of_the_context() -> None:
    """Longer contexts cost each row, so a batch gains less."""
    grid = Grid((1, 4, 16, 64), (64, 1024), ((0.01, 0.011), (0.01, 0.016), (0.011, 0.04), (0.02, 0.15)))
    assert block_limit(grid, 0.3, 256, context=64) > block_limit(grid, 0.3, 256, context=1024)


@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99), st.integers(1, 256))
def test_a_higher_demand_never_gives_a_higher_limit(one: float, other: float, most: int) -> None:
    limits = [block_limit(KNEE, gain, most) for gain in sorted((one, other))]
    assert most >= limits[0] >= limits[1] >= 1


def test_memory_caps_the_rows() -> None:
    assert rows_in_memory(pages=1000, layers=10, page_tokens=16, context=256) == 6
    assert rows_in_memory(pages=10, layers=10, page_tokens=16, context=256) == 1
    assert rows_in_memory(pages=1000, layers=0, page_tokens=16) == 1000
