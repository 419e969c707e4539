"""Indexes of the scheduler agree with a count from scratch: cached routes, living devices, and capped candidates."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.chains import Block, BlockUse, Chain, devices_of
from runtime.config import ClusterConfig
from runtime.messages import PROTOCOL, AgentHello
from runtime.policy.routing.paths import by_load, cheapest, path_cost
from runtime.scheduler.devices.devices import Devices
from runtime.scheduler.placement.block_map import BlockMap
from runtime.scheduler.routing import route_cache as routes
from runtime.scheduler.routing.route_cache import RouteCache
from runtime.scheduler.routing.router import Router
from runtime.scheduler.routing.used_paths import UsedPaths
from runtime.types import ModelSpec

NAMES = [f"d{at}" for at in range(4)]


def chain_of(version: str, layers: list[int]) -> Chain:
    uses = tuple(BlockUse(f"{version}-{at}", at, at + 1, count, "") for at, count in enumerate(layers))
    return Chain(ModelSpec("m", sum(layers), 16, 512, 100), version, uses)


def up(devices: Devices, name: str) -> None:
    devices.up(AgentHello(name, PROTOCOL, "v", 100, 1, 0, name))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(NAMES)), min_size=1, max_size=6),
    st.sampled_from(["one", "two"]),
)
def test_a_route_is_what_its_path_says(blocks: list[tuple[int, str]], version: str) -> None:
    chain, devices = chain_of(version, [layers for layers, _ in blocks]), tuple(name for _, name in blocks)
    made = RouteCache()
    route = made.get_route(chain, devices)
    assert route is made.get_route(chain, devices) is made.along(chain, route.path)
    assert devices_of(chain, route.path) == devices
    assert route.devices == tuple(dict.fromkeys(devices))
    pages = {name: sum(layers for layers, at in blocks if at == name) for name in route.devices}
    assert dict(route.weights) == {name: count for name, count in pages.items() if count}
    assert [(device, stage) for device, stage in route.stages] == [
        (hop.device, chain.stage(hop.lo, hop.hi)) for hop in route.path
    ]


def test_routes_go_with_their_version_and_have_a_bound(monkeypatch) -> None:
    monkeypatch.setattr(routes, "_MOST", 3)
    made, one, two = RouteCache(), chain_of("one", [1]), chain_of("two", [1])
    kept = made.get_route(two, ("d0",))
    gone = made.get_route(one, ("d0",))
    made.remove_version("one")
    assert made.get_route(two, ("d0",)) is kept
    assert made.get_route(one, ("d0",)) is not gone
    for at in range(20):
        made.get_route(one, (f"d{at}",))
        assert len(made._by_devices) <= 3 and len(made._by_path) <= 3


@given(
    st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True), min_size=1, max_size=3),
    st.lists(st.integers(0, 5), min_size=4, max_size=4),
)
def test_no_path_is_cheaper_than_the_one_that_is_chosen(candidates: list[list[str]], numbers: list[int]) -> None:
    loads = {name: float(number) for name, number in zip(NAMES, numbers, strict=True)}
    every: list[tuple[str, ...]] = [()]
    for some in candidates:
        every = [(*path, name) for path in every for name in some]
    chosen = cheapest(by_load(candidates, loads, 1.5))
    assert chosen in every
    assert path_cost(chosen, loads, 1.5) == pytest.approx(min(path_cost(path, loads, 1.5) for path in every))
    if len(candidates) == 1:
        assert chosen == min(every, key=lambda path: loads[path[0]])  # the first of equals


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 11)), max_size=30), st.integers(1, 12), st.integers(0, 99))
def test_candidates_are_living_devices_some_of_very_many(
    events: list[tuple[bool, int]], copies: int, seed: int
) -> None:
    devices = Devices()
    for at in range(12):
        up(devices, f"d{at}")
    chain = chain_of("one", [1])
    config = ClusterConfig(devices=12)
    blocks = BlockMap([Block("one-0", 1, 1)], config, devices)
    router = Router(config, devices, blocks, UsedPaths(blocks).reads)
    for at in range(copies):
        blocks.add("one-0", f"d{at}")
    chance, turn = random.Random(seed), 0
    for comes, at in [*events, (True, 0)]:
        if comes:
            up(devices, f"d{at}")
        elif devices.alive(f"d{at}"):
            devices.down(f"d{at}")
        devices.check()
        assert set(devices.living) == {device.name for device in devices if device.alive}
        loads = {f"d{number}": float(chance.randrange(4)) for number in range(12)}
        turn += 7919
        first = turn % copies if copies > 8 else 0
        able = [
            f"d{(first + step) % copies}" for step in range(copies) if devices[f"d{(first + step) % copies}"].alive
        ][:8]
        path = router.path(chain, loads)
        assert (None if path is None else path[0].device) == min(able, key=loads.__getitem__, default=None)
