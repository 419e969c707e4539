"""Bring sequences to devices and take them away: tables, pages and slots, all of them or none.

    refuse      never admitted              seat     onto a path, with pages for its context
    preempt     off its path, to wait       end      the last event            leave     after its last token

Contract: a sequence that leaves gives back everything it had, on every device; every sequence has exactly one last
event. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from runtime.chains import Path
from runtime.control.token_events import end_event, refusal_event
from runtime.kv.pages import groups_for
from runtime.scheduler.kv.prefix_cache import PrefixCache
from runtime.scheduler.kv.prefix_index import CachedPrefix, PrefixMatch
from runtime.scheduler.routing.route_cache import Route
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.speculation.speculation import Planned
from runtime.scheduler.state import ClusterState
from runtime.types import FinishReason, ModelSpec, SequenceRequest


@dataclass(frozen=True, slots=True)
class SharingCounts:
    """Totals since the beginning: sequences that started from cached pages, their tokens that were not computed,
    and all tokens for which cached pages were looked up."""

    matches: int = 0
    tokens: int = 0
    queried: int = 0


@dataclass(frozen=True, slots=True)
class Hooks:
    """What other mechanisms have to say when a sequence comes and leaves. `predict`: the hop of it that is
    predicted along a path; `offer`: hops of a route that other devices may take, too; `leaving`: it leaves its
    devices, and has not yet."""

    predict: Callable[[ScheduledSequence, Path], Planned | None]
    offer: Callable[[ScheduledSequence, Route], Mapping[int, tuple[str, ...]]]
    leaving: Callable[[ScheduledSequence], None]


class SequenceLifecycle:
    """`donors`: ended sequences that stay."""

    def __init__(self, state: ClusterState, donors: PrefixCache, hooks: Hooks) -> None:
        self._state = state
        self.donors = donors
        self._shares = state.config.prefix_caching != "off"
        self._hooks = hooks

    def refuse(self, request: SequenceRequest, why: str, now: int) -> None:
        self._state.tally.finished["error"] += 1
        self._state.tell.sequence_ended(now, request, "error", 0)
        self._state.out.events.append(refusal_event(request, why))

    def sharing(self) -> SharingCounts:
        return SharingCounts(
            self._state.tally.shared, self._state.tally.shared_tokens, self._state.tally.prefix_queries
        )

    def seat(self, member: ScheduledSequence, route: Route, now: int, match: PrefixMatch | None = None) -> None:
        """From waiting to running, along this path. Its first row may be issued. `match`: what another has of its
        beginning there.
        """
        state = self._state
        state.waiting.remove(member)
        state.running[member.seq] = member
        self._put(member, route)
        planned = self._hooks.predict(member, route.path) if match is None else None
        if planned is not None:
            member.predict(planned.ahead, planned.device, planned.pages)
        elif match is None:
            member.offer(self._hooks.offer(member, route))
        member.holds(groups_for(member.spec, member.tokens))
        if self._shares:
            self._state.tally.prefix_queries += member.tokens
        shared = self._allocate_pages(member, match, planned, now)
        for name in sorted(member.place.devices):
            state.devices.enter(name, member)
            state.out.open(name, member, shared=shared)
        for name in sorted(member.offered.devices):
            state.devices[name].passing.asked.add(member.seq)
            state.out.open(name, member)
        state.tell.inserted(now, member.request, member.phase, member.tokens)
        state.ready.append(member)

    def reseat(self, member: ScheduledSequence, path: Path) -> None:
        """A running sequence goes on along another path; what it has there is in place. Whom it leaves forgets it."""
        state, before, epoch = self._state, member.place.devices, member.epoch
        self.hide(member)
        self._put(member, state.router.along(member.chain, path))
        state.ledger.rehouse(member.pages.holding, member.place.passes.places)
        self.show(member)
        for name in sorted(member.place.devices - before):
            state.devices.enter(name, member)
        for name in sorted(member.place.devices):
            state.out.open(name, member, keep=True)
        for name in sorted(before - member.place.devices):
            self._depart(name, member, epoch)

    def settle(self, member: ScheduledSequence, at: int, device: str) -> None:
        """It is known who runs a hop of it, under the same epoch: the others' pages are free."""
        state, before = self._state, member.path[at].device
        path = (*member.path[:at], replace(member.path[at], device=device), *member.path[at + 1 :])
        candidates = member.offered.hops[at]
        others = [each for each in candidates if each != device]
        member.offered = member.offered.settled(at)
        for name in candidates:
            state.devices[name].passing.asked.discard(member.seq)
        route = state.router.along(member.chain, path)
        state.used_paths.remove_sequence(member.place.passes)
        member.place.passes = state.used_paths.along(member.chain, path)
        state.used_paths.enter(member.place.passes)
        member.path, member.place.devices = path, frozenset(route.devices)
        member.place.weights = route.weights + member.spare
        state.ledger.rehouse(member.pages.holding, (*member.place.passes.places, *member.spare))
        if device != before:
            state.devices.enter(device, member)
            state.devices.depart(before, member)
        for name in others:
            state.out.close(name, member.seq, member.epoch)
        state.changed = True
        self.show(member)

    def narrow(self, member: ScheduledSequence, device: str) -> None:
        """A device that might have taken a hop of it is gone; others are left."""
        member.offered = member.offered.without(device)
        member.place.without(device)
        self._state.ledger.bereft(member.pages.holding, device)

    def show(self, member: ScheduledSequence) -> None:
        """What is computed of its beginning may be found from now on."""
        spec = member.spec
        if not self._shares or spec.virtual_tokens or member.shared.tentative or member.offered.hops:
            return
        groups = member.computed // spec.page_tokens
        if not groups or (member.shared.beginning is not None and member.shared.beginning.known >= groups):
            return
        marks = member.mark()  # first: they may be the first ones, of a sequence that was not to share
        if member.shared.beginning is None:
            shelf = self._state.prefixes.shelf(member.realm, member.path)
            member.shared.beginning = CachedPrefix(member.seq, member.pages.holding, marks, shelf)
        self._state.prefixes.reaches(member.shared.beginning, min(groups, len(marks)))

    def hide(self, member: ScheduledSequence) -> None:
        """It may not be found any more."""
        if member.shared.beginning is not None:
            self._state.prefixes.remove_prefix(member.shared.beginning)
            member.shared.beginning = None

    def shortens(self, member: ScheduledSequence, path: Path) -> bool:
        """Whether a running sequence's answer could not become as long along another path as it may on its own."""
        spec = self._capped(member.chain.spec, self._state.router.along(member.chain, path).weights)
        return member.most_on(spec) < member.place.most

    def grow(self, member: ScheduledSequence, groups: int) -> None:
        """So many page groups more on each device of its path."""
        self._state.ledger.grow(member.pages.holding, groups)
        member.holds(member.pages.groups + groups)
        self.show(member)

    def preempt(self, member: ScheduledSequence, now: int) -> None:
        """Take a sequence off its devices; it waits, and will run again from its prompt and output."""
        self._state.tally.preemptions += 1
        self._state.tell.preempted(now, member.request, len(member.output))
        self._unseat(member)
        member.restart()
        self._state.waiting.add(member)

    def end(self, member: ScheduledSequence, reason: FinishReason, now: int, error: str | None = None) -> None:
        """End a sequence without a token."""
        self._state.out.events.append(end_event(member, reason, error, member.served))
        self.end_sequence(member, reason, now)

    def end_sequence(self, member: ScheduledSequence, reason: FinishReason, now: int) -> None:
        """Its last event has been told."""
        state = self._state
        state.tally.finished[reason] += 1
        del state.members[member.seq]
        state.users[member.chain.loaded_as] -= 1
        state.changed |= member.chain.loaded_as in state.leaving
        if member.seq in state.running:
            if reason in ("stop", "length"):
                self.show(member)
                self.donors.add_sequence(member, now)
            self._unseat(member)
        else:
            state.waiting.remove(member)
        state.tell.sequence_ended(now, member.request, reason, len(member.output))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _unseat(self, member: ScheduledSequence) -> None:
        state = self._state
        del state.running[member.seq]
        state.starved.pop(member.seq, None)
        self._hooks.leaving(member)
        self.hide(member)
        state.ledger.free(member.pages.holding)
        for name in sorted(member.place.devices):
            self._depart(name, member, member.epoch)
        for name in sorted(member.offered.devices):
            state.devices[name].passing.asked.discard(member.seq)
            if state.devices.alive(name):
                state.out.close(name, member.seq, member.epoch)
        self._state.used_paths.remove_sequence(member.place.passes)
        member.unseated()
        state.changed = True

    def _allocate_pages(
        self, member: ScheduledSequence, match: PrefixMatch | None, planned: Planned | None, now: int
    ) -> tuple[str, int] | None:
        """Pages for all that it has; with a match its first ones are another's. Whose, and how many tokens of them."""
        ledger, places = self._state.ledger, member.place.passes.places
        if match is None:
            stand_in = member.spare if planned is None else ((planned.device, planned.pages),)
            member.pages.holding = ledger.allocate((*places, *stand_in), member.pages.groups)
            return None
        other, tokens = match.beginning, match.groups * member.spec.page_tokens
        copies = any(self._state.devices[name].copies for name in member.place.devices)
        member.pages.holding = (
            ledger.allocate(places, member.pages.groups)
            if copies
            else ledger.allocate(places, member.pages.groups, other.holding, match.groups)
        )
        member.computed = tokens
        self._state.tally.shared += 1
        self._state.tally.shared_tokens += tokens
        self.donors.used(other, now)
        self.show(member)
        self._state.tell.shared(
            now, member.request, other.name, tokens, match.groups * sum(pages for _, pages in member.place.weights)
        )
        return other.name, tokens

    def _depart(self, name: str, member: ScheduledSequence, epoch: int) -> None:
        if self._state.devices.alive(name):
            self._state.devices.depart(name, member)
            self._state.out.close(name, member.seq, epoch)

    def _put(self, member: ScheduledSequence, route: Route) -> None:
        if member.path:
            self._state.used_paths.remove_sequence(member.place.passes)
        passes = self._state.used_paths.along(member.chain, route.path)
        member.seated(passes, route.weights, self._capped(member.chain.spec, route.weights))
        self._state.used_paths.enter(member.place.passes)

    def _capped(self, spec: ModelSpec, weights: tuple[tuple[str, int], ...]) -> ModelSpec:
        """A model with a context that this path can hold for one sequence alone."""
        fits = min(
            (self._state.devices[name].pages.capacity // pages * spec.page_tokens for name, pages in weights), default=0
        )
        limit = min(spec.max_model_len, fits - spec.virtual_tokens) if weights else spec.max_model_len
        return spec if limit == spec.max_model_len else replace(spec, max_model_len=limit)
