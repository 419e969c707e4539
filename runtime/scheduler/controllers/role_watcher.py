"""Change roles of devices as their use changes (TI-24 to TI-26).

    serving -> leaving: nothing new comes, what runs there ends or moves away -> the other role
                        too late, dead, or not possible any more             -> it keeps its role

Contract:
- `look` is called on every tick; off, it does nothing. Use is measured over a window that begins anew with every change
  of a role, by hand too, and whenever a device comes or goes.
- One device at a time leaves its role, and only if each served chain keeps all phases without it (`RoleChanges`).
- A device that ran prompts decodes once no context is computed there and no K and V are on their way from it or to it
  (UN-08). What waits there for its hand-off decodes there then: waiting for room elsewhere is why the role changes.
- A device that decoded runs prompts once no sequence is there. Sequences move to devices that still decode.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from runtime.policy.roles.flips import RoleUse, choose_role_change
from runtime.policy.roles.role import PathPhase
from runtime.role_config import RoleName
from runtime.scheduler.controllers.actions import Actions, MoveRequest, elsewhere, runs
from runtime.scheduler.devices.devices import Device
from runtime.scheduler.handoff.role_changes import RoleChanges
from runtime.scheduler.migration.migration import Moves
from runtime.scheduler.state import ClusterState

_MS = 1_000_000
#: Samples of a window.
_SAMPLES = 20


@dataclass(frozen=True, slots=True)
class _UseSample:
    """One look at the devices, by name.

    Fields:
        busy: Total ns in steps.
        taken: Share of pages, or of places in steps, that is taken.
        waits: The phases for which work waits.
    """

    at: int
    busy: Mapping[str, int]
    taken: Mapping[str, float]
    waits: Mapping[PathPhase, bool]


class RoleWatcher:
    """Watch how devices are used, and change roles."""

    def __init__(self, state: ClusterState, roles: RoleChanges, actions: Actions, moves: Moves) -> None:
        self._state, self._roles, self._actions, self._moves = state, roles, actions, moves
        self._config = state.config.role_changes
        self._window, self._drain = self._config.window_ms * _MS, self._config.drain_ms * _MS
        self._samples: deque[_UseSample] = deque(maxlen=_SAMPLES + 1)
        self._changes = 0
        self._since = 0

    def look(self, now: int) -> None:
        """Measure, let a device leave its role, or change it. `now`: ns."""
        roles = self._state.devices.roles
        if self._config.watch == "off" or not roles.apart:
            return
        if roles.changes != self._changes:
            self._changes = roles.changes
            self._samples.clear()
        for name, role in tuple(roles.leaving.items()):
            self._continue_change(name, role, now)
        if not roles.leaving and self._sample(now):
            self._choose(now)

    # -- internals -----------------------------------------------------------------------------------------------------

    def _sample(self, now: int) -> bool:
        """Measure where it is time to; return whether a window is full."""
        state, samples = self._state, self._samples
        if samples and now - samples[-1].at < self._window // _SAMPLES:
            return False
        living, places = state.devices.living, state.config.max_num_seqs
        busy = {name: device.work.busy for name, device in living.items()}
        taken = {name: max(each.pages.share, each.passing.count / places) for name, each in living.items()}
        if samples and not (
            samples[-1].busy.keys() == busy.keys() and all(busy[name] >= was for name, was in samples[-1].busy.items())
        ):
            samples.clear()
        samples.append(
            _UseSample(now, busy, taken, {"prompts": len(state.waiting) > 0, "decodes": bool(state.awaited)})
        )
        return len(samples) > 1 and now - samples[0].at >= self._window

    def _choose(self, now: int) -> None:
        first, last = self._samples[0], self._samples[-1]
        roles, span = self._state.devices.roles, last.at - first.at
        count = len(self._samples)
        uses = [
            RoleUse(
                name, roles[name].name, min((busy - first.busy[name]) / span, 1.0),
                sum(each.taken[name] for each in self._samples) / count,
            )
            for name, busy in last.busy.items()
        ]  # fmt: skip
        phases: tuple[PathPhase, ...] = ("prompts", "decodes")
        waited = {phase: sum(sample.waits[phase] for sample in self._samples) / count for phase in phases}
        choice = choose_role_change(uses, waited, self._config, self._is_possible)
        if choice is not None:
            self._since = now
            roles.leaving[choice.device] = choice.role
            self._state.tell.control(
                now, "role.leave", choice.cause, choice.device, role=choice.role, load=choice.load, rest=choice.rest,
                pressed=choice.pressed, waited=choice.waited,
            )  # fmt: skip

    def _is_possible(self, device: str, role: RoleName) -> bool:
        return bool(self._state.devices[device].plan.blocks) and self._roles.why_not({device: role}) is None

    def _continue_change(self, name: str, role: RoleName, now: int) -> None:
        """Change the role of a device on which nothing of its old one is left, or let it keep that."""
        device = self._state.devices[name]
        why = "it is dead" if not device.alive else self._roles.why_not({name: role})
        if why is None and not self._is_drained(device, role):
            if now - self._since <= self._drain:
                if role == "prefill":
                    self._move_away(device, now)
                return
            why = f"{device.passing.count} sequences have not left it in time"
        cause = "TI-25" if role == "decode" else "TI-26"
        if why is None:
            self._roles.apply({name: role}, cause, now, now - self._since)
            return
        del self._state.devices.roles.leaving[name]
        self._samples.clear()
        self._state.changed = True
        self._state.tell.control(now, "role.keep", cause, name, error=why)

    def _is_drained(self, device: Device, role: RoleName) -> bool:
        """Return whether nothing is left of what a device may not run in its next role (UN-08)."""
        if any(device.name in (part.source, part.target) for move in self._moves for part in move.parts):
            return False
        if role == "prefill":
            return not device.passing.expected
        return all(sequence.phase == "decode" for sequence in device.passing.here.values())

    def _move_away(self, device: Device, now: int) -> None:
        """Request that sequences move to other devices that decode, where there are any with their blocks."""
        until = self._since + self._drain
        for sequence in device.passing.here.values():
            if sequence.waits.move or self._actions.wished(sequence.seq):
                continue
            for part in runs(sequence, device.name, device.plan.blocks):
                if (found := elsewhere(self._state, sequence.chain, part, device.name)) is not None:
                    blocks = frozenset(sequence.chain.uses[at].block for at in part)
                    self._actions.move_request(
                        MoveRequest(sequence.seq, blocks, device.name, found.name, until, "TI-26")
                    )
                    break
