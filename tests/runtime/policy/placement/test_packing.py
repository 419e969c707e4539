"""Packing of chains on many devices: whole, with few weights on each, and cut only where necessary."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.policy.placement.packing import fill, pack


def test_each_model_has_a_device_of_its_own_where_there_are_enough() -> None:
    chains = [[f"{name}{at}" for at in range(4)] for name in "abcdefghi"]
    sizes = {block: 10 for chain in chains for block in chain}
    plans = pack(chains, sizes, [50] * 12)
    assert all(plan is not None and len(set(plan)) == 1 for plan in plans)
    assert len({plan[0] for plan in plans if plan}) == 9


def test_what_shares_everything_lies_together() -> None:
    """Of equal loads, the device that needs no more bytes: adapters are placed with their foundation."""
    plans = pack([["f0", "f1"], ["f0", "f1"]], {"f0": 10, "f1": 10}, [30, 30])
    assert plans == ((0, 0), (0, 0))


def test_where_copies_do_not_fit_sharing_goes_first() -> None:
    """Three chains over one foundation: spread out, it would be there three times, for which there is no room."""
    chains = [["f", "a"], ["f", "b"], ["f", "c"]]
    plans = pack(chains, {"f": 80, "a": 10, "b": 10, "c": 10}, [100, 90])
    assert None not in plans
    held = {
        (block, device)
        for chain, plan in zip(chains, plans, strict=True)
        for block, device in zip(chain, plan or (), strict=True)
    }
    assert sum({"f": 80}.get(block, 10) for block, _ in held) <= 190


def test_only_what_is_too_large_for_a_device_is_cut() -> None:
    plans = pack([["a0", "a1", "a2"], ["b"]], {"a0": 40, "a1": 40, "a2": 40, "b": 20}, [100, 100])
    assert plans[0] is not None and len(set(plans[0])) == 2
    assert plans[1] is not None and len(set(plans[1])) == 1
    assert pack([["a"]], {"a": 200}, [100, 100]) == (None,)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_device_takes_more_than_its_limit_and_no_chain_loses_a_block(data: st.DataObject) -> None:
    names = [f"b{at}" for at in range(data.draw(st.integers(1, 8)))]
    sizes = {name: data.draw(st.integers(1, 30)) for name in names}
    chains = data.draw(st.lists(st.lists(st.sampled_from(names), min_size=1, max_size=6), min_size=1, max_size=5))
    limits = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=5))
    plans = pack(chains, sizes, limits)
    held: set[tuple[str, int]] = set()
    for chain, plan in zip(chains, plans, strict=True):
        if plan is not None:
            assert len(plan) == len(chain)
            held |= set(zip(chain, plan, strict=True))
    for device, limit in enumerate(limits):
        assert sum(sizes[block] for block, there in held if there == device) <= limit


def test_devices_that_are_left_over_get_copies_of_what_has_most_to_do() -> None:
    chains = [("a",), ("a",), ("a",), ("b",)]
    packed = pack(chains, {"a": 10, "b": 10}, (25,) * 6)
    assert len({device for plan in packed for device in plan or ()}) == 2
    free = [at for at in range(6) if all(at not in (plan or ()) for plan in packed)]
    made = fill(chains, packed, {"a": 10, "b": 10}, (25,) * 6, free)
    assert [device for device, _ in made] == free
    assert [blocks for _, blocks in made] == [
        ("a",),
        ("a",),
        ("a",),
        ("b",),
    ]  # 30, 15, then 10 like the other, then less


def test_a_device_that_is_too_small_for_any_copy_stays_empty() -> None:
    chains = [("a",)]
    packed = pack(chains, {"a": 10}, (10, 5))
    assert fill(chains, packed, {"a": 10}, (10, 5), [1]) == []
    assert fill([], (), {}, (10,), [0]) == []
