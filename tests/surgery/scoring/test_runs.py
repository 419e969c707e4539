"""Which runs are compared with which: components, layers, proportional groups."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surgery.scoring.runs import Span, layers_of, pairing
from zoo.errors import Incomparable, InputError
from zoo.manifest import Component, Placed


def chain(layers, kinds=("attention", "ffn"), stitch_before=None):
    """Return an embedding, layers of these kinds and a head, with a stitch before one of the layers."""
    placed = [Placed(None, Component("embedding", "f", "{}", ()))]
    for layer in range(layers):
        if layer == stitch_before:
            placed.append(Placed(None, Component("stitch", "stitch", "{}", ())))
        placed += [Placed(layer, Component(kind, "f", "{}", ())) for kind in kinds]
    return [*placed, Placed(None, Component("lm_head", "f", "{}", ()))]


def test_three_layers_of_six_go_with_four_of_eight():
    plan = pairing(chain(6), chain(8))
    assert plan.granularity == "group"
    assert [(a.layers, b.layers) for a, b in plan.pairs] == [(Span(0, 3), Span(0, 4)), (Span(3, 6), Span(4, 8))]
    assert [(a.components, b.components) for a, b in plan.pairs] == [
        (Span(1, 7), Span(1, 9)),
        (Span(7, 13), Span(9, 17)),
    ]


def test_depths_without_a_common_divisor_go_by_the_shallower_ones_layers():
    plan = pairing(chain(5), chain(7))
    assert [(a.layers, b.layers) for a, b in plan.pairs] == [
        (Span(n, n + 1), Span(lo, hi)) for n, (lo, hi) in enumerate([(0, 1), (1, 3), (3, 4), (4, 6), (6, 7)])
    ]


def test_layers_of_other_makes_and_layers_behind_a_stitch():
    assert [unit.components for unit in layers_of(chain(2, kinds=("layer",)))] == [Span(1, 2), Span(2, 3)]
    assert [unit.components for unit in layers_of(chain(2, stitch_before=1))] == [Span(1, 3), Span(4, 6)]
    assert [(a.layers, b.layers) for a, b in pairing(chain(2, kinds=("layer",)), chain(2)).pairs] == [
        (Span(n, n + 1),) * 2 for n in range(2)
    ]


@given(st.integers(1, 60), st.integers(1, 60), st.data())
def test_groups_cover_both_models_once_and_in_order(a, b, data):
    groups = data.draw(st.one_of(st.none(), st.integers(1, min(a, b))))
    plan = pairing(chain(a), chain(b), "group", groups)
    for side, depth in ((0, a), (1, b)):
        bounds = [pair[side].layers for pair in plan.pairs]
        assert bounds[0].lo == 0 and bounds[-1].hi == depth
        assert all(left.hi == right.lo for left, right in pairwise(bounds)) and all(
            each.hi > each.lo for each in bounds
        )
        sizes = {each.hi - each.lo for each in bounds}
        assert max(sizes) - min(sizes) <= 1
    assert groups is None or len(plan.pairs) == groups


@pytest.mark.parametrize(
    ("a", "b", "granularity", "groups", "error"),
    [
        (chain(2), chain(3), "layer", None, InputError),
        (chain(2), chain(2, kinds=("layer",)), "component", None, InputError),
        (chain(2), chain(3), "group", 3, InputError),
        (chain(2), chain(2), "layer", 2, InputError),
        (chain(0), chain(2), None, None, Incomparable),
    ],
)
def test_what_does_not_meet_is_refused(a, b, granularity, groups, error):
    with pytest.raises(error):
        pairing(a, b, granularity, groups)
