"""Change the roles of devices while they serve (TI-27): nothing is loaded again, restarted or lost.

    SetRoles -> checked, with nothing changed where it cannot be -> roles, and with them where paths may pass
        what computes its context or decodes there finishes there; what waits for its hand-off goes on or decodes there

Contract: every SetRoles is answered by one RolesChanged. After an accepted one each served chain has all of its blocks
on devices for prompts, and on devices that decode. Stages that paths of a phase now need first are requested at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from runtime.control.scheduler_io import SetRoles
from runtime.exclusions import without_roles
from runtime.policy.roles.role import BOTH, ROLES, missing_phase
from runtime.scheduler.sequences.lifecycle import SequenceLifecycle
from runtime.scheduler.state import ClusterState


class RoleChanges:
    """Carry out changes of roles."""

    def __init__(self, state: ClusterState, seating: SequenceLifecycle) -> None:
        self._state = state
        self._seating = seating

    def change(self, event: SetRoles, now: int) -> None:
        """Give devices other roles, or answer why that cannot be."""
        roles = dict(event.roles)
        why = self.why_not(roles)
        self._state.out.roles_changed(why or "")
        if why is None:
            self.apply(roles, "TI-27", now)

    def apply(self, roles: Mapping[str, str], cause: str, now: int, drained: int = 0) -> None:
        """Give devices other roles, which `why_not` has nothing against.

        `cause`: for the trace; `drained`: ns since the devices got nothing new.
        """
        state = self._state
        for device, name in roles.items():
            was = state.devices.roles[device].name
            state.tell.control(now, "role.flip", cause, device, role=name, was=was, drained=drained)
        state.counters.role_changes += len(roles)
        state.devices.roles.change(roles)
        state.changed = True
        for sequence in state.running.values():
            if state.router.admits(sequence.chain, sequence.path, "decodes"):  # it may end there after all
                sequence.place.most = self._seating.limit_on(sequence, sequence.path)
        for chain in state.chains.values():
            for path in state.router.first_paths(chain, state.devices.loads) if state.devices.roles.apart else ():
                for device, stage in state.router.missing(chain, path or ()):
                    state.ask_for(chain, device, stage)

    def why_not(self, roles: Mapping[str, str]) -> str | None:
        """Return why devices cannot get these roles, None if they can."""
        state = self._state
        if unknown := [name for name in roles if state.devices.get(name) is None]:
            known = sorted(device.name for device in state.devices)
            return f"there is no agent {unknown[0]!r}; there are {', '.join(known)}"
        if wrong := [name for name in roles.values() if name not in ROLES]:
            return f"{wrong[0]!r} is no role; they are {', '.join(ROLES)}"
        staying = {device.name: device for device in state.devices if not device.final}
        after = {name: ROLES[roles[name]] if name in roles else state.devices.roles[name] for name in staying}
        if all(role == BOTH for role in after.values()):
            return None
        if (why := without_roles(state.config)) is not None:
            return why
        if any(device.copies for device in staying.values()):
            return "K and V of the dense executor stay on their device, which runs everything"
        if state.config.residency == "swap" and any(device.plan.limit for device in staying.values()):
            return "models are loaded by demand, and a hand-off might find none: start with --residency fixed"
        served = [chain for chain in state.chains.values() if state.block_map.why_not(chain) is None]
        instances = state.block_map.instances
        return missing_phase(
            {chain.model: [instances.get(use.block, ()) for use in chain.uses] for chain in served}, after
        )
