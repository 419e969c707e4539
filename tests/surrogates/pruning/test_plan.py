"""Pruning plans are feasible for any shape, close to the ratio where counts allow, and keep the best whole groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surrogates.pruning.plan import (
    BlockShape,
    SliceScores,
    channel_step,
    check_layers,
    check_ratio,
    choose,
    nearest,
    parse_layers,
)
from zoo.errors import InputError


def cost(shape: BlockShape) -> int:
    """Return the parameter count of a llama layer."""
    return shape.hidden * (2 + 2 * shape.heads * shape.head_dim + 2 * shape.kv * shape.head_dim + 3 * shape.channels)


@st.composite
def shapes(draw) -> BlockShape:
    kv, group, head_dim = draw(st.integers(1, 8)), draw(st.integers(1, 8)), draw(st.sampled_from([4, 8]))
    factor = draw(st.integers(1, 3))
    return BlockShape(
        kv * group * head_dim * factor,
        kv * group,
        kv,
        head_dim,
        draw(st.integers(2, 40)) * draw(st.sampled_from([1, 2, 16])),
    )


@given(shapes(), st.floats(0.05, 0.95), st.sampled_from(["layer", "attention", "ffn"]))
def test_counts_are_such_as_a_layer_can_have(shape, ratio, part):
    if part != "ffn" and shape.heads == 1:
        with pytest.raises(InputError, match="heads"):
            nearest(shape, part, ratio, cost)
        return
    after = nearest(shape, part, ratio, cost)
    assert (after.hidden, after.head_dim) == (shape.hidden, shape.head_dim)
    assert cost(after) < cost(shape)
    if part == "ffn":
        assert (after.heads, after.kv) == (shape.heads, shape.kv)
    else:
        assert 1 <= after.kv <= shape.kv and after.heads % after.kv == 0 and shape.hidden % after.heads == 0
        assert after.heads // after.kv <= shape.heads // shape.kv and after.heads < shape.heads
    if part == "attention":
        assert after.channels == shape.channels
    else:
        assert 0 < after.channels < shape.channels and after.channels % channel_step(shape.channels) == 0


@given(shapes(), st.floats(0.05, 0.95))
def test_no_feasible_count_of_channels_is_nearer(shape, ratio):
    after = nearest(shape, "ffn", ratio, cost)
    step = channel_step(shape.channels)
    missed = [
        abs(3 * shape.hidden * (shape.channels - count) - ratio * cost(shape))
        for count in range(step, shape.channels, step)
    ]
    assert abs(cost(shape) - cost(after) - ratio * cost(shape)) <= min(missed) * (1 + 1e-9)


@given(shapes(), st.randoms(use_true_random=False))
def test_what_is_kept_keeps_its_groups(shape, rng):
    if shape.heads == 1:
        return
    after = nearest(shape, "layer", 0.5, cost)
    scores = SliceScores(*([rng.random() for _ in range(count)] for count in (shape.heads, shape.kv, shape.channels)))
    kept = choose(shape, after, scores)
    assert (len(kept.heads), len(kept.kv), len(kept.channels)) == (after.heads, after.kv, after.channels)
    assert all(list(each) == sorted(set(each)) for each in (kept.heads, kept.kv, kept.channels))
    group, left = shape.heads // shape.kv, after.heads // after.kv
    assert [head // group for head in kept.heads] == [kv for kv in kept.kv for _ in range(left)]
    assert min(scores.channels[at] for at in kept.channels) >= max(
        (score for at, score in enumerate(scores.channels) if at not in kept.channels), default=0.0
    )


def test_llama_7b_is_halved_as_in_the_paper():
    shape = BlockShape(4096, 32, 32, 128, 11008)
    for part, channels, heads in (("attention", 11008, 16), ("ffn", 5504, 32), ("layer", 5504, 16)):
        after = nearest(shape, part, 0.5, cost_of_part(part))
        assert (after.heads, after.kv, after.channels) == (heads, heads, channels)


def cost_of_part(part: str):
    if part == "layer":
        return cost
    return lambda shape: (
        shape.hidden * (4 * shape.heads * shape.head_dim if part == "attention" else 3 * shape.channels)
    )


def test_query_heads_go_evenly_where_the_last_key_value_head_must_stay():
    after = nearest(BlockShape(64, 4, 1, 16, 96), "attention", 0.5, cost_of_part("attention"))
    assert (after.heads, after.kv) == (2, 1)
    kept = choose(BlockShape(64, 4, 1, 16, 96), after, SliceScores([1, 9, 8, 2], [0], [1.0] * 96))
    assert kept.heads == (1, 2) and kept.kv == (0,)


def test_runs_of_layers_are_inclusive():
    assert parse_layers("4-6") == (4, 6)
    assert parse_layers(" 4 ") == (4, 4)
    for text in ("6-4", "4:6", "-1", "a-b", "", "4-6-8"):
        with pytest.raises(InputError, match="layers"):
            parse_layers(text)
    check_layers((0, 7), 8, "m")
    with pytest.raises(InputError, match="0-7"):
        check_layers((7, 8), 8, "m")


@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.5, 1.5, float("nan")])
def test_a_ratio_is_a_share(ratio):
    with pytest.raises(InputError, match="between 0 and 1"):
        check_ratio(ratio)
