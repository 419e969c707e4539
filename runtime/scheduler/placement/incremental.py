"""Place a chain during operation: each block where the block it replaces is, or where there is room.

Contract: blocks that are on devices already stay there, and serve the new chain too. All of a chain is placed or
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.chains import BlockUse, Chain
from runtime.policy.placement.incremental import Need, renew
from runtime.policy.placement.partition import cells, spread
from runtime.scheduler.devices.devices import Device
from runtime.scheduler.placement.by_role import lacking_phase, role_groups
from runtime.scheduler.placement.initial import at_home
from runtime.scheduler.state import ClusterState


def join(state: ClusterState, chain: Chain, before: Chain | None) -> str | None:
    """Place a chain; return why that is impossible, or None once it is placed.

    `before`: the chain that it replaces, None for none. Raises KeyError for blocks that the block map does not have.
    """
    roles = state.devices.roles
    groups = role_groups(list(state.devices), roles)
    found = [_plan(state, chain, before, group, alone=len(groups) == 1) for group in groups]
    if not roles.apart:
        if isinstance(found[0], str) and state.config.residency == "swap":
            return _at_home(state, chain)
        why = found[0] if isinstance(found[0], str) else None
    else:
        reasons = [each if isinstance(each, str) else None for each in found]
        why = lacking_phase([(roles[group[0].name], each) for group, each in zip(groups, reasons, strict=True)])
    if why is not None:
        return why
    for block, device in (made for each in found if not isinstance(each, str) for made in each):
        state.block_map.add(block, device)
    return None


def _plan(
    state: ClusterState, chain: Chain, before: Chain | None, devices: Sequence[Device], alone: bool
) -> Sequence[tuple[str, str]] | str:
    """Return the (block, device) pairs that a chain needs on these devices, or why they cannot hold it.

    `alone`: there are no other devices.
    """
    placed, names = state.block_map, {device.name for device in devices}
    fresh = list(
        {
            use.block: use
            for use in chain.uses
            if (alone and not placed.instances.get(use.block))
            or (not alone and names.isdisjoint(placed.instances.get(use.block, ())))
        }.values()
    )
    room = {name: left for name, left in _room(state).items() if name in names}
    move_requests = (
        _alone(state, fresh, room) if before is None else {use.block: _instead(state, use, before) for use in fresh}
    )
    needs = [Need(use.block, placed.block(use.block).nbytes, move_requests.get(use.block, ())) for use in fresh]
    found = renew(needs, room)
    if found is not None:
        return found
    need, have = (
        sum(each.nbytes for each in needs),
        ", ".join("any" if left is None else str(left) for left in room.values()),
    )
    return (
        f"the cluster cannot hold {chain.loaded_as} beside what it holds: {need} more bytes of weights, "
        f"devices have {have} left"
    )


def _at_home(state: ClusterState, chain: Chain) -> str | None:
    """Plan a chain on devices that hold it alone; return why there are none, or None."""
    blocks = {use.block: state.block_map.block(use.block) for use in chain.uses}
    found = at_home([chain], blocks, [device for device in state.devices if device.alive])
    for block, device in found.instances:
        state.block_map.add(block, device)
    return found.lacking.get(chain.version)


def _room(state: ClusterState) -> dict[str, int | None]:
    """Return the bytes that living devices have left for weights; None for no limit."""
    room: dict[str, int | None] = {}
    for device in state.devices:
        if device.alive:
            held = sum(state.block_map.block(block).nbytes for block in device.plan.blocks)
            room[device.name] = device.plan.limit - held if device.plan.limit else None
    return room


def _instead(state: ClusterState, use: BlockUse, before: Chain) -> tuple[str, ...]:
    """Return the devices of the blocks that this use of a block replaces."""
    replaced = [other.block for other in before.uses if other.lo < use.hi and use.lo < other.hi]
    return tuple(dict.fromkeys(name for block in replaced for name in state.block_map.instances.get(block, ())))


def _alone(state: ClusterState, fresh: list[BlockUse], room: dict[str, int | None]) -> dict[str, tuple[str, ...]]:
    """Return preferred devices of a chain that replaces none: spread over the free room as in an initial placement."""
    names = [name for name, left in room.items() if left is None or left > 0]
    limits, sizes = [room[name] or 0 for name in names], [state.block_map.block(use.block).nbytes for use in fresh]
    move_requests: dict[str, tuple[str, ...]] = {}
    for group in cells(sizes, limits, state.config.placement == "partition"):
        plan = spread(sizes, [limits[at] for at in group]) or ()
        for use, at in zip(fresh, plan, strict=True):
            move_requests[use.block] = (*move_requests.get(use.block, ()), names[group[at]])
    return move_requests
