"""Compute the initial placement of blocks, by the configured method (`config.Placement`), as data.

Contract: it changes nothing, and reads only the devices. Chains are taken in order; a chain that does not fit beside
those before it is left out, with a reason. The result may name instances that exist already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.chains import Block, Chain
from runtime.config import Placement
from runtime.policy.placement.locality import ClusterLayout, place
from runtime.policy.placement.locality import DeviceRoom as Place
from runtime.policy.placement.packing import fill, pack
from runtime.policy.placement.partition import cells, spread
from runtime.policy.residency.homes import homes
from runtime.scheduler.devices.devices import Device


@dataclass(frozen=True, slots=True)
class InitialPlacement:
    """Result of a placement.

    Fields:
        instances: (block, device) pairs.
        lacking: Reasons of the chains that were not placed, by version.
    """

    instances: tuple[tuple[str, str], ...]
    lacking: Mapping[str, str]


def laid_out(
    chains: Sequence[Chain], blocks: Mapping[str, Block], devices: Sequence[Device], placing: Placement, swap: bool
) -> InitialPlacement:
    """Place the blocks of these chains on these devices.

    `swap`: where not all chains fit at once, each gets devices that hold it alone, and stages come by demand.
    """
    if swap:
        limits = [device.plan.limit for device in devices]
        every = {use.block for chain in chains for use in chain.uses}
        if not all(limits) or sum(blocks[block].nbytes for block in every) <= sum(limits):
            found = laid_out(chains, blocks, devices, placing, False)
            if not found.lacking:
                return found
        return at_home(chains, blocks, devices)
    if placing == "frag-min":
        return _scattered(chains, blocks, devices)
    if placing in ("on-demand", "eager"):
        return _packed(chains, blocks, devices, placing == "eager")
    return _copied(chains, blocks, devices, placing == "partition")


def _tied(chain: Chain, blocks: Mapping[str, Block]) -> int:
    """Return the bytes of the tables that two blocks of a chain have in common."""
    tables = [table for name in {use.block for use in chain.uses} for table in blocks[name].tables]
    return sum(size for _, size in tables) - sum(dict(tables).values())


def at_home(chains: Sequence[Chain], blocks: Mapping[str, Block], devices: Sequence[Device]) -> InitialPlacement:
    """Give each chain devices that hold it alone (`policy.residency.homes`), beside the blocks planned there."""
    sizes = {use.block: blocks[use.block].nbytes for chain in chains for use in chain.uses}
    limits = [device.plan.limit for device in devices]
    plans = homes(
        [[use.block for use in chain.uses] for chain in chains],
        sizes,
        [sum(use.adapter_bytes for use in chain.uses) for chain in chains],
        limits,
        [device.plan.blocks for device in devices],
        [_tied(chain, blocks) for chain in chains],
    )
    made: list[tuple[str, str]] = []
    lacking: dict[str, str] = {}
    for chain, plan in zip(chains, plans, strict=True):
        if plan is None:
            need = sum(blocks[name].nbytes for name in {use.block for use in chain.uses}) - _tied(chain, blocks)
            have = ", ".join(str(limit) if limit else "any" for limit in limits)
            lacking[chain.version] = f"{chain.model} fits no device: it needs {need} bytes of weights, they take {have}"
        made += [(use.block, devices[at].name) for use, at in zip(chain.uses, plan or (), strict=False)]
    return InitialPlacement(tuple(made), lacking)


def _packed(
    chains: Sequence[Chain], blocks: Mapping[str, Block], devices: Sequence[Device], eager: bool
) -> InitialPlacement:
    """Place one copy of each chain, whole where a device takes it; `eager`: more copies on empty devices."""
    limits = [device.plan.limit for device in devices]
    sizes = {use.block: blocks[use.block].nbytes for chain in chains for use in chain.uses}
    runs = [[use.block for use in chain.uses] for chain in chains]
    plans = pack(runs, sizes, limits)
    made: list[tuple[str, str]] = []
    lacking: dict[str, str] = {}
    for chain, plan in zip(chains, plans, strict=True):
        if plan is None:
            lacking[chain.version] = _lacks(chain, blocks, limits)
        made += [(use.block, devices[at].name) for use, at in zip(chain.uses, plan or (), strict=False)]
    if eager:
        taken = {name for _, name in made}
        free = [at for at, device in enumerate(devices) if not device.plan.blocks and device.name not in taken]
        made += [(block, devices[at].name) for at, copied in fill(runs, plans, sizes, limits, free) for block in copied]
    return InitialPlacement(tuple(made), lacking)


def _scattered(chains: Sequence[Chain], blocks: Mapping[str, Block], devices: Sequence[Device]) -> InitialPlacement:
    """Place one copy of each block by itself where the least memory is left over, without regard to traffic.

    This is the paper's baseline.
    """
    sizes = {use.block: blocks[use.block].nbytes for chain in chains for use in chain.uses}
    there = {block for device in devices for block in device.plan.blocks}
    places = tuple(Place(device.name, device.facts.server or device.name, device.plan.room) for device in devices)
    found = place([block for block in sizes if block not in there], ClusterLayout(places, (), sizes, {}), "frag-min")
    unplaced, limits = set(found.unplaced), [device.plan.limit for device in devices]
    without = [chain for chain in chains if any(use.block in unplaced for use in chain.uses)]
    instances = tuple((placed.block, placed.device) for placed in found.placed)
    return InitialPlacement(instances, {chain.version: _lacks(chain, blocks, limits) for chain in without})


def _copied(
    chains: Sequence[Chain], blocks: Mapping[str, Block], devices: Sequence[Device], split: bool
) -> InitialPlacement:
    """Place as many copies of everything as there is room for; `split`: one copy, cut over all devices."""
    limits = [device.plan.limit for device in devices]
    taken: list[Chain] = []
    lacking: dict[str, str] = {}
    groups: tuple[tuple[int, ...], ...] = ()
    for chain in chains:
        found = cells([blocks[name].nbytes for name in _order([*taken, chain], split)], limits, split)
        if found:
            taken, groups = [*taken, chain], found
        else:
            lacking[chain.version] = _lacks(chain, blocks, limits)
    order = _order(taken, split)
    made: list[tuple[str, str]] = []
    for group in groups:
        plan = spread([blocks[name].nbytes for name in order], [limits[at] for at in group]) or ()
        made += [(block, devices[group[at]].name) for block, at in zip(order, plan, strict=True)]
    return InitialPlacement(tuple(made), lacking)


def _order(chains: Sequence[Chain], split: bool) -> list[str]:
    """Order blocks so that those of one chain are neighbours, after those it shares with earlier chains.

    `split`: order by their position in the chains, for a cut over all devices.
    """
    if not split:
        return list(dict.fromkeys(use.block for chain in chains for use in chain.uses))
    depth: dict[str, tuple[int, int]] = {}
    for chain in chains:
        for use in chain.uses:
            depth.setdefault(use.block, (use.lo, len(depth)))
    return sorted(depth, key=depth.__getitem__)


def _lacks(chain: Chain, blocks: Mapping[str, Block], limits: Sequence[int]) -> str:
    need = sum(blocks[name].nbytes for name in {use.block for use in chain.uses})
    have = ", ".join(str(limit) if limit else "any" for limit in limits)
    return f"the cluster cannot hold {chain.model} beside what it holds: {need} bytes of weights, devices take {have}"
