"""The block map: instances are added, removed and refused, and the devices' plans agree with it."""

from __future__ import annotations

import pytest

from runtime.chains import Block, BlockUse, Chain, Stage
from runtime.config import ClusterConfig
from runtime.messages import PROTOCOL, AgentHello
from runtime.scheduler.devices.devices import ANY, Devices
from runtime.scheduler.placement.block_map import BlockMap, blocks_of
from runtime.types import ModelSpec

SIZES = {"x": 10, "y": 20, "z": 40}


def chain_of(name: str, *blocks: str) -> Chain:
    uses = tuple(BlockUse(block, at, at + 1, 1, f"{name}-{block}") for at, block in enumerate(blocks))
    return Chain(ModelSpec(name, len(uses), 128, 4, 0), f"{name}-1", uses)


def map_of(placing: str = "replicate", limit: int = 100) -> tuple[BlockMap, Devices]:
    devices = Devices()
    for name in ("a", "b"):
        devices.up(AgentHello(name, PROTOCOL, "", 100, 1, limit, name))
    blocks = [Block(name, nbytes, 1) for name, nbytes in SIZES.items()]
    return BlockMap(blocks, ClusterConfig(devices=2, placement=placing), devices), devices  # type: ignore[arg-type]


def agree(blocks: BlockMap, devices: Devices) -> bool:
    """Return whether each device's plan agrees with the map."""
    return all(
        device.plan.blocks == {block for block, where in blocks.instances.items() if device.name in where}
        and device.plan.nbytes == sum(SIZES[block] for block in device.plan.blocks)
        for device in devices
    )


def test_every_device_gets_what_it_takes_and_what_does_not_fit_has_a_reason() -> None:
    small, large = chain_of("small", "x", "y"), chain_of("large", "x", "y", "z", "z")
    blocks, devices = map_of(limit=30)
    blocks.place([small, large])
    assert blocks.instances == {"x": ["a", "b"], "y": ["a", "b"]} and agree(blocks, devices)
    assert blocks.why_not(small) is None and "cannot hold large" in str(blocks.why_not(large))
    assert blocks.up(small) and not blocks.up(large)
    assert devices["a"].plan.room == 0


def test_the_last_instance_stays_and_one_that_cannot_load_is_elsewhere() -> None:
    blocks, devices = map_of()
    for device in ("a", "b", "b"):
        blocks.add("x", device)
    blocks.add("y", "b")
    assert blocks.instances == {"x": ["a", "b"], "y": ["b"]} and agree(blocks, devices)
    blocks.leaving.add(("x", "b"))
    assert not blocks.spare("x", "a"), "the other one is about to go"
    assert blocks.shun("b", ["x", "y"]) and not blocks.leaving
    assert blocks.instances == {"x": ["a"], "y": ["b"]} and agree(blocks, devices)
    assert not blocks.shun("b", ["y"])
    with pytest.raises(ValueError, match="only instance"):
        blocks.remove("x", "a")


def test_a_chain_that_goes_takes_only_what_no_other_has() -> None:
    one, other = chain_of("one", "x", "y"), chain_of("other", "y", "z")
    blocks, devices = map_of()
    blocks.place([one, other])
    assert blocks.remove_chain(one, [other]) == ("x",)
    assert set(blocks.instances) == {"y", "z"} and agree(blocks, devices) and not blocks.knows("x")


def test_a_chain_is_within_devices_that_have_one_of_its_blocks_alone() -> None:
    blocks, _ = map_of()
    for block, device in (("x", "a"), ("x", "b"), ("y", "b")):
        blocks.add(block, device)
    chain = chain_of("one", "x", "y")
    assert blocks.within(chain, {"b"}) and not blocks.within(chain, {"a"})


def test_without_a_limit_there_is_room_for_all() -> None:
    blocks, devices = map_of(limit=0)
    blocks.add("x", "a")
    assert devices["a"].plan.room == ANY


def test_a_stage_is_made_of_the_blocks_inside_it() -> None:
    chain = chain_of("one", "x", "y", "z")
    assert blocks_of(chain, Stage("one", 1, 3)) == ("y", "z")
