"""Look-ups in profile tables return measured points, interpolate between them, and never let more work cost less."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.policy.profiles import BlockProfile, DeviceProfile, Grid, Line, chain_of, profile_of

SECONDS = st.floats(0, 10)
GRID = Grid((1, 4, 16), (100, 300), ((1.0, 2.0), (2.0, 4.0), (6.0, 12.0)))


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    batches = sorted(draw(st.sets(st.integers(1, 256), min_size=1, max_size=4)))
    contexts = sorted(draw(st.sets(st.integers(1, 4096), min_size=1, max_size=4)))
    rows = [tuple(draw(SECONDS) for _ in contexts) for _ in batches]
    return Grid(tuple(batches), tuple(contexts), tuple(rows))


@pytest.mark.parametrize(
    ("batch", "context", "seconds"),
    [
        (1, 100, 1.0),
        (16, 300, 12.0),
        (4, 200, 3.0),  # half way along the context
        (2, 100, 1.5),  # half way from 1 to 4 in the logarithm
        (8, 300, 8.0),
        (2, 200, 2.25),
        (1, 10, 1.0),  # below what was measured
        (32, 100, 6.0 + 16 * 4 / 12),  # beyond: along the last slope, 4 s for 12 rows
        (1, 500, 3.0),  # 1 s for 200 tokens
    ],
)
def test_by_hand(batch, context, seconds):
    assert GRID.at(batch, context) == pytest.approx(seconds)


@given(grids(), st.integers(1, 512), st.integers(1, 512), st.integers(1, 8192), st.integers(1, 8192))
def test_more_work_never_costs_less(grid, batch, more_rows, context, more_tokens):
    least = grid.at(batch, context)
    assert least >= 0
    assert grid.at(batch + more_rows, context) >= least - 1e-9
    assert grid.at(batch, context + more_tokens) >= least - 1e-9


def test_a_longer_context_costs_no_less_beyond_the_last_batch():
    """Regression: noise that makes the slope fall with the context allowed it."""
    grid = Grid((1, 2), (1, 2, 3, 4), ((0.0, 0.0, 1.0, 0.0), (0.0, 1.0, 0.0, 0.0)))
    assert grid.at(3, 3) >= grid.at(3, 2) == pytest.approx(2.0)
    # The slope is steepest between two measured contexts.
    grid = Grid(
        (1, 2, 3, 4),
        (1, 3, 4, 5),
        ((1.0, 0.0, 0.0, 0.0), (0.0, 2.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0), (1.0, 2.0, 0.0, 0.0)),
    )
    assert grid.at(6, 3) >= grid.at(6, 2)


@given(grids(), st.data())
def test_rising_tables_give_their_points_back_and_stay_between_them(grid, data):
    rising = tuple(
        tuple(float(i + j) + value / 20 for j, value in enumerate(row)) for i, row in enumerate(grid.seconds)
    )
    rising = tuple(tuple(sorted(row)) for row in rising)
    rising = tuple(zip(*(sorted(column) for column in zip(*rising, strict=True)), strict=True))
    grid = Grid(grid.batches, grid.contexts, rising)
    for i, batch in enumerate(grid.batches):
        for j, context in enumerate(grid.contexts):
            assert grid.at(batch, context) == pytest.approx(rising[i][j])
    batch = data.draw(st.floats(grid.batches[0], grid.batches[-1]))
    context = data.draw(st.floats(grid.contexts[0], grid.contexts[-1]))
    assert rising[0][0] - 1e-9 <= grid.at(batch, context) <= rising[-1][-1] + 1e-9


def test_noise_that_says_more_is_cheaper_is_raised():
    noisy = Line((1, 2, 3), (5.0, 4.0, 6.0))
    assert [noisy.at(x) for x in (1, 1.5, 2, 2.5, 3, 4)] == [5.0, 5.0, 5.0, 5.5, 6.0, 7.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Line((), ()),
        lambda: Line((2, 1), (1.0, 1.0)),
        lambda: Line((1, 2), (1.0,)),
        lambda: Grid((0, 1), (1,), ((1.0,), (1.0,))),
        lambda: Grid((1, 2), (1, 2), ((1.0, 1.0), (1.0,))),
    ],
)
def test_tables_that_are_none(make):
    with pytest.raises(ValueError):
        make()


def test_a_document_becomes_tables():
    block = {"block": "b" * 64, "bytes": 10, "prefill": {"64": 0.2, "8": 0.1}, "load_seconds": 3.0}
    block["decode"] = {"batches": [1, 2], "contexts": [4], "seconds": [[0.1], [0.2]]}
    document = {
        "device": "cpu",
        "blocks": [block],
        "links": [{"a": "host", "b": "device", "seconds": {"1024": 1.0, "16": 0.5}}],
    }
    profile = profile_of(document)
    assert profile.block("b" * 64).prefill == Line((8.0, 64.0), (0.1, 0.2))
    assert profile.block("b" * 64).decode.at(2, 4) == 0.2
    assert profile.link("host", "device").seconds(1024) == 1.0
    with pytest.raises(KeyError, match="was not measured on cpu"):
        profile.block("c" * 64)
    with pytest.raises(KeyError, match="from device to host"):
        profile.link("device", "host")


def test_a_chain_is_the_sum_of_its_blocks():
    one = BlockProfile("one", 100, Grid((1, 2), (1, 100), ((1.0, 1.0), (1.1, 1.1))), Line((1,), (1.0,)), 7.0)
    two = replace(one, block="two", decode=Grid((1, 2), (1, 100), ((1.5, 1.5), (1.7, 1.7))))
    whole = chain_of(DeviceProfile("cpu", (one, two), ()), "both", ["one", "two", "one"])
    assert whole.decode.at(1, 50) == pytest.approx(3.5) and whole.decode.at(2, 50) == pytest.approx(1.1 * 2 + 1.7)
    assert (whole.nbytes, whole.load_seconds, whole.prefill.at(1)) == (300, 21.0, 3.0)
    with pytest.raises(KeyError):
        chain_of(DeviceProfile("cpu", (one, two), ()), "more", ["one", "unknown"])
    other = replace(two, prefill=Line((2,), (1.0,)))
    with pytest.raises(ValueError, match="same axes"):
        chain_of(DeviceProfile("cpu", (one, other), ()), "other axes", ["one", "two"])
    with pytest.raises(ValueError, match="same axes"):
        chain_of(DeviceProfile("cpu", (one, two), ()), "none", [])
