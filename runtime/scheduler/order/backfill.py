"""Let later sequences run while the first waiting one lacks pages, if its start does not wait for them.

    admission: the first sequence that finds no room -> `block` -> `run`: the later ones, in their order

What is promised to the first one is `policy.slo.backfill`'s; what runs is expected to end as forecast.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from runtime.kv.pages import groups_for
from runtime.policy.slo.backfill import Holding, Reservation, reserve
from runtime.scheduler.admission.bounding import Enters, RouteOf
from runtime.scheduler.order.deadlines import DeadlineOrder
from runtime.scheduler.routing.route_cache import Route
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

#: Later sequences that are looked at in one pass.
_LOOKED_AT = 32


class Backfill:
    """The backfill of one scheduler."""

    def __init__(self, state: ClusterState, order: DeadlineOrder) -> None:
        self._state, self._order = state, order
        self._first: tuple[ScheduledSequence, Route] | None = None
        self._reserved: Reservation | None = None

    def block(self, sequence: ScheduledSequence, route: Route) -> None:
        """Record a waiting sequence that finds no room on its route; the first of a pass counts."""
        if self._first is None and self._reserved is None:
            self._first = sequence, route

    def run(self, route_of: RouteOf, enters: Enters, now: int) -> None:
        """Place sequences behind the first one that found no room, where its start does not wait for them."""
        blocked, self._first = self._first, None
        for sequence in () if blocked is None else self._behind(*blocked):
            route = None if sequence.suspect else route_of(sequence, now)
            if route is None or self._reserved is None or self._state.router.lacking(route):
                continue
            held = self._holding(sequence, route.weights, route.devices, anew=True)
            if self._reserved.admits(held) and enters(sequence, route, set(), now):
                self._reserved = self._reserved.beside(held)
                self._state.counters.backfilled += 1
        self._reserved = None

    def _behind(self, first: ScheduledSequence, route: Route) -> Sequence[ScheduledSequence]:
        """Reserve what the first sequence waits for; return those behind it, none where nothing may run before it."""
        devices, most = self._state.devices, self._state.config.max_num_seqs
        if any(devices[name].passing.expected >= most for name in route.devices):
            return ()  # a place is what is missing: no other would find one
        here = [each for each in self._state.running.values() if not each.place.devices.isdisjoint(route.devices)]
        if any(each.waits.paused is not None or each.waits.doomed or each.waits.skipped for each in here):
            return ()  # when these end is not known
        capacity = {name: devices[name].pages.capacity for name in route.devices}
        capacity |= {_places(name): most for name in route.devices}
        running = [self._holding(each, each.place.weights, each.place.devices, anew=False) for each in here]
        self._reserved = reserve(self._needed(first, route), capacity, running)
        if self._reserved is None:
            return ()
        names = (member.seq for group in self._order.forecasts.groups for member in group)
        return [self._state.sequences[name] for name in islice(names, _LOOKED_AT) if name != first.seq]

    def _needed(self, sequence: ScheduledSequence, route: Route) -> dict[str, int]:
        """Return what a sequence needs to start: pages of its context, those that stay free, and a place."""
        groups, devices = groups_for(sequence.chain.spec, sequence.tokens), self._state.devices
        pages = {
            name: groups * pages + int(devices[name].pages.capacity * self._state.config.watermark)
            for name, pages in route.weights
        }
        return pages | {_places(name): 1 for name in route.devices}

    def _holding(
        self, each: ScheduledSequence, weights: Iterable[tuple[str, int]], devices: Iterable[str], anew: bool
    ) -> Holding:
        """Return when a sequence ends, if it starts now (`anew`) by an upper bound, and what it may come to hold."""
        forecasts = self._order.forecasts
        tokens = each.tokens + forecasts.most_tokens(each)
        groups = min(groups_for(each.chain.spec, tokens), each.longest)
        ends = forecasts.longest(each, anew=True) if anew else int(forecasts.rest(each).mean)
        return Holding(ends, {name: groups * pages for name, pages in weights} | {_places(name): 1 for name in devices})


def _places(device: str) -> str:
    return f"places of {device}"
