"""Pause sequences that wait for a tool or a user: they keep their K and V, and get no rows until they resume (BL-17).

Contract: a pause begins after the row in flight, and has no end of its own. While it lasts, `look` asks
`policy.migration.paused` whether the sequence's K and V should move to a device with more room: only from one with
little free memory, and only within the pause.
"""

from __future__ import annotations

from runtime.policy.migration.paused import PausedSequence as Waiting
from runtime.policy.migration.paused import foresee
from runtime.scheduler.controllers.actions import Actions, MoveRequest, holders, runs
from runtime.scheduler.devices.devices import Device
from runtime.scheduler.migration.estimate import move_seconds
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

_MS = 1_000_000


class Pauses:
    """Paused sequences, and the migration of their K and V where `ControlConfig.proactive` is set."""

    def __init__(self, state: ClusterState, actions: Actions) -> None:
        self._state = state
        self._actions = actions
        config = state.config.control
        self._proactive, self._low = config.proactive, config.low
        self._patience = config.migration_timeout_ms * _MS
        self._paused: dict[str, Waiting] = {}
        self._again: dict[str, int] = {}

    def pause(self, seq: str, expected: int | None, now: int) -> None:
        """Stop issuing rows of a sequence. `expected`: length of the pause in ns, None if unknown."""
        sequence = self._state.sequences.get(seq)
        if sequence is not None and sequence.waits.paused is None:
            self._set(sequence, now)
            self._state.starved.pop(seq, None)
            self._paused[seq] = Waiting(seq, now, expected)
            self._state.tell.control(now, "pause", "BL-17", "", seq=seq)

    def resume(self, seq: str, now: int) -> None:
        """Let a paused sequence continue."""
        sequence = self._state.sequences.get(seq)
        self._remove_sequence(seq)
        if sequence is not None and sequence.waits.paused is not None:
            self._set(sequence, None)
            self._state.tell.control(now, "resume", "BL-17", "", seq=seq)
            if sequence.path:
                self._state.ready.append(sequence)

    def look(self, now: int) -> None:
        """Decide for each paused sequence that is due whether to migrate it. `now`: ns."""
        for seq, waiting in tuple(self._paused.items()):
            sequence = self._state.sequences.get(seq)
            if sequence is None:
                self._remove_sequence(seq)
            elif self._proactive and sequence.path and now >= self._again.get(seq, 0) and not self._actions.wished(seq):
                self._foresee(sequence, waiting, now)

    def _foresee(self, sequence: ScheduledSequence, waiting: Waiting, now: int) -> None:
        short = max((self._state.devices[hop.device] for hop in sequence.path), key=lambda device: device.pages.share)
        part = next(runs(sequence, short.name, {use.block for use in sequence.chain.uses}), None)
        if part is None or short.pages.share <= self._low or sequence.waits.move or sequence.flying:
            return
        uses = sequence.chain.uses[part.start : part.stop]
        pages = sequence.pages.groups * sum(use.kv_layers for use in uses)
        target = self._roomier(short, tuple(use.block for use in uses), pages)
        if target is None:
            return
        needed = move_seconds(self._state, sequence, uses, short.name, target.name, copy=True, recompute=True)
        seen = foresee(waiting, int(needed * 1e9), now)
        if not seen.migrate:
            self._again[sequence.seq] = seen.again or now
            return
        self._state.tell.control(
            now, "migrate.ahead", "BL-17", target.name, uses[0].block, seq=sequence.seq, needed=seen.needed
        )
        blocks = frozenset(use.block for use in uses)
        self._actions.move_request(
            MoveRequest(sequence.seq, blocks, short.name, target.name, now + self._patience, "BL-17")
        )

    def _roomier(self, source: Device, blocks: tuple[str, ...], pages: int) -> Device | None:
        """Return a device that would have a smaller share of its memory in use even with these pages, or None."""
        others = [
            each
            for each in holders(self._state, blocks, source.name)
            if each is not source and each.pages.capacity - each.pages.used_pages >= pages
        ]
        found = min(others, key=lambda each: (each.pages.share, each.passing.count), default=None)
        if found is None or (found.pages.used_pages + pages) / max(found.pages.capacity, 1) >= source.pages.share:
            return None
        return found

    def _set(self, sequence: ScheduledSequence, paused: int | None) -> None:
        """Set or clear the pause of a sequence; one that waits is moved in the waiting queue."""
        state, waits = self._state, sequence.seq not in self._state.running
        if waits:
            state.waiting.remove(sequence)
        sequence.pause(paused)
        if waits:
            state.waiting.add(sequence)
            state.changed = True

    def _remove_sequence(self, seq: str) -> None:
        self._paused.pop(seq, None)
        self._again.pop(seq, None)
