"""Place sequences on devices and remove them: tables, pages and batch slots, all of them or none.

    refuse              answer a request that is not admitted
    seat, reseat        place a waiting sequence on a path; move a running one to another path
    settle, narrow      record the winner, or the death of a candidate, of an offered hop (BL-23)
    grow                take more pages
    show, hide          add a sequence to the prefix index, or remove it
    preempt             take a sequence off its path; it waits
    end, end_sequence   end a sequence with an event without a token; after its last token

A sequence that leaves gives back all that it had, on every device. Every sequence has exactly one last event. This
module carries out what other mechanisms decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from runtime.chains import Path
from runtime.control.token_events import end_event, refusal_event
from runtime.messages import LengthsProbed
from runtime.policy.lengths.forecast import LengthForecast
from runtime.scheduler.kv.page_accounting import PageHolding
from runtime.scheduler.kv.prefix_cache import PrefixCache
from runtime.scheduler.kv.prefix_index import CachedPrefix, PrefixMatch
from runtime.scheduler.routing.route_cache import Route
from runtime.scheduler.sequences.page_taking import PageTaking
from runtime.scheduler.sequences.parts import Swapped
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.speculation.speculation import Planned
from runtime.scheduler.state import ClusterState
from runtime.types import FinishReason, ModelSpec, SequenceRequest


@dataclass(frozen=True, slots=True)
class SharingCounts:
    """Totals of prefix sharing since the start.

    Fields:
        matches: Sequences that started from cached pages.
        tokens: Tokens of these sequences that were not computed.
        queried: Tokens of all sequences for which cached pages were looked up.
    """

    matches: int = 0
    tokens: int = 0
    queried: int = 0


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callbacks of other mechanisms, called when a sequence is placed on a path or leaves it.

    Fields:
        predict: Returns the hop of a sequence along this path that is predicted, or None.
        offer: Returns the hops of a route that other devices may take too, each with its candidates.
        leaving: Called before a sequence leaves its devices.
    """

    predict: Callable[[ScheduledSequence, Path], Planned | None]
    offer: Callable[[ScheduledSequence, Route], Mapping[int, tuple[str, ...]]]
    leaving: Callable[[ScheduledSequence], None]


