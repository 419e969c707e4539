"""Admit waiting sequences (QL-08): find a path with loaded stages, and pages for all the context that one has.

Contract:
- Chains are considered by the rank of their first waiting sequence.
- A sequence that does not fit holds back its chain and every sequence that needs a device of its path, so that none
  overtakes it on the way to the same pages; but for those that delay it by no forecast, where that is asked for.
- A sequence goes where its prefix is cached, if that path has room and costs little more (BL-19).
- A sequence that can never run ends with the reason.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from functools import partial

from runtime.chains import Chain, Path, Stage, devices_of
from runtime.control.request_checks import refusal
from runtime.control.sequence import Rank
from runtime.kv.pages import groups_for
from runtime.policy.lengths.forecast import LengthForecast
from runtime.policy.routing.latency import Latency
from runtime.policy.routing.paths import path_cost
from runtime.scheduler.admission.bounding import Bounding
from runtime.scheduler.admission.idle_instances import IdleInstances
from runtime.scheduler.admission.local_prefill import LocalPrefill
from runtime.scheduler.admission.page_reserve import PageReserve
from runtime.scheduler.admission.variant_choice import VariantChooser
from runtime.scheduler.kv.prefix_index import PrefixMatch
from runtime.scheduler.lending.lending import Lending
from runtime.scheduler.migration.migration import Moves
from runtime.scheduler.placement.block_map import blocks_of
from runtime.scheduler.residency.residency import Residency
from runtime.scheduler.routing.route_cache import Route
from runtime.scheduler.sequences.lifecycle import SequenceLifecycle
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState
from runtime.types import SequenceRequest


class Admission:
    """Accept or refuse requests, and admit waiting sequences to paths.

    `order`: what may keep a sequence from starting, and is told what finds no room.
    """

    def __init__(
        self, state: ClusterState, seating: SequenceLifecycle, adaptive: VariantChooser, residency: Residency,
        moves: Moves, lending: Lending, order: Bounding | None = None,
    ) -> None:  # fmt: skip
        self._state, self._moves = state, moves
        self._residency = residency
        self._seating = seating
        self._adaptive = adaptive
        self._order = order
        self._lending = lending
        self._reserve = PageReserve(state, moves)
        self._arrivals = 0
        self._idle, self._local = IdleInstances(state), LocalPrefill(state, self._worth_it, self._joins_at)

    def arrive(self, request: SequenceRequest, now: int, forecast: LengthForecast | None = None) -> None:
        """Add a request to the waiting queue, or refuse it. Raises ValueError if its name is in use."""
        state = self._state
        if request.seq in state.sequences or request.seq in self._seating.prefix_cache:
            raise ValueError(f"sequence {request.seq} exists already")
        state.tell.arrive(now, request)
        if (chain := state.chains.get(request.model)) is None:
            self._refuse(request, f"model {request.model!r} is not loaded", now)
            return
        if (variant := self._adaptive.choose(request, chain, now)) is not None:
            chain = variant.chain
            state.counters.adapted += 1
            state.counters.adapted_similarity += round(variant.score * 1e6)
        if (why := refusal(request, chain.spec) or state.block_map.why_not(chain)) is not None:
            self._refuse(request, why, now)
            return
        self._arrivals += 1
        order = request.arrival if state.order is None else state.order.due(request)
        sequence = ScheduledSequence(
            request, chain.spec, Rank(request.priority, order, self._arrivals), chain=chain, variant=variant
        )
        state.sequences[request.seq] = sequence
        if forecast is not None:
            self._seating.record_forecast(request.seq, forecast, now)
        state.users[chain.loaded_as] += 1
        state.waiting.add(sequence)
        state.changed = True
        if state.devices.roles.apart:
            state.tell.phase(now, request, "queued")
        if self._order is not None:
            self._order.forecast(sequence, now)

    def _refuse(self, request: SequenceRequest, why: str, now: int) -> None:
        self._seating.refuse(request, why, now)
        if self._order is not None:
            self._order.record_refusal(request.request, now)

    def admit(self, now: int) -> None:
        """Admit every waiting sequence that fits, chain by chain in rank order."""
        state = self._state
        if not state.placed:
            return
        if state.order is not None and state.config.order.plan == "qlm":
            state.order.put_late_ones_last(state.waiting, now)
        full: set[str] = set(state.awaited)
        self._residency.begin_pass()
        heads = [(state.waiting.rank(sequence), sequence) for sequence in state.waiting.heads()]
        while heads:
            sequence = heads[0][1]
            cell, route = state.waiting.cell(sequence), None
            if not self._residency.is_closed(sequence, now) and not (
                sequence.suspect
                and any(other.suspect and other.waits.paused is None for other in state.running.values())
            ):
                told_of = state.tell.on and state.router.measured(sequence.chain)
                if full and not told_of and state.block_map.within(sequence.chain, full):
                    state.router.turn()  # `route` does so too; skipped here, since every path of the chain is full
                elif not told_of and self._awaits_load(sequence):
                    state.router.turn()
                    state.router.turn()
                else:
                    route = self._route(sequence, now)
            if route is None or not self._enters(sequence, route, full, now):
                if state.config.order.holds_all:
                    full |= state.block_map.devices_of(sequence.chain)
                heapq.heappop(heads)
                continue
            after = state.waiting.after(sequence, cell)
            if after is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (state.waiting.rank(after), after))
        if self._order is not None:
            self._order.backfill(self._route, self._enters, now)

    def _route(self, sequence: ScheduledSequence, now: int) -> Route | None:
        """Return the cheapest route of a waiting sequence; None while its model is closed."""
        if self._residency.is_closed(sequence, now):
            return None
        return self._state.router.route(
            sequence.chain, self._state.devices.loads, False, sequence.tokens, sequence.longest,
            partial(self._trace_choice, now), self._within(sequence),
        )  # fmt: skip

    def _awaits_load(self, sequence: ScheduledSequence) -> bool:
        """Return whether a sequence can only wait for stages on their way: the result of `_let_in`, at less cost.

        Of chains with one instance of each block. On one device with very many models, that is nearly every head.
        """
        route = self._state.router.only(sequence.chain)
        missing = None if route is None else self._state.router.lacking(route)
        return (
            route is not None
            and bool(missing)
            and all(self._residency.is_on_way(sequence, name, stage) for name, stage in missing or ())
            and self._hopeless(sequence, route, missing or ()) is None
        )

    def _within(self, sequence: ScheduledSequence) -> frozenset[str] | None:
        """Return the devices that a waiting sequence may run on: those for prompts, of its cell; None for all."""
        cells, prompts = self._state.cells, self._state.router.within(sequence.chain, "prompts")
        cell = None if cells is None else cells.devices_of(sequence)
        return prompts if cell is None else cell if prompts is None else cell & prompts

    def turn_away(self, now: int) -> None:
        """End all waiting sequences of chains that the cluster cannot hold."""
        for sequence in tuple(self._state.waiting):
            why = self._state.block_map.why_not(sequence.chain)
            if why is not None:
                self._seating.end(sequence, "error", now, why)

    def _enters(self, sequence: ScheduledSequence, route: Route, full: set[str], now: int) -> bool:
        """Place a sequence where its prefix is, or on a route; return False where it has to wait."""
        if self._order is not None and self._order.holds_back(sequence, route.devices, now):
            full.update(route.devices)
            return False
        if sequence.swapped is not None and self._returns(sequence, sequence.swapped.path, full, now):
            return True
        shares = self._may_share(sequence) and not self._lending.is_needed(sequence, route.weights)
        found = self._matches(sequence, route.path) if shares else ()
        layers = sequence.chain.spec.kv_layers
        best = max((match.pages(layers) for match in found), default=0)
        if shares and self._state.prompts.waits(sequence, route.path, best, self._state.running):
            return False
        placed = self._local.places(sequence, found, full, now) or self._joins(sequence, route, found, full, now)
        return placed or self._let_in(sequence, route, full, now)

    def _returns(self, sequence: ScheduledSequence, path: Path, full: set[str], now: int) -> bool:
        """Place a sequence where host memory has its K and V, if there is room now and the stages are loaded (QL-10).

        Its first pages may be those of another sequence there.
        """
        state, within = self._state, self._within(sequence)
        devices = {hop.device for hop in path}
        # With roles, only a context that has still to be computed needs devices for prompts.
        decodes = state.devices.roles.apart and sequence.swapped is not None and sequence.swapped.phase == "decode"
        if not devices <= (within or devices) and not (
            decodes and state.router.admits(sequence.chain, path, "decodes")
        ):
            return False
        if devices & full or not state.router.allows(sequence.chain, path):
            return False
        route = state.router.along(sequence.chain, path)
        alone = not self._may_share(sequence) or any(state.devices[name].copies for name in devices)
        found = () if alone else self._matches(sequence, path)
        for match in (*[each for each in found if each.boundary is None and each.path == path][:1], None):
            if self._fits(sequence, route, now, match):
                self._seating.seat(sequence, route, now, match)
                self._residency.record_use(sequence, now)
                return True
        return False

    def _joins(
        self, sequence: ScheduledSequence, cheapest: Route, found: Sequence[PrefixMatch], full: set[str], now: int
    ) -> bool:
        """Place a sequence on the path with the longest cached prefix that has room and costs little enough (BL-19)."""
        within = self._within(sequence)
        for match in found:
            if within is not None and not within.issuperset(hop.device for hop in match.path):
                continue
            route = self._state.router.along(sequence.chain, match.path)
            if self._worth_it(sequence, match, route, cheapest) and self._joins_at(sequence, match, full, now):
                return True
        return False

    def _joins_at(self, sequence: ScheduledSequence, match: PrefixMatch, full: set[str], now: int) -> bool:
        """Place a sequence on the path of a cached prefix, if that has its stages and room."""
        router = self._state.router
        if any(hop.device in full for hop in match.path) or not router.allows(sequence.chain, match.path):
            return False
        route = router.along(sequence.chain, match.path)
        if not self._fits(sequence, route, now, match):
            return False
        self._seating.seat(sequence, route, now, match)
        self._residency.record_use(sequence, now)
        return True

    def _matches(self, sequence: ScheduledSequence, path: Path) -> list[PrefixMatch]:
        """Return the cached prefixes of a sequence, those with the most pages first.

        Along `path` also prefixes of other chains, of which it shares the first layers (UN-15).
        """
        state, spec = self._state, sequence.chain.spec
        own = state.prefixes.matches(sequence.realm, sequence.mark(), (sequence.tokens - 1) // spec.page_tokens)
        found = state.prompts.matches(sequence, path)
        return sorted([*own, *found], key=lambda match: -match.pages(spec.kv_layers)) if found else own

    def _may_share(self, sequence: ScheduledSequence) -> bool:
        """Return whether a sequence may start from a cached prefix.

        Prompt scores and means need every token to run, and virtual tokens are not shared.
        """
        return not (
            self._state.config.prefix_caching == "off"
            or sequence.shared.alone
            or sequence.chain.spec.virtual_tokens
            or sequence.request.sampling.reads_prompt
        )

    def _worth_it(self, sequence: ScheduledSequence, match: PrefixMatch, route: Route, cheapest: Route) -> bool:
        """Return whether a cached prefix justifies its path: not much dearer than the cheapest, and as roomy."""
        config, loads, holds = self._state.config, self._state.devices.loads, self._state.router.holds
        if holds(route) < min(sequence.longest, holds(cheapest)):
            return False  # its output would have a lower limit there
        there, best = (
            path_cost(devices_of(sequence.chain, path), loads, config.hop_cost) for path in (match.path, cheapest.path)
        )
        share = match.groups * sequence.chain.spec.page_tokens / sequence.tokens
        return there <= best + config.owner_margin * share

    def _trace_choice(
        self, now: int, chain: Chain, table: Sequence[Mapping[str, Latency]], chosen: tuple[str, ...] | None
    ) -> None:
        """Trace all latency terms of each candidate, and the choice (BL-21)."""
        if self._state.tell.on:
            for use, row, device in zip(chain.uses, table, chosen or (), strict=False):
                terms = {name: (each.queue, each.compute, each.transfer, each.load) for name, each in row.items()}
                self._state.tell.control(now, "dispatch.candidates", "BL-21", device, use.block, candidates=terms)

    def _let_in(self, sequence: ScheduledSequence, route: Route, full: set[str], now: int) -> bool:
        """Place a sequence on a route, or end it if it can never run; return False where it has to wait."""
        router, alive = self._state.router, self._state.devices.alive
        if router.holds(route) < sequence.longest:  # another route may hold it
            route = router.roomier(sequence.chain, route, sequence.longest, self._within(sequence))
        if (full and not full.isdisjoint(route.devices)) or not all(map(alive, route.devices)):
            return False
        missing = router.lacking(route)
        if self._shunned(sequence, missing):
            return self._again(sequence, full, now)
        why = self._hopeless(sequence, route, missing)
        if why is not None:
            self._seating.end(sequence, "error", now, why)
            return True
        if missing:
            self._residency.request_stages(sequence, missing, now)
            if self._order is not None:
                self._order.block_load(
                    sequence, partial(self._residency.in_the_way, sequence, missing), self._residency.close
                )
            self._idle.load(sequence.chain, route, now)
            # While these load, it may run on a path with all stages loaded.
            other = router.route(
                sequence.chain, self._state.devices.loads, True, sequence.tokens, sequence.longest,
                partial(self._trace_choice, now), self._within(sequence),
            )  # fmt: skip
            if other is None or router.lacking(other) or not full.isdisjoint(other.devices):
                return False
            if router.holds(other) < min(sequence.longest, router.holds(route)):
                return False
            route = other
        if not self._fits(sequence, route, now):
            full.update(route.devices)
            if self._order is not None:
                self._order.block(sequence, route)
            return False
        self._seating.seat(sequence, route, now)
        self._residency.record_use(sequence, now)
        return True

    def _shunned(self, sequence: ScheduledSequence, missing: Sequence[tuple[str, Stage]]) -> bool:
        """Remove the instances of refused stages where their blocks have other ones; return whether any was removed.

        A device may have been given such blocks again since the refusal.
        """
        state, shunned = self._state, False
        for device, stage in missing:
            refused = state.devices[device].stages.refused
            if refused and stage in refused:
                shunned |= state.block_map.shun(device, blocks_of(sequence.chain, stage))
        return shunned

    def _again(self, sequence: ScheduledSequence, full: set[str], now: int) -> bool:
        """Retry `_let_in` with a new route; each retry has one instance less to choose from."""
        route = self._state.router.route(
            sequence.chain, self._state.devices.loads, groups=sequence.longest, within=self._within(sequence)
        )
        return route is not None and self._let_in(sequence, route, full, now)

    def _hopeless(self, sequence: ScheduledSequence, route: Route, missing: Sequence[tuple[str, Stage]]) -> str | None:
        """Return why a route can never run a sequence (a refused stage, a device with too few pages), or None."""
        state, chain = self._state, sequence.chain
        for device, stage in missing:
            refused = state.devices[device].stages.refused
            if refused and (reason := refused.get(stage)) is not None:
                return f"{chain.model} cannot be loaded: {reason}"
        groups = groups_for(chain.spec, sequence.tokens + (1 if sequence.samples else 0))
        return state.limits.why_not(chain.spec, sequence.tokens, groups, route.weights)

    def _fits(self, sequence: ScheduledSequence, route: Route, now: int, match: PrefixMatch | None = None) -> bool:
        """Return whether a sequence's context, less what it shares, fits now.

        Evicts cached prefixes for it, and lets idle stages leave where their memory can become pages.

        The watermark stays free on devices that run sequences.
        """
        devices, config = self._state.devices, self._state.config
        coming = self._moves.handed_to() if len(self._moves) else {}
        if any(devices[name].passing.expected + coming.get(name, 0) >= config.max_num_seqs for name in route.devices):
            return False
        if self._residency.holds_back(sequence, route.devices) or self._reserve.lacking_where_it_decodes(
            sequence, route
        ):
            return False
        shared = None if any(devices[name].copies for name in route.devices) else match
        groups = self._state.limits.first_groups(sequence.chain.spec, sequence.tokens, route.weights)
        if self._lending.is_needed(sequence, route.weights) and not self._lending.has_room(
            sequence, route.weights, groups, now
        ):
            return False
        needs = {name: pages * groups - (0 if shared is None else shared.pages(pages)) for name, pages in route.weights}
        slack = {
            name: int(devices[name].pages.capacity * config.watermark) if devices[name].passing.count else 0
            for name in needs
        }
        spared, cache = None if match is None else match.prefix, self._seating.prefix_cache
        if cache.make_room(needs, spared, slack):
            return True
        own = {} if spared is None else spared.holding.idle()
        wanted = {name: pages + slack[name] + own.get(name, 0) for name, pages in needs.items()}
        return self._residency.make_pages(wanted, now) and cache.make_room(needs, spared, slack)
