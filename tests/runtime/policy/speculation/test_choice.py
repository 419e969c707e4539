"""Which hops are speculated, which predictions stand, and what they gain: examples, and properties (BL-25)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.policy.speculation.choice import SlowHop, chain_time, choose, stands
from tests.runtime.policy.figure15 import figure_15

CHAIN = ["a", "b", "c", "d", "e"]


def spots(**drains: float) -> list[SlowHop]:
    return [SlowHop(block, "d0", drain) for block, drain in drains.items()]


def chosen(
    instances: list[SlowHop],
    top: float = 1.0,
    chains: Sequence[list[str]] = (CHAIN,),
    surrogates: str = "abcde",
) -> list[str]:
    return [each.block for each in choose(instances, chains, surrogates, top).chosen]


# -- which hops --------------------------------------------------------------------------------------------------------


def test_the_longest_queues_but_no_neighbours_and_never_the_last() -> None:
    instances = spots(a=5, b=9, c=8, d=7, e=10)
    assert chosen(instances) == ["b", "d"]
    assert [(each.instance.block, each.reason) for each in choose(instances, [CHAIN], "abcde", 1.0).passed_by] == [
        ("e", "it is the last of a chain"),
        ("c", "it is next to b"),
        ("a", "it is next to b"),
    ]


def test_a_tenth_of_all_instances_rounded_up() -> None:
    chains = [[f"b{index}" for index in range(31)]]
    instances = [SlowHop(f"b{index}", "d0", 100.0 - index) for index in range(30)]
    made = choose(instances, chains, [each.block for each in instances])
    assert made.most == 3 and [each.block for each in made.chosen] == ["b0", "b2", "b4"]
    assert choose(instances[:5], chains, ["b0"]).most == 1 and choose([], chains, []).chosen == ()


def test_a_rule_of_one_chain_holds_for_a_block_that_others_use_too() -> None:
    assert chosen(spots(a=9, c=8), chains=[["a", "b", "c"], ["b", "a"]]) == []
    assert chosen(spots(a=9, c=8), chains=[["a", "b", "c", "d"], ["c", "a", "d"]]) == ["a"]
    assert chosen(spots(a=9), chains=[["a", "a", "b"]]) == []  # a neighbour of itself


def test_all_instances_of_a_block_may_and_ones_without_queue_or_surrogate_do_not() -> None:
    twins = [SlowHop("a", "d1", 4), SlowHop("a", "d0", 4), SlowHop("c", "d0", 0)]
    assert [each.device for each in choose(twins, [CHAIN], "abc", 1.0).chosen] == ["d0", "d1"]
    assert chosen(spots(a=9, c=8), surrogates="c") == ["c"]
    with pytest.raises(ValueError):
        choose([], [], [], 1.1)


@given(
    st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6), max_size=4),
    st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from([0.0, 1.0, 2.0, 5.0]), max_size=8),
    st.floats(0, 1),
)
def test_the_rules_hold_for_any_chains(chains: list[list[str]], drains: dict[str, float], top: float) -> None:
    made = choose(spots(**drains), chains, "abcdefg", top)
    blocks = {each.block for each in made.chosen}
    assert len(made.chosen) <= made.most == math.ceil(top * len(drains) - 1e-9) and "h" not in blocks
    assert not any({a, b} <= blocks for chain in chains for a, b in pairwise(chain))
    assert not any(chain[-1] in blocks for chain in chains)
    assert all(each.drain > 0 for each in made.chosen)


# -- which predictions stand -------------------------------------------------------------------------------------------


def test_the_same_bits_stand_and_where_it_is_allowed_what_is_alike_enough() -> None:
    assert stands(True, 0.1, None) and not stands(False, 1.0, None)
    assert stands(False, 0.95, 0.95) and not stands(False, 0.9499, 0.95)
    assert not stands(False, math.nan, 0.95) and stands(True, math.nan, 0.95)


# -- what they gain ----------------------------------------------------------------------------------------------------

B, S, V = [3.0, 3.0, 3.0], [1.0, 1.0, 1.0], [0.25, 0.25, 0.25]


def test_figure_15_by_hand() -> None:
    right = figure_15(B, S, V)
    assert (right.none, right.ideal, right.checked) == (9.0, 3.0, 7.25)  # T6, T2, T5
    in_a, in_b, in_c = (figure_15(B, S, V, [place]) for place in range(3))
    assert (in_a.after_errors, in_a.gain) == (5.25, 3.75)  # T3, and T6 - T3
    assert (in_b.after_errors, in_b.gain) == (7.25, 1.75)
    assert (in_c.after_errors, in_c.gain) == (9.0, 0.0)
    assert figure_15(B, S, V, [0, 1, 2]).gain == 0.0  # all wrong
    assert right.ideal < in_a.after_errors < right.checked < right.none  # T2 < T3 < T5 < T6


def test_a_chain_with_some_blocks_predicted_by_hand() -> None:
    assert chain_time(B, S, V, []) == 9.0
    assert chain_time(B, S, V, [0]) == 7.0  # b and c start after 1 s; the check at 3.25 is over by then
    assert chain_time(B, S, V, [0], wrong=[0]) == 9.25  # the check is added
    assert chain_time(B, S, V, [1]) == 7.0
    assert chain_time([1.0, 9.0, 1.0], S, V, [1]) == 10.25  # the last block's result waits for the check
    assert chain_time([3.0] * 4, [1.0] * 4, [0.25] * 4, [0, 2]) == 8.0
    assert chain_time([3.0] * 4, [1.0] * 4, [0.25] * 4, [0, 2], wrong=[2]) == 10.25
    assert chain_time(B, [9.0] * 3, V, [1]) == 9.25  # a surrogate slower than its block is not waited for


_times = st.lists(st.tuples(st.floats(0.5, 9), st.floats(0.01, 0.5), st.floats(0, 0.3)), min_size=1, max_size=6)


@given(_times, st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)))
def test_it_never_loses_more_than_its_checks_and_gains_most_when_all_is_right(
    times: list[tuple[float, float, float]], predicted: set[int], wrong: set[int]
) -> None:
    blocks, surrogates, checks = zip(*times, strict=True)
    plain, taken = chain_time(blocks, surrogates, checks, []), chain_time(blocks, surrogates, checks, predicted, wrong)
    assert taken <= plain + sum(checks) + 1e-9
    assert chain_time(blocks, surrogates, checks, predicted) <= taken + 1e-9
    assert taken >= min(sum(surrogates), plain) - 1e-9


@given(_times, st.sets(st.integers(0, 5)))
def test_the_papers_times_are_in_order(times: list[tuple[float, float, float]], wrong: set[int]) -> None:
    blocks, surrogates, checks = zip(*times, strict=True)
    made = figure_15(blocks, surrogates, checks, {place for place in wrong if place < len(blocks)})
    assert made.ideal - 1e-9 <= made.after_errors <= made.none and made.ideal - 1e-9 <= made.checked <= made.none
    if len(blocks) - 1 in wrong:
        assert made.gain == 0
