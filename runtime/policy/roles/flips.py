"""Choose the device that gets the opposite role: one that can be spared, where such devices need help (TI-24 to TI-26).

    a prefill device can be spared, decoding is short of devices -> decode (TI-25)
    a decode device can be spared, prompts are short of devices  -> prefill (TI-26)

The paper's example looks at idle devices alone; here a device changes only if it is of use in the other role. One at a
time, so that the next choice sees what the last one has done. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from runtime.policy.roles.role import ROLES, PathPhase
from runtime.role_config import RoleChangeConfig, RoleName

#: Work for devices waits in most of a window.
_MOST = 0.5


@dataclass(frozen=True, slots=True)
class RoleUse:
    """How a device was used over a window.

    Fields:
        computed: Share of the time in which it computed, 0 to 1: its load by prompts.
        taken: Mean share of its pages, or of its places in steps, that was taken: its load by what decodes.
    """

    device: str
    role: RoleName
    computed: float
    taken: float

    def load(self, phase: PathPhase) -> float:
        return self.computed if phase == "prompts" else self.taken


@dataclass(frozen=True, slots=True)
class RoleChoice:
    """A device that is to get another role.

    Fields:
        cause: TI-25 for a prefill device, TI-26 for one that decodes.
        load: Its load.
        rest: Mean load of the other devices of its role with what it leaves to them.
        pressed: Mean load of the devices that it is to help.
        waited: Share of the window in which work for them waited.
    """

    device: str
    role: RoleName
    cause: str
    load: float
    rest: float
    pressed: float
    waited: float


def choose_role_change(
    uses: Sequence[RoleUse],
    waited: Mapping[PathPhase, float],
    config: RoleChangeConfig,
    possible: Callable[[str, RoleName], bool],
) -> RoleChoice | None:
    """Return the device that changes, and to what; None if none does.

    Args:
        uses: Each living device.
        waited: By phase, the share of the window in which work waited for devices that run it.
        config: Limits of loads.
        possible: Returns whether a device may get a role: every served chain keeps all phases.
    """
    apart = [use for use in uses if use.role != "both"]
    for use in sorted(apart, key=lambda use: (use.load(_phase(use.role)), use.device)):
        wanted: RoleName = "decode" if use.role == "prefill" else "prefill"
        own, needed = _phase(use.role), _phase(wanted)
        load, loads, pressed = use.load(own), _loads(uses, own), _loads(uses, needed)
        if len(loads) < 2 or not pressed:
            continue
        rest, need = sum(loads) / (len(loads) - 1), sum(pressed) / len(pressed)
        if load >= config.idle if config.watch == "idle" else rest >= config.spare:
            continue
        if need < config.busy and waited.get(needed, 0.0) < _MOST:
            continue
        if possible(use.device, wanted):
            cause = "TI-25" if use.role == "prefill" else "TI-26"
            return RoleChoice(use.device, wanted, cause, load, rest, need, waited.get(needed, 0.0))
    return None


def _phase(role: RoleName) -> PathPhase:
    return "prompts" if role == "prefill" else "decodes"


def _loads(uses: Sequence[RoleUse], phase: PathPhase) -> list[float]:
    """Return the loads of the devices that run a phase."""
    return [use.load(phase) for use in uses if ROLES[use.role].admits(phase)]
