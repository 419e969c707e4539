"""Placement by locality: examples, comparison with every assignment of small clusters, and properties (BL-26)."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.policy.placement.locality import (
    ClusterLayout,
    DeviceRoom,
    Instance,
    MoveCosts,
    Placement,
    Rearrangement,
    blend,
    place,
    rearrange,
)
from runtime.policy.placement.traffic import NEAR, Traffic, TrafficLedger, TrafficStep

#: Two servers of two devices, ten bytes each.
DEVICES = tuple(DeviceRoom(f"{server}{index}", server, 10) for server in "xy" for index in range(2))
EQUAL = dict.fromkeys("abcd", 5)
COSTS = MoveCosts(crossing=1.0, nbyte=1.0, margin=1.5, period=100)


def cluster(
    pairs: dict[str, float],
    nbytes: dict[str, int] = EQUAL,
    instances: str = "",
    devices: tuple[DeviceRoom, ...] = DEVICES,
) -> ClusterLayout:
    """Return a layout of `instances` such as "a@x0 b@y1"; their bytes are subtracted from the devices."""
    there = tuple(Instance(*each.split("@")) for each in instances.split())
    used = {device.name: sum(nbytes[each.block] for each in there if each.device == device.name) for device in devices}
    left = tuple(replace(device, free=device.free - used[device.name]) for device in devices)
    return ClusterLayout(left, there, nbytes, {(pair[0], pair[1]): rows for pair, rows in pairs.items()})


def where(placement: Placement) -> dict[str, str]:
    return {each.block: each.device for each in placement.placed}


def servers(placement: Placement) -> dict[str, str]:
    return {block: device[0] for block, device in where(placement).items()}


def moved(done: Rearrangement) -> list[str]:
    return [f"{each.block}:{each.source}>{each.target}" for each in done.moves]


# -- traffic -----------------------------------------------------------------------------------------------------------


def test_traffic_by_hand() -> None:
    ledger = TrafficLedger(
        {"x0": "x", "x1": "x", "y0": "y"},
        dict.fromkeys(["x0", "x1", "y0"], 99),
        EQUAL,
        {("a", "b"): 12.0, ("b", "c"): 8.0},
    )
    for block, device in (("a", "x0"), ("a", "y0"), ("b", "x1"), ("c", "x1")):
        ledger.add(block, device)
    assert ledger.traffic() == Traffic(
        between_servers=6.0, between_devices=6.0
    )  # one a is on the server of b; b and c are on one device
    ledger.add("b", "y0")
    assert ledger.traffic() == Traffic(4.0, 6.0)  # half of b's rows go from y0 to the only c
    ledger.remove("b", "x1")
    assert ledger.traffic() == Traffic(14.0, 0.0) and ledger.traffic().weight == 14.0
    assert Traffic(1.0, 16.0).weight == 1 + 16 * NEAR == 2.0


def test_what_the_ledger_allows() -> None:
    ledger = TrafficLedger({"x0": "x", "y0": "y"}, {"x0": 5, "y0": 9}, EQUAL, {})
    for block, device in (("a", "x0"), ("b", "y0"), ("c", "x0"), ("c", "y0")):
        ledger.add(block, device)
    assert ledger.free == {"x0": -5, "y0": -1}
    ledger.free.update(x0=0, y0=4)
    swap = [TrafficStep("a", "x0", "y0"), TrafficStep("b", "y0", "x0")]
    assert ledger.allows(swap, transient=False) and not ledger.allows(swap, transient=True)
    ledger.free["y0"] = 5
    assert not ledger.allows([TrafficStep("c", "x0", "y0")], transient=False)  # it has one already
    assert ledger.allows(swap, transient=True) and not ledger.allows(swap[::-1], transient=True)
    assert ledger.best_fit("d") == "y0" and ledger.best_fit("d", beside="a") is None and not ledger.fits("b", "y0")


# -- new instances -----------------------------------------------------------------------------------------------------


def test_busy_pairs_share_a_server_and_a_device_where_there_is_room() -> None:
    placement = place("abcd", cluster({"ac": 90, "bd": 80, "ab": 1}))
    assert placement.traffic.between_servers == 0 and not placement.unplaced
    at = where(placement)
    assert at["a"] == at["c"] and at["b"] == at["d"]


def test_a_pair_too_large_for_a_device_shares_its_server() -> None:
    at = servers(place("abcd", cluster({"ac": 90, "bd": 80, "cb": 9}, dict.fromkeys("abcd", 8))))
    assert at["a"] == at["c"] != at["b"] == at["d"]


def test_the_baseline_leaves_the_least_over() -> None:
    sizes = {"a": 7, "b": 6, "c": 4, "d": 3}
    placement = place("abcd", cluster({"ab": 99}, sizes), "frag-min")
    assert where(placement) == {"a": "x0", "d": "x0", "b": "x1", "c": "x1"}
    assert {each.left for each in placement.placed} == {0}
    assert place("abcd", cluster({"ab": 99}, sizes)).traffic.weight <= placement.traffic.weight


def test_what_finds_no_room_is_named_and_two_of_a_block_are_apart() -> None:
    placement = place(["a", "a", "b"], cluster({}, {"a": 5, "b": 11}))
    assert placement.unplaced == ("b",) and len({each.device for each in placement.placed}) == 2
    assert place(["a"] * 5, cluster({})).unplaced == ("a",)


def test_new_instances_come_to_those_that_are_there() -> None:
    assert servers(place("b", cluster({"ab": 9}, instances="a@y1"))) == {"b": "y"}
    assert where(place("b", cluster({"ab": 9}, instances="a@y1"))) == {"b": "y1"}


# -- rearranging -------------------------------------------------------------------------------------------------------


def test_a_move_must_gain_more_than_it_costs_by_the_margin() -> None:
    at = "a@x0 b@y0"
    # 5 bytes cost 5 s, so 7.5 s would have to be gained
    assert moved(rearrange(cluster({"ab": 7}, instances=at), COSTS, 100)) == []
    done = rearrange(cluster({"ab": 8}, instances=at), COSTS, 100)
    assert len(done.moves) == 1 and (done.before.between_servers, done.after) == (8.0, Traffic(0.0, 0.0))
    assert (done.moves[0].saved, done.moves[0].gain, done.moves[0].cost) == (8.0, 8.0, 5.0)


def test_hops_inside_a_server_count_by_what_they_cost() -> None:
    """Eight rows within a server cost little over the link; a move pays where each waits for a step."""
    there = cluster({"ab": 8}, instances="a@x0 b@x1")
    assert moved(rearrange(there, COSTS, 100)) == []
    assert len(moved(rearrange(replace(there, near=1.0), COSTS, 100))) == 1


def test_nobody_moves_twice_within_a_period() -> None:
    both = cluster({"ab": 50}, instances="a@x0 b@y0")
    fresh = replace(both, instances=tuple(replace(each, moved=40) for each in both.instances))
    assert moved(rearrange(fresh, COSTS, 139)) == [] and len(rearrange(fresh, COSTS, 140).moves) == 1
    one = replace(both, instances=(replace(both.instances[0], moved=40), both.instances[1]))
    assert moved(rearrange(one, COSTS, 139)) == ["b:y0>x0"]


def test_a_workload_that_flips_moves_instances_after_a_period() -> None:
    before, after = {"ab": 90, "cd": 90}, {"ac": 90, "bd": 90}
    full = dict.fromkeys("abcd", 8)
    start = place("abcd", cluster(before, full))
    at = " ".join(f"{each.block}@{each.device}" for each in start.placed)
    assert start.traffic.between_servers == 0 and moved(rearrange(cluster(before, full, at), COSTS, 100)) == []
    tight = rearrange(cluster(after, full, at), COSTS, 100)
    assert moved(tight) == []  # every device is full: nothing can be loaded before something is dropped
    roomy = tuple(replace(device, free=16) for device in DEVICES)
    done = rearrange(cluster(after, full, at, roomy), COSTS, 100)
    assert done.before.between_servers == 180 and done.after.between_servers == 0 and 1 <= len(done.moves) <= 2


def test_one_makes_room_for_another() -> None:
    sizes = {"a": 6, "b": 6, "c": 4, "d": 1}
    devices = (DeviceRoom("x0", "x", 10), DeviceRoom("y0", "y", 10))
    done = rearrange(cluster({"ab": 90, "cd": 1}, sizes, "a@x0 c@x0 b@y0 d@y0", devices), COSTS, 100)
    assert moved(done) == []  # 10 bytes hold neither a and b, nor b before a is gone
    devices = (DeviceRoom("x0", "x", 12), DeviceRoom("y0", "y", 11))
    done = rearrange(cluster({"ab": 90, "cd": 1}, sizes, "a@x0 c@x0 b@y0 d@y0", devices), COSTS, 100)
    assert moved(done) == ["c:x0>y0", "b:y0>x0"] and done.after.between_servers == 0


def test_counters_fade() -> None:
    assert blend({("a", "b"): 8.0, ("b", "c"): 0.5}, {("a", "b"): 1.0, ("c", "d"): 4.0}) == {
        ("a", "b"): 5.0,
        ("c", "d"): 4.0,
    }


# -- properties --------------------------------------------------------------------------------------------------------

_pairs = st.dictionaries(
    st.sampled_from(["ab", "bc", "cd", "ac", "bd", "da"]), st.integers(1, 20).map(float), max_size=5
)
_sizes = st.fixed_dictionaries({block: st.integers(1, 8) for block in "abcd"})
_devices = st.lists(st.tuples(st.sampled_from("xyz"), st.integers(3, 14)), min_size=1, max_size=4).map(
    lambda drawn: tuple(DeviceRoom(f"{server}{index}", server, free) for index, (server, free) in enumerate(drawn))
)


def best_of_all(there: ClusterLayout) -> tuple[int, float]:
    """Return (unplaced, weight) of the best assignment of a, b, c and d, each of which may stay unplaced."""
    names = [device.name for device in there.devices]
    best = (9, 0.0)
    for at in product([None, *names], repeat=4):
        ledger = TrafficLedger(
            {each.name: each.server for each in there.devices},
            {each.name: each.free for each in there.devices},
            there.nbytes,
            there.pairs,
        )
        for block, device in zip("abcd", at, strict=True):
            if device is not None:
                ledger.add(block, device)
        if min(ledger.free.values()) >= 0:
            best = min(best, (at.count(None), ledger.traffic().weight))
    return best


@given(_pairs, _sizes, _devices, st.sampled_from(["locality", "frag-min"]))
@settings(max_examples=80, deadline=None)
def test_no_device_gets_more_than_it_holds(
    pairs: dict[str, float], sizes: dict[str, int], devices: tuple[DeviceRoom, ...], policy: str
) -> None:
    there = cluster(pairs, sizes, devices=devices)
    placement = place("abcd", there, policy)  # type: ignore[arg-type]
    for device in devices:
        assert sum(sizes[each.block] for each in placement.placed if each.device == device.name) <= device.free
    assert sorted([each.block for each in placement.placed] + list(placement.unplaced)) == list("abcd")
    packed = place("abcd", there, "frag-min")
    if policy == "locality":
        assert (len(placement.unplaced), placement.traffic.weight) <= (len(packed.unplaced), packed.traffic.weight)
        unplaced, weight = best_of_all(there)
        assert len(placement.unplaced) >= unplaced
        if len(placement.unplaced) == unplaced:
            assert placement.traffic.weight >= weight - 1e-9


@given(_pairs, _sizes, _devices, st.data())
@settings(max_examples=150, deadline=None)
def test_moves_pay_and_always_have_room(
    pairs: dict[str, float], sizes: dict[str, int], devices: tuple[DeviceRoom, ...], data: st.DataObject
) -> None:
    at = place("abcd", cluster({}, sizes, devices=devices), "frag-min")
    there = cluster(pairs, sizes, " ".join(f"{each.block}@{each.device}" for each in at.placed), devices)
    there = replace(
        there, instances=tuple(replace(each, moved=data.draw(st.integers(0, 150))) for each in there.instances)
    )
    done = rearrange(there, MoveCosts(1.0, 0.1, period=100), 200)
    free = {each.name: each.free for each in there.devices}
    on = {(each.block, each.device): each.moved for each in there.instances}
    for move in done.moves:
        assert 200 - on.pop((move.block, move.source)) >= 100  # it was there, and had not moved within the period
        free[move.target] -= sizes[move.block]
        assert free[move.target] >= 0, "loaded before anything is dropped"
        free[move.source] += sizes[move.block]
        assert move.gain > 1.5 * move.cost > 0
        on[(move.block, move.target)] = 200
    assert done.after.weight <= done.before.weight and sorted(block for block, _ in on) == sorted(
        each.block for each in there.instances
    )
    assert not done.moves or done.after.weight < done.before.weight


def test_small_clusters_come_out_close_to_the_best() -> None:
    """Over fixed random clusters nearly all blocks find room, four in five placements are the best possible.

    The sum of their weights is within a tenth of the best.
    """
    drawn = random.Random(5)
    ours, best = [], []
    for _ in range(60):
        sizes = {block: drawn.randint(1, 8) for block in "abcd"}
        pairs = {
            pair: float(drawn.randint(1, 20))
            for pair in drawn.sample(["ab", "bc", "cd", "ac", "bd", "da"], drawn.randint(1, 5))
        }
        layout = drawn.choice(["xxyy", "xyz", "xxyz", "xxy"])
        there = cluster(
            pairs,
            sizes,
            devices=tuple(
                DeviceRoom(f"{server}{index}", server, drawn.randint(8, 12)) for index, server in enumerate(layout)
            ),
        )
        got, (unplaced, weight) = place("abcd", there), best_of_all(there)
        if len(got.unplaced) > unplaced:
            continue
        ours.append(got.traffic.weight)
        best.append(weight)
    exact = sum(a <= b + 1e-9 for a, b in zip(ours, best, strict=True))
    print(f"best in {exact} of {len(ours)}; {sum(ours):.0f} beside {sum(best):.0f}")
    assert len(ours) >= 58 and exact >= 48 and sum(ours) <= 1.1 * sum(best)