class SequenceLifecycle:
    """Place sequences on paths, grow them, and remove them. `prefix_cache`: prefixes of ended sequences."""

    def __init__(self, state: ClusterState, prefix_cache: PrefixCache, hooks: Hooks) -> None:
        self._state = state
        self.prefix_cache = prefix_cache
        self._shares = state.config.prefix_caching != "off"
        self._hooks = hooks
        self._page_taking = PageTaking(state, prefix_cache)

    def refuse(self, request: SequenceRequest, why: str, now: int) -> None:
        """Emit the only event of a request that is not admitted: an error with this reason."""
        self._state.counters.finished["error"] += 1
        self._state.tell.sequence_ended(now, request, "error", len(request.output))
        self._state.out.events.append(refusal_event(request, why))

    def sharing(self) -> SharingCounts:
        """Return the totals of prefix sharing."""
        return SharingCounts(
            self._state.counters.shared, self._state.counters.shared_tokens, self._state.counters.prefix_queries
        )

    def seat(self, sequence: ScheduledSequence, route: Route, now: int, match: PrefixMatch | None = None) -> None:
        """Move a waiting sequence to running on a route, with pages and open tables; its first row may be issued.

        `match`: a prefix of it that another sequence has computed along this path.
        """
        state = self._state
        state.waiting.remove(sequence)
        state.running[sequence.seq] = sequence
        self._put(sequence, route)
        kept = sequence.swapped
        if kept is not None and (kept.path != route.path or not self._continues(sequence, kept, match)):
            state.swapping.drop_copy(sequence)  # it is computed again, or begins with more than that
        returns = sequence.swapped is not None
        planned = self._hooks.predict(sequence, route.path) if match is None and not returns else None
        if planned is not None:
            sequence.predict(planned.ahead, planned.device, planned.pages)
        elif match is None and not returns:
            sequence.offer(self._hooks.offer(sequence, route))
        sequence.holds(state.limits.first_groups(sequence.spec, sequence.tokens, sequence.place.weights))
        if self._shares:
            self._state.counters.prefix_queries += sequence.tokens
        start = self._page_taking.take_pages(sequence, match, planned, now)
        if not returns and not sequence.output:
            sequence.cached = 0 if start.shared is None else min(start.shared[1], len(sequence.request.prompt))
        swapped = state.swapping.begin_return(sequence, now)
        self.show(sequence)
        saves = () if returns else state.prompts.saves(sequence, start.entry)
        for name in sorted(sequence.place.devices):
            state.devices.enter(name, sequence)
            state.out.open(name, sequence, shared=start.shared, entry=start.entry, saves=saves, swapped=swapped)
        for name in sorted(sequence.offered.devices):
            state.devices[name].passing.asked.add(sequence.seq)
            state.out.open(name, sequence)
        state.tell.inserted(now, sequence.request, sequence.phase, sequence.tokens)
        if state.devices.roles.apart:
            state.tell.phase(now, sequence.request, "prefill", sequence.place.devices)
        if state.order is not None:
            state.order.record_start(sequence, now)
        state.ready.append(sequence)

    def reseat(self, sequence: ScheduledSequence, path: Path, there: PageHolding | None = None) -> None:
        """Move a running sequence to another path that has its K and V already; close it on the devices it leaves.

        `there`: its pages on the path that other sequences have, too.
        """
        state, before, epoch = self._state, sequence.place.devices, sequence.epoch
        self.hide(sequence)
        self._put(sequence, state.router.along(sequence.chain, path))
        state.page_accounting.rehouse(sequence.pages.holding, sequence.place.path_usage.places, there)
        self.show(sequence)
        for name in sorted(sequence.place.devices - before):
            state.devices.enter(name, sequence)
        for name in sorted(sequence.place.devices):
            state.out.open(name, sequence, keep=True)
        for name in sorted(before - sequence.place.devices):
            self._depart(name, sequence, epoch)

    def settle(self, sequence: ScheduledSequence, at: int, device: str) -> None:
        """Record which device runs an offered hop, under the same epoch, and free the pages of the other candidates."""
        state, before = self._state, sequence.path[at].device
        path = (*sequence.path[:at], replace(sequence.path[at], device=device), *sequence.path[at + 1 :])
        candidates = sequence.offered.hops[at]
        others = [each for each in candidates if each != device]
        sequence.offered = sequence.offered.settled(at)
        for name in candidates:
            state.devices[name].passing.asked.discard(sequence.seq)
        route = state.router.along(sequence.chain, path)
        state.used_paths.remove_sequence(sequence.place.path_usage)
        sequence.place.path_usage = state.used_paths.along(sequence.chain, path)
        state.used_paths.enter(sequence.place.path_usage)
        sequence.path, sequence.place.devices = path, frozenset(route.devices)
        sequence.place.weights = route.weights + sequence.spare
        state.page_accounting.rehouse(sequence.pages.holding, (*sequence.place.path_usage.places, *sequence.spare))
        if device != before:
            state.devices.enter(device, sequence)
            state.devices.depart(before, sequence)
        for name in others:
            state.out.close(name, sequence.seq, sequence.epoch)
        state.changed = True
        self.show(sequence)

    def narrow(self, sequence: ScheduledSequence, device: str) -> None:
        """Remove a dead device that is not on the path from the candidates of a sequence's offered hop."""
        sequence.offered = sequence.offered.without(device)
        sequence.place.without(device)
        self._state.page_accounting.bereft(sequence.pages.holding, device)

    def show(self, sequence: ScheduledSequence) -> None:
        """Publish the computed full page sets of a sequence in the prefix index, unless it may not share."""
        spec = sequence.spec
        if not self._shares or spec.virtual_tokens or sequence.shared.tentative or sequence.offered.hops:
            return
        if sequence.scattered:
            return  # its path does not have all of it
        if sequence.swapped is not None:
            return  # its K and V are on their way back
        groups = sequence.computed // spec.page_tokens
        if not groups or (sequence.shared.prefix is not None and sequence.shared.prefix.known >= groups):
            return
        marks = sequence.mark()  # first: it also computes the marks of a sequence that shared nothing so far
        if sequence.shared.prefix is None:
            shelf = self._state.prefixes.shelf(sequence.realm, sequence.path)
            sequence.shared.prefix = CachedPrefix(sequence.seq, sequence.pages.holding, marks, shelf)
        self._state.prefixes.reaches(sequence.shared.prefix, min(groups, len(marks)))
        if sequence.pages.holding.bounds:
            known = min(sequence.shared.prefix.known, sequence.prompt_groups)
            self._state.changed |= self._state.prompts.show(sequence.shared.prefix, sequence.chain, known)

    def hide(self, sequence: ScheduledSequence) -> None:
        """Remove a sequence from the prefix index."""
        self._state.prompts.hide(sequence.seq, sequence.shared.prefix)
        if sequence.shared.prefix is not None:
            self._state.prefixes.remove_prefix(sequence.shared.prefix)
            sequence.shared.prefix = None

    def shortens(self, sequence: ScheduledSequence, path: Path) -> bool:
        """Return whether a running sequence's output would have a lower limit along another path than on its own."""
        return self.limit_on(sequence, path) < sequence.place.most

    def limit_on(self, sequence: ScheduledSequence, path: Path) -> int:
        """Return the limit of a sequence's output along a path."""
        return sequence.most_on(
            self._capped(sequence.chain.spec, self._state.router.along(sequence.chain, path).weights)
        )

    def grow(self, sequence: ScheduledSequence, groups: int) -> None:
        """Take this many more page sets on each device of a sequence's path; the caller has checked the room."""
        self._state.page_accounting.grow(sequence.pages.holding, groups)
        sequence.holds(sequence.pages.groups + groups)
        self.show(sequence)

    def preempt(self, sequence: ScheduledSequence, now: int, cause: str = "", *, intact: bool = True) -> None:
        """Take a sequence off its devices; it waits, and runs again from what host memory keeps, or from its tokens.

        Args:
            cause: For the trace; empty: that for which it was marked, else a lack of pages.
            intact: Whether its K and V are on all devices of its path.
        """
        cause = cause or sequence.waits.doomed or "pages"
        self._state.counters.preemptions += 1
        self._state.tell.preempted(now, sequence.request, len(sequence.output), cause)
        self._unseat(sequence, now, keeps=intact and self._state.swapping.save(sequence, now))
        sequence.restart()
        self._state.waiting.add(sequence)
        if self._state.devices.roles.apart:
            self._state.tell.phase(now, sequence.request, "queued")

    def end(self, sequence: ScheduledSequence, reason: FinishReason, now: int, error: str | None = None) -> None:
        """End a sequence with an event that carries no token."""
        self._state.out.events.append(end_event(sequence, reason, error, sequence.served))
        self.end_sequence(sequence, reason, now)

    def end_sequence(self, sequence: ScheduledSequence, reason: FinishReason, now: int) -> None:
        """Remove a sequence after its last event was emitted; its prefix may stay in the prefix cache."""
        state = self._state
        state.counters.finished[reason] += 1
        del state.sequences[sequence.seq]
        state.users[sequence.chain.loaded_as] -= 1
        state.changed |= sequence.chain.loaded_as in state.leaving
        if sequence.seq in state.running:
            if reason in ("stop", "length"):
                self.show(sequence)
                self.prefix_cache.add_sequence(sequence, now)
            self._unseat(sequence, now)
        else:
            state.swapping.drop_copy(sequence)
            state.waiting.remove(sequence)
        self._record_deadline(sequence, reason, now)
        if state.devices.roles.apart:
            state.tell.phase(now, sequence.request, "done")
        state.tell.sequence_ended(now, sequence.request, reason, len(sequence.output))

    def record_forecast(self, seq: str, forecast: LengthForecast, now: int) -> None:
        """Record how long an answer is predicted to get (TI-10), in place of an older forecast.

        One that has ended needs no prediction.
        """
        if (sequence := self._state.sequences.get(seq)) is not None:
            self._state.counters.predicted += sequence.forecast is None
            sequence.forecast = forecast
            self._state.changed |= self._state.lengths is not None  # what waits for pages may fit now
            self._state.tell.predicted(now, sequence.request, forecast, len(sequence.output))

    def record_probed(self, event: LengthsProbed, now: int) -> None:
        """Record what a probe forecasts of answers."""
        for seq, each in zip(event.seqs, event.lengths, strict=True):
            self.record_forecast(seq, LengthForecast(each.edges, each.mass), now)

    def sample_lengths(self) -> None:
        """Learn from the answers that run. What waits for pages may fit now: they have fewer tokens to come."""
        if self._state.lengths is not None:
            self._state.lengths.sample(self._state.running.values())
            self._state.changed = True

    # -- internals -----------------------------------------------------------------------------------------------------

    def _record_deadline(self, sequence: ScheduledSequence, reason: FinishReason, now: int) -> None:
        """Count whether a request with `slo_ms` was in time, and learn from the length of its answer.

        One with `ttft_slo_ms` was counted with its first token, if there was one.
        """
        state, request = self._state, sequence.request
        if state.order is not None:
            state.order.record_end(sequence, reason, now)
        if state.lengths is not None:
            state.lengths.record_end(sequence, reason)
        if request.slo_ms is not None and reason != "abort":
            state.counters.count_objective(reason != "error" and now <= request.arrival + request.slo_ms * 1_000_000)
        elif request.ttft_slo_ms is not None and reason == "error" and not sequence.output:
            state.counters.count_objective(met=False)

    def _unseat(self, sequence: ScheduledSequence, now: int, keeps: bool = False) -> None:
        """Take a sequence off its devices. `keeps`: host memory keeps its K and V."""
        state = self._state
        if state.order is not None:
            state.order.record_leave(sequence, now)
        del state.running[sequence.seq]
        state.starved.pop(sequence.seq, None)
        state.queued.discard(sequence.seq)
        self._hooks.leaving(sequence)
        self.hide(sequence)
        state.page_accounting.free(sequence.pages.holding)
        if not keeps:
            state.swapping.drop_copy(sequence)
        for name in sorted(sequence.place.devices):
            self._depart(name, sequence, sequence.epoch, sequence.swapped)
        for name in sorted(sequence.offered.devices):
            state.devices[name].passing.asked.discard(sequence.seq)
            if state.devices.alive(name):
                state.out.close(name, sequence.seq, sequence.epoch)
        self._state.used_paths.remove_sequence(sequence.place.path_usage)
        sequence.unseated()
        state.changed = True

    @staticmethod
    def _continues(sequence: ScheduledSequence, kept: Swapped, match: PrefixMatch | None) -> bool:
        """Return whether K and V in host memory go on behind a match: it is of the same layers, and not longer."""
        return match is None or (
            match.boundary is None and match.groups * sequence.chain.spec.page_tokens <= kept.tokens
        )

    def _depart(self, name: str, sequence: ScheduledSequence, epoch: int, kept: Swapped | None = None) -> None:
        if not self._state.devices.alive(name):
            return
        self._state.devices.depart(name, sequence)
        if kept is None:
            self._state.out.close(name, sequence.seq, epoch)
        else:
            self._state.out.save(name, sequence.seq, epoch, kept.tokens)

    def _put(self, sequence: ScheduledSequence, route: Route) -> None:
        if sequence.path:
            self._state.used_paths.remove_sequence(sequence.place.path_usage)
        path_usage = self._state.used_paths.along(sequence.chain, route.path)
        sequence.seated(path_usage, route.weights, self._capped(sequence.chain.spec, route.weights))
        self._state.used_paths.enter(sequence.place.path_usage)
        if not self._state.router.admits(sequence.chain, route.path, "decodes"):
            sequence.place.most = sequence.most_on(sequence.chain.spec)  # that of the path on which it will decode

    def _capped(self, spec: ModelSpec, weights: tuple[tuple[str, int], ...]) -> ModelSpec:
        """Return the model's spec with its context limited to what this path can hold for one sequence alone."""
        fits = self._state.limits.holds(spec, weights) * spec.page_tokens
        limit = min(spec.max_model_len, fits - spec.virtual_tokens) if weights else spec.max_model_len
        return spec if limit == spec.max_model_len else replace(spec, max_model_len=limit)
