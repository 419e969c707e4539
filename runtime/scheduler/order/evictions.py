"""Take running sequences off their devices for a waiting one that would be late otherwise (QL-09).

    admission: the first sequence that finds no room -> `review` -> preempt, or mark for it when its row returns
    -> admission again, in rank order

Where the first sequence's model finds no room beside models that running sequences use, all of these give way, so that
their stages can leave (QL-13). Where a cell has one model at a time, they do so for any that is ahead of all of them;
where models take turns, for any once they have had theirs.

A sequence that gave way waits by its own rank, behind the one that it gave way to, and runs again from its prompt and
its tokens. One decision is under way at a time: while sequences of the last one still have rows in flight, there is no
other. What is chosen is `policy.slo.eviction`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from runtime.policy.slo.eviction import Occupant, Urgent, leave_for_load, victims
from runtime.scheduler.order.deadlines import DeadlineOrder
from runtime.scheduler.residency.waiters import Closing, InTheWay
from runtime.scheduler.routing.route_cache import Route
from runtime.scheduler.sequences.lifecycle import SequenceLifecycle
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

#: The cause in the trace.
_CAUSE = "QL-09"


class Evictions:
    """Evictions of one scheduler; where they are off, what finds no room is only counted."""

    def __init__(self, state: ClusterState, seating: SequenceLifecycle, order: DeadlineOrder, evicts: bool) -> None:
        self._state, self._seating, self._order, self._evicts = state, seating, order, evicts
        self._blocked: tuple[ScheduledSequence, Route] | None = None
        self._unloaded: tuple[ScheduledSequence, InTheWay, Closing] | None = None
        self._leaving: tuple[str, ...] = ()

    def block(self, sequence: ScheduledSequence, route: Route) -> None:
        """Record a waiting sequence that finds no room on its route. The first of a pass is the most urgent.

        It may have its context already, and wait for room where it is to decode.
        """
        if self._blocked is None:
            self._order.forecasts.limit(sequence)
            self._blocked = (sequence, route)

    def block_load(self, sequence: ScheduledSequence, find: Callable[[], InTheWay | None], close: Closing) -> None:
        """Record a waiting sequence for which models in use leave no room; the first of a pass counts."""
        if self._evicts and self._unloaded is None and (way := find()) is not None:
            self._unloaded = sequence, way, close

    def review(self, now: int) -> bool:
        """Evict for the sequence that was blocked in the latest pass; return whether any has left already."""
        blocked, self._blocked = self._blocked, None
        unloaded, self._unloaded = self._unloaded, None
        if not self._evicts or self._under_way():
            return False
        chosen = [] if blocked is None else self._choose(*blocked, now)
        if not chosen and unloaded is not None:
            sequence, way, close = unloaded
            chosen = self._choose_for_load(sequence, way, now)
            if chosen:
                close(way.stages, now)
        self._leaving = tuple(each.seq for each in chosen)
        gone = False
        for each in chosen:
            self._state.counters.evictions += 1
            if each.flying:
                each.doom(_CAUSE)
            else:
                self._seating.preempt(each, now, _CAUSE)
                gone = True
        return gone

    def forget_blocked(self) -> None:
        """Forget what was blocked: there is one review per event."""
        self._blocked = self._unloaded = None

    def _under_way(self) -> bool:
        running = self._state.running
        return any(seq in running and running[seq].waits.doomed for seq in self._leaving)

    def _choose(self, sequence: ScheduledSequence, route: Route, now: int) -> list[ScheduledSequence]:
        urgent = self._urgent(sequence, route)
        if now + urgent.shortest > urgent.due:
            return []  # late anyway: `victims` would say so, too
        needed = urgent.places | {name for name, count in urgent.pages.items() if count > 0}
        here = [
            each
            for each in self._state.running.values()
            if not (needed.isdisjoint(each.place.devices) and needed.isdisjoint(each.lenders))
            and not each.waits.doomed
            and each.waits.paused is None
        ]
        if not any(self._may_yield(each, sequence, now) for each in here):
            return []  # `victims` would find none, too, at far more cost
        found = victims(urgent, [self._occupant(each, sequence, now) for each in here], now) if needed else ()
        return [self._state.running[seq] for seq in found]

    def _choose_for_load(self, sequence: ScheduledSequence, way: InTheWay, now: int) -> list[ScheduledSequence]:
        """Return the running sequences on stages that leave for the model of a waiting one."""
        running = [
            each
            for each in self._state.running.values()
            if any(each.chain.stage(hop.lo, hop.hi) in way.stages.get(hop.device, ()) for hop in each.path)
        ]
        if not running or any(each.waits.doomed or each.waits.paused is not None for each in running):
            return []
        if self._state.config.order.excludes:  # the head of the queue has changed
            return running if all(self._may_yield(each, sequence, now) for each in running) else []
        if self._state.config.order.takes_turns:  # they have had theirs
            first = self._order.rank(sequence)[0]
            return running if all(self._order.rank(each)[0] >= first for each in running) else []
        urgent = Urgent(sequence.rank.order, *self._times(sequence))
        found = leave_for_load(urgent, [self._occupant(each, sequence, now) for each in running], way.load, now)
        return [self._state.running[seq] for seq in found]

    def _urgent(self, sequence: ScheduledSequence, route: Route) -> Urgent:
        devices, config = self._state.devices, self._state.config
        full = (name for name in route.devices if devices[name].passing.expected >= config.max_num_seqs)
        groups = self._state.limits.first_groups(sequence.chain.spec, sequence.tokens, route.weights)
        missing = {
            name: groups * pages
            + (int(devices[name].pages.capacity * config.watermark) if devices[name].passing.count else 0)
            - devices[name].pages.free
            - devices[name].pages.idle
            for name, pages in route.weights
        }
        return Urgent(sequence.rank.order, *self._times(sequence), frozenset(full), missing)

    def _times(self, sequence: ScheduledSequence) -> tuple[int, int, int]:
        """Return a time in which a sequence may be done, the expected one, and an upper bound."""
        order = self._order
        if sequence.path:
            return order.soonest(sequence), order.rest(sequence), order.ends(sequence)
        return order.shortest(sequence), order.service(sequence), order.longest(sequence)

    def _occupant(self, each: ScheduledSequence, urgent: ScheduledSequence, now: int) -> Occupant:
        request = each.request
        held, lent = _pages(each)
        due = self._order.due_of(each)
        return Occupant(
            each.seq,
            (request.priority, due - request.arrival),
            max(each.rank.order, due),
            self._order.rest(each),
            self._order.ends(each),
            self._order.service(each),
            each.computed,
            held,
            self._may_yield(each, urgent, now),
            lent,
        )

    def _may_yield(self, each: ScheduledSequence, urgent: ScheduledSequence, now: int) -> bool:
        """Return whether a running sequence is behind the urgent one, and has run for a while since its start."""
        return self._order.rank(each) > self._order.rank(urgent) and self._order.settled(each, now)


def _pages(sequence: ScheduledSequence) -> tuple[dict[str, int], dict[str, int]]:
    """Return the pages of a running sequence on each device of its path, and on others that hold some for it."""
    path, weights = sequence.place.devices, dict(sequence.place.weights)
    if not sequence.scattered:
        return {name: weights.get(name, 0) * sequence.pages.groups for name in path}, {}
    pages = Counter(dict.fromkeys(path, 0))
    for extent in sequence.pages.holding.extents():
        pages[extent.device.name] += extent.size
    return {name: pages.pop(name) for name in path}, dict(pages)
