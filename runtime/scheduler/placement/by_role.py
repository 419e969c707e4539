"""Lay out blocks over devices of several roles: each group of devices with one role by itself (TI-04).

Contract: where all devices run everything there is one group, and the placement is that of `placement.initial`. Else a
chain is placed only if both of its phases have all of its blocks; what is not placed has the reason. No chain waits
for another to leave (`swap`), because a sequence that is handed off must find its stages loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runtime.chains import Block, Chain
from runtime.config import Placement
from runtime.policy.roles.role import Role
from runtime.scheduler.devices.devices import Device
from runtime.scheduler.devices.roles import DeviceRoles
from runtime.scheduler.placement.initial import InitialPlacement, laid_out


def role_groups(devices: Sequence[Device], roles: DeviceRoles) -> list[list[Device]]:
    """Return the devices of each role; of all together where none has a role of its own."""
    if not roles.apart:
        return [list(devices)]
    groups: dict[Role, list[Device]] = {}
    for device in devices:
        groups.setdefault(roles[device.name], []).append(device)
    return list(groups.values())


def lacking_phase(reasons: Sequence[tuple[Role, str | None]]) -> str | None:
    """Return why a chain lacks a phase, given why each group of a role cannot hold it (None: it does)."""
    for phase in ("prompts", "decodes"):
        able = [why for role, why in reasons if (role.prompts if phase == "prompts" else role.decodes)]
        if None not in able:
            where = "for prompts" if phase == "prompts" else "that decode"
            return f"on devices {where}: {able[0] if able else 'there are none'}"
    return None


def laid_out_by_role(
    chains: Sequence[Chain],
    blocks: Mapping[str, Block],
    devices: Sequence[Device],
    roles: DeviceRoles,
    placing: Placement,
    swap: bool,
) -> InitialPlacement:
    """Place the blocks of these chains on these devices; the arguments are those of `laid_out`."""
    if not roles.apart:
        return laid_out(chains, blocks, devices, placing, swap)
    groups, taken, lacking = role_groups(devices, roles), list(chains), dict[str, str]()
    while True:
        found = [laid_out(taken, blocks, group, placing, False) for group in groups]
        missing: dict[str, str] = {}
        for chain in taken:
            reasons = [
                (roles[group[0].name], each.lacking.get(chain.version))
                for group, each in zip(groups, found, strict=True)
            ]
            if (why := lacking_phase(reasons)) is not None:
                missing[chain.version] = why
        if not missing:
            return InitialPlacement(tuple(made for each in found for made in each.instances), lacking)
        lacking |= missing
        taken = [chain for chain in taken if chain.version not in missing]
