"""Sequences come to devices and leave them: tables, pages and places, all or none. The one way in and the ways out.

    refuse      never taken             seat     onto a path, with pages for what it has
    preempt     off its path, waits     end      the last event            leave     behind its last token

Contract: whoever leaves gives back all that it had, wherever it was; every sequence has one last event. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from runtime.agent.events import end_event, refusal_event
from runtime.kv.pages import groups_for
from runtime.scheduler.members import Member
from runtime.scheduler.speculation import Planned
from runtime.scheduler.state import ClusterState
from runtime.stages import Path
from runtime.types import FinishReason, ModelSpec, SequenceRequest


class Seating:
    """`on_leaving`: called with whoever leaves its devices, before it has. `predict`: what is predicted of a sequence along a path."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self.on_leaving: Callable[[Member], None] = lambda member: None
        self.predict: Callable[[Member, Path], Planned | None] = lambda member, path: None

    def refuse(self, request: SequenceRequest, why: str, now: int) -> None:
        self._state.tally.finished["error"] += 1
        self._state.tell.ended(now, request, "error", 0)
        self._state.out.events.append(refusal_event(request, why))

    def seat(self, member: Member, path: Path, now: int) -> None:
        """From waiting to running, along this path. Its first row may be issued."""
        state = self._state
        state.waiting.remove(member)
        state.running[member.seq] = member
        self._put(member, path)
        planned = self.predict(member, path)
        if planned is not None:
            member.predicted(planned.ahead, planned.device, planned.pages)
        member.holds(groups_for(member.spec, member.tokens))
        state.devices.take(member.weights, member.groups)
        for name in sorted(member.devices):
            state.devices.enter(name)
            state.out.open(name, member)
        state.tell.inserted(now, member.request, member.phase, member.tokens)
        state.ready.append(member)

    def reseat(self, member: Member, path: Path) -> None:
        """A running sequence goes on along another path; what it has there is in place. Whom it leaves forgets it."""
        state, before, epoch = self._state, member.devices, member.epoch
        state.devices.give_back(member.weights, member.groups)
        self._put(member, path)
        state.devices.take(member.weights, member.groups)
        for name in sorted(member.devices - before):
            state.devices.enter(name)
        for name in sorted(member.devices):
            state.out.open(name, member, keep=True)
        for name in sorted(before - member.devices):
            self._depart(name, member, epoch)

    def preempt(self, member: Member, now: int) -> None:
        """Take a sequence off its devices; it waits, and will run again from its prompt and output."""
        self._state.tally.preemptions += 1
        self._state.tell.preempted(now, member.request, len(member.output))
        self._unseat(member)
        member.restart()
        self._state.waiting.add(member)

    def end(self, member: Member, reason: FinishReason, now: int, error: str | None = None) -> None:
        """End a sequence without a token."""
        self._state.out.events.append(end_event(member, reason, error, member.served))
        self.leave(member, reason, now)

    def leave(self, member: Member, reason: FinishReason, now: int) -> None:
        """Its last event has been told."""
        state = self._state
        state.tally.finished[reason] += 1
        del state.members[member.seq]
        state.users[member.chain.loaded_as] -= 1
        state.changed |= member.chain.loaded_as in state.leaving
        if member.seq in state.running:
            self._unseat(member)
        else:
            state.waiting.remove(member)
        state.tell.ended(now, member.request, reason, len(member.output))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _unseat(self, member: Member) -> None:
        state = self._state
        del state.running[member.seq]
        state.starved.pop(member.seq, None)
        self.on_leaving(member)
        state.devices.give_back(member.weights, member.groups)
        for name in sorted(member.devices):
            self._depart(name, member, member.epoch)
        member.unseated()
        state.changed = True

    def _depart(self, name: str, member: Member, epoch: int) -> None:
        if self._state.devices.alive(name):
            self._state.devices.depart(name)
            self._state.out.close(name, member.seq, epoch)

    def _put(self, member: Member, path: Path) -> None:
        provision = self._state.provision
        weights = provision.weights(path)
        member.seated(provision.passes(member.chain, path), weights, self._capped(member.chain.spec, weights))

    def _capped(self, spec: ModelSpec, weights: tuple[tuple[str, int], ...]) -> ModelSpec:
        """A model with a context that this path can hold for one sequence alone."""
        fits = min((self._state.devices[name].capacity // pages * spec.page_tokens for name, pages in weights), default=0)
        limit = min(spec.max_model_len, fits - spec.virtual_tokens) if weights else spec.max_model_len
        return spec if limit == spec.max_model_len else replace(spec, max_model_len=limit)
