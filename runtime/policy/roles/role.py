"""Say which phases of a sequence a device runs, and whether a cluster can run every chain with its roles (TI-04).

    prefill   prompts, and contexts that are computed again      decode   tokens behind them      both   everything

A role is data: it limits which devices paths may pass, and nothing else of a device depends on it. A sequence needs
both phases, so that every chain needs all of its blocks on devices for prompts, and on devices for decoding. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from runtime.role_config import RoleName

#: What is run of a sequence: its context as far as it is known, or the tokens behind it, one by one.
PathPhase = Literal["prompts", "decodes"]
PHASES: tuple[PathPhase, ...] = ("prompts", "decodes")


@dataclass(frozen=True, slots=True)
class Role:
    """Phases that a device runs.

    Fields:
        prompts: Whether it computes contexts.
        decodes: Whether it decodes.
    """

    name: RoleName
    prompts: bool
    decodes: bool

    def admits(self, phase: PathPhase) -> bool:
        return self.prompts if phase == "prompts" else self.decodes

    def covers(self, other: Role) -> bool:
        """Return whether it runs all phases that another role runs."""
        return self.prompts >= other.prompts and self.decodes >= other.decodes


BOTH = Role("both", prompts=True, decodes=True)
ROLES: Mapping[str, Role] = {
    role.name: role for role in (BOTH, Role("prefill", prompts=True, decodes=False), Role("decode", False, True))
}


def devices_of_phase(
    blocks: Iterable[Collection[str]], roles: Mapping[str, Role], phase: PathPhase
) -> frozenset[str] | None:
    """Return the devices that a chain may pass in a phase; None if they lack a block of it.

    Args:
        blocks: Devices of each block of the chain.
        roles: Role by device.
    """
    able = frozenset(name for name, role in roles.items() if role.admits(phase))
    return able if all(not able.isdisjoint(where) for where in blocks) else None


def missing_phase(chains: Mapping[str, Sequence[Collection[str]]], roles: Mapping[str, Role]) -> str | None:
    """Return which chain could not be run with these roles, and why; None if all of them can.

    `chains`: devices of each block, by model.
    """
    for model, blocks in chains.items():
        if devices_of_phase(blocks, roles, "prompts") is None:
            return f"{model} would not be whole on devices for prompts (prefill or both)"
        if devices_of_phase(blocks, roles, "decodes") is None:
            return f"{model} would not be whole on devices that decode (decode or both)"
    return None
