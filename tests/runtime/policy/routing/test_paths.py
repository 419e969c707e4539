"""The cheapest path, by each table of costs."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.policy.routing.bytes_read import added
from runtime.policy.routing.latency import Latency
from runtime.policy.routing.paths import PathCosts, by_bytes, by_latency, by_load, cheapest, path_cost

DEVICES = "abc"


def choose(adds: list[dict[str, float]], enters: dict[str, float], hop: float) -> tuple[str, ...] | None:
    return cheapest(by_bytes(adds, enters, hop))


def price(costs: PathCosts, path: tuple[str, ...]) -> float:
    """Return what a path costs by the formula at the top of `policy.routing.paths`."""
    came = [path[0], *(after for before, after in pairwise(path) if after != before)]
    blocks = sum(row[device] for row, device in zip(costs.blocks, path, strict=True))
    return blocks + costs.hop * (len(came) - 1) + sum(costs.enters.get(device, 0.0) for device in came)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.booleans())
def test_no_path_is_cheaper_by_any_table(data: st.DataObject, entered: bool) -> None:
    some = st.sets(st.sampled_from(DEVICES), min_size=1).map(sorted)
    candidates = data.draw(st.lists(some, min_size=1, max_size=4))
    cost = st.integers(0, 9).map(float)
    rows = [{device: data.draw(cost) for device in row} for row in candidates]
    enters = {device: data.draw(cost) for device in DEVICES} if entered else {}
    costs = PathCosts(rows, data.draw(cost), enters)
    chosen = cheapest(costs)
    assert chosen is not None and price(costs, chosen) == min(price(costs, path) for path in product(*candidates))


def test_by_load_a_path_costs_its_share_of_each_device() -> None:
    """A device that runs half of the chain counts half, so a hop pays only for twice as much."""
    loads, candidates = {"a": 4.0, "b": 0.0}, [["a"], ["a", "b"]]
    assert cheapest(by_load(candidates, loads, 1.9)) == ("a", "b")
    assert cheapest(by_load(candidates, loads, 2.1)) == ("a", "a")
    costs = by_load(candidates, loads, 1.5)
    assert all(price(costs, path) == path_cost(path, loads, 1.5) for path in product(*candidates))


def test_by_latency_all_terms_count() -> None:
    quick, queued = Latency(0.0, 1.0, 0.0, 0.0), Latency(3.0, 0.5, 0.0, 0.0)
    assert cheapest(by_latency([{"a": queued, "b": quick}], 0.1)) == ("b",)
    assert cheapest(by_latency([{"a": queued, "b": quick}, {"a": quick}], 5.0)) == ("a", "a")


def test_a_newcomer_adds_weights_for_all_only_where_they_are_not_in_use() -> None:
    assert added(3, 5, 100, True) == 4 * 5 and added(3, 5, 100, False) == 4 * 105


def test_a_newcomer_goes_where_its_block_is_in_use() -> None:
    """With its foundation it adds only its own pages; on the other device all would read a second foundation."""
    used = {"a": 3 * 1.0, "b": (1 + 1) * (10.0 + 1.0)}
    assert choose([used], {"a": 12.0, "b": 10.0}, 1.0) == ("a",)


def test_until_the_other_foundation_is_the_smaller_evil() -> None:
    for sequences, expected in ((2, "a"), (9, "a"), (12, "b")):
        adds = {"a": (sequences + 1) * 1.0, "b": 2 * (10.0 + 1.0)}
        assert choose([adds], {"a": 10.0 + sequences, "b": 11.0}, 1.0) == (expected,), sequences


def test_an_idle_device_with_the_block_is_better_still() -> None:
    assert choose([{"a": 3 * 1.0, "b": 1 * (10.0 + 1.0)}], {"a": 12.0, "b": 0.0}, 1.0) == ("b",)


def test_a_chain_stays_whole_where_nothing_speaks_against_it() -> None:
    """A change of device waits for a whole step of the other device."""
    adds = [{"a": 1.0, "b": 1.0}] * 4
    assert choose(adds, {"a": 5.0, "b": 4.0}, 0.5) == ("b",) * 4
    cheaper_behind = [{"a": 1.0, "b": 9.0}, {"a": 9.0, "b": 1.0}]
    assert choose(cheaper_behind, {"a": 5.0, "b": 4.0}, 0.5) == ("a", "b")
    assert choose(cheaper_behind, {"a": 5.0, "b": 9.0}, 0.5) == ("a", "a")


def test_a_block_that_is_nowhere_has_no_path() -> None:
    assert choose([], {}, 0.0) is None
    assert choose([{"a": 1.0}, {}], {"a": 0.0}, 0.0) is None
