"""Scaling block by block: examples, and properties for any load (BL-24)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.policy.migration.order import Mover
from runtime.policy.placement.locality import ClusterLayout, DeviceRoom, Instance
from runtime.policy.scaling.autoscale import BlockDemand, Even, ScaleDown, Scaling, ScalingLimits, Up, scale

LIMITS = ScalingLimits(high=0.8, low=0.4, idle=100, calm=50, most=2)
NBYTES = {"hot": 4, "b": 4, "c": 4}


def cluster(loads: list[BlockDemand], free: int = 4) -> ClusterLayout:
    devices = tuple(DeviceRoom(name, name[0], free) for name in ("x0", "x1", "y0"))
    return ClusterLayout(devices, tuple(Instance(each.block, each.device) for each in loads), NBYTES, {})


def decide(
    loads: list[BlockDemand], free: int = 4, pages: int = 99, changed: dict[str, int] | None = None, now: int = 1000
) -> Scaling:
    return scale(loads, cluster(loads, free), dict.fromkeys(("x0", "x1", "y0"), pages), changed or {}, LIMITS, now)


def holds(seq: str, first: int, count: int) -> Mover:
    return Mover(seq, frozenset(range(first, first + count)))


def test_only_the_busy_block_gets_an_instance_and_only_beyond_the_threshold() -> None:
    assert decide([BlockDemand("hot", "x0", 80, 100), BlockDemand("b", "x1", 10, 100)]).ups == ()
    done = decide([BlockDemand("hot", "x0", 81, 100), BlockDemand("b", "x1", 10, 100)])
    assert [(each.block, each.hot, each.part) for each in done.ups] == [("hot", "x0", 0.81)] and done.ups[
        0
    ].device != "x0"


def test_the_most_loaded_first_while_memory_lasts() -> None:
    loads = [BlockDemand("b", "x0", 85, 100), BlockDemand("hot", "x1", 99, 100), BlockDemand("c", "y0", 90, 100)]
    done = decide(loads)
    assert [each.block for each in done.ups] == ["hot", "c"]  # two at once, no more
    none = decide(loads, free=3)
    assert none.ups == () and none.refused == ("hot", "c", "b")


def test_half_of_the_pages_move_those_shared_least_first() -> None:
    shared = (Mover("s1", frozenset({1, 2, 3})), Mover("s2", frozenset({1, 2, 4})))
    held = (*shared, holds("alone", 10, 3), holds("large", 20, 7))
    done = decide([BlockDemand("hot", "x0", 90, 100, held)])
    # Of 16 pages 8 may go: `alone` (3); `large` (7) is too much then; s1 (3) shares two pages with s2, which would
    # exceed 8.
    assert done.ups[0].moves == ("alone", "s1")
    assert decide([BlockDemand("hot", "x0", 90, 100, held)], pages=2).ups[0].moves == ()


def test_an_instance_that_is_not_busy_takes_them_and_none_is_loaded() -> None:
    held = (holds("a", 0, 3), holds("b", 3, 3), holds("c", 6, 4))
    hot, other = BlockDemand("hot", "x0", 90, 100, held), BlockDemand("hot", "x1", 39, 100)
    done = decide([hot, other, BlockDemand("hot", "y0", 38, 100)])
    assert (done.ups, done.evens) == (
        (),
        (Even("hot", "y0", "x0", 0.9, ("a",)),),
    )  # up to half of 10 pages; a and b are 6
    assert decide([hot, other], pages=2).evens == (Even("hot", "x1", "x0", 0.9, ()),)
    busy = decide([hot, replace(other, queue=40)], free=99)
    assert busy.evens == () and [each.hot for each in busy.ups] == ["x0"]
    assert decide([hot, replace(other, idle_since=0)]).downs == ()  # it is about to get work


def test_an_idle_instance_goes_if_others_stay_and_are_not_busy() -> None:
    idle = BlockDemand("b", "x0", 0, 100, idle_since=900)
    assert decide([idle]).downs == ()  # the only one
    assert decide([idle, BlockDemand("b", "x1", 39, 100)]).downs == (ScaleDown("b", "x0", ()),)
    assert decide([idle, BlockDemand("b", "x1", 40, 100)]).downs == ()
    assert decide([replace(idle, idle_since=901), BlockDemand("b", "x1", 0, 100)]).downs == ()
    both = [idle, replace(idle, device="x1", idle_since=800)]
    assert decide(both).downs == (ScaleDown("b", "x1", ()),)  # one at a time, the longest idle


def test_what_is_paused_on_an_idle_instance_moves_or_it_stays() -> None:
    loads = [BlockDemand("b", "x0", 0, 100, (holds("p", 0, 5),), idle_since=0), BlockDemand("b", "x1", 0, 100)]
    assert decide(loads, pages=5).downs == (ScaleDown("b", "x0", (("p", "x1"),)),)
    assert decide(loads, pages=4).downs == ()


def test_a_block_that_was_scaled_lately_is_left_alone() -> None:
    loads = [BlockDemand("hot", "x0", 99, 100)]
    assert decide(loads, changed={"hot": 951}).ups == ()
    assert len(decide(loads, changed={"hot": 950}).ups) == 1


def test_limits_that_would_swing_are_refused() -> None:
    with pytest.raises(ValueError, match="swing"):
        ScalingLimits(high=0.4, low=0.4)


_loads = st.lists(
    st.builds(
        BlockDemand,
        st.sampled_from(["hot", "b", "c"]),
        st.sampled_from(["x0", "x1", "y0"]),
        st.integers(0, 10),
        st.just(10),
        st.lists(st.integers(0, 6), max_size=3).map(
            lambda counts: tuple(holds(f"s{index}", 3 * index, count) for index, count in enumerate(counts))
        ),
        st.one_of(st.none(), st.integers(800, 1000)),
    ),
    max_size=7,
    unique_by=lambda load: (load.block, load.device),
)


@given(_loads, st.integers(0, 9), st.integers(0, 12))
@settings(max_examples=200, deadline=None)
def test_memory_holds_and_no_block_loses_its_last_instance(loads: list[BlockDemand], free: int, pages: int) -> None:
    done = decide(loads, free, pages)
    used: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    sizes = {(each.block, each.device, one.seq): len(one.pages) for each in loads for one in each.held}
    here = {(each.block, each.device) for each in loads}
    for up in done.ups:
        assert (up.block, up.device) not in here and up.part > 0.8
        here.add((up.block, up.device))
        used[up.device] += NBYTES[up.block]
        moved = sum(sizes[(up.block, up.hot, seq)] for seq in up.moves)
        taken[up.device] += moved
        assert 2 * moved <= sum(
            size for (block, device, _), size in sizes.items() if (block, device) == (up.block, up.hot)
        )
    for even in done.evens:
        assert (
            (even.block, even.device) in here
            and even.part > 0.8
            and not any((each.block, each.hot) == (even.block, even.hot) for each in done.ups)
        )
        taken[even.device] += sum(sizes[(even.block, even.hot, seq)] for seq in even.moves)
    for down in done.downs:
        here.remove((down.block, down.device))
        assert {seq for seq, _ in down.moves} == {
            seq for block, device, seq in sizes if (block, device) == (down.block, down.device)
        }
        for seq, device in down.moves:
            assert (down.block, device) in here
            taken[device] += sizes[(down.block, down.device, seq)]
    assert all(count <= free for count in used.values()) and all(count <= pages for count in taken.values())
    assert {block for block, _ in here} == {each.block for each in loads}
    touched = {each.block for each in (*done.ups, *done.downs)}
    assert touched <= {each.block for each in loads if each.part > 0.8 or each.idle_since is not None}
    assert (
        len(done.ups) <= LIMITS.most and isinstance(done.ups, tuple) and all(isinstance(each, Up) for each in done.ups)
    )
