"""The plan of a step: each chain's units once and in order, shared units once for all models, neighbours fused."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from runtime.engine.step.segments import plan_segments

_CHAINS = st.dictionaries(
    st.sampled_from("ABCDEF"),
    st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8),
    min_size=1,
    max_size=6,
)


def runs(segments):
    """Return (unit, model, place in the model's chain) in execution order."""
    return [
        (unit, model, start + step)
        for segment in segments
        for step, unit in enumerate(segment.units)
        for model, start in zip(segment.models, segment.starts, strict=True)
    ]


@given(_CHAINS)
def test_every_chain_runs_once_and_in_order(chains):
    done = runs(plan_segments(chains))
    for model, units in chains.items():
        assert [(unit, place) for unit, m, place in done if m == model] == [(unit, i) for i, unit in enumerate(units)]


@given(_CHAINS)
def test_neighbouring_segments_could_not_be_fused(chains):
    segments = plan_segments(chains)
    for a, b in itertools.pairwise(segments):
        follows = tuple(start + len(a.units) for start in a.starts) == b.starts
        assert not (a.models == b.models and follows)


@given(st.lists(st.sampled_from(["full", "late", "early"]), min_size=1, max_size=5))
def test_units_shared_at_one_depth_run_once(kinds):
    """Fine-tunes of one base differ in some layers; all other layers run once over all models."""
    base = [f"layer{i}" for i in range(6)]
    chains = {}
    for number, kind in enumerate(kinds):
        own = {"full": [], "late": [4, 5], "early": [1]}[kind]
        chains[f"m{number}"] = [f"{unit}-{number}" if i in own else unit for i, unit in enumerate(base)]
    count: dict[str, int] = {}
    for segment in plan_segments(chains):
        for unit in segment.units:
            count[unit] = count.get(unit, 0) + 1
    assert set(count.values()) == {1}


def test_one_private_layer_gives_shared_runs_around_it():
    chains = {m: ["e", "0", f"1{m}", "2", "h"] for m in "abc"}
    segments = plan_segments(chains)
    assert [(s.models, s.units) for s in segments] == [
        (("a", "b", "c"), ("e", "0")),
        (("a",), ("1a",)),
        (("b",), ("1b",)),
        (("c",), ("1c",)),
        (("a", "b", "c"), ("2", "h")),
    ]


def test_opposite_orders_do_not_deadlock():
    segments = plan_segments({"a": ["x", "y"], "b": ["y", "x"]})
    assert sorted(runs(segments)) == [("x", "a", 0), ("x", "b", 1), ("y", "a", 1), ("y", "b", 0)]


def test_a_repeated_layer_runs_each_time():
    segments = plan_segments({"a": ["x", "x", "y"], "b": ["x", "y"]})
    assert [unit for unit, model, _ in runs(segments) if model == "a"] == ["x", "x", "y"]


def test_a_model_that_comes_to_a_unit_again_holds_nobody_up():
    """`y` runs once although `c` reaches it early: `a` needs it too, after running `x` twice."""
    chains = {"c": ["y", "h"], "a": ["x", "x", "y", "h"], "b": ["x", "y", "h"]}
    done = runs(plan_segments(chains))
    assert [model for unit, model, _ in done if unit == "y"] == ["c", "a", "b"]
    segments = plan_segments(chains)
    assert [segment.models for segment in segments if "y" in segment.units] == [("c", "a", "b")]


@given(_CHAINS, st.randoms(use_true_random=False))
def test_repeated_units_run_as_often_as_the_chain_that_repeats_them_most_where_orders_agree(chains, random):
    """Chains that are subsequences of one order, with some layers doubled in place, take the fewest possible runs."""
    order = "abcdefgh"
    made = {
        model: [unit for unit in order if unit in units for _ in range(random.choice((1, 1, 2)))]
        for model, units in chains.items()
    }
    count: dict[str, int] = {}
    for segment in plan_segments(made):
        for unit in segment.units:
            count[unit] = count.get(unit, 0) + 1
    assert all(count[unit] == max(units.count(unit) for units in made.values()) for unit in count)
