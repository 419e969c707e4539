"""When the parts of an order by deadline act, in the course of an event (QL-07).

    rows have returned    batch_caps, background: learn, and leave rows out of the next steps
    admission             backfill: later ones run; cells: what waits goes to free places elsewhere; evictions: what
                          runs gives way; again
    arrival               deadlines: forecast, and refuse what will be late, where that is asked for
    a tick                deadlines: measure progress; plans: judge the order, and ask for a better one
    devices               cells: partition them again, also at each tick

Contract: parts that are off do nothing. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from runtime.config import ClusterConfig
from runtime.control.overload import late_reason
from runtime.control.scheduler_io import ExpectRequest
from runtime.messages import RowsDone
from runtime.scheduler.admission.bounding import Enters, RouteOf
from runtime.scheduler.admission.waiting_queue import WaitingQueue
from runtime.scheduler.devices.devices import Devices
from runtime.scheduler.observe.measured_times import MeasuredTimes
from runtime.scheduler.order.backfill import Backfill
from runtime.scheduler.order.background import BackgroundRows
from runtime.scheduler.order.batch_caps import BatchCaps
from runtime.scheduler.order.cells import CellAssignment
from runtime.scheduler.order.deadlines import DeadlineOrder
from runtime.scheduler.order.evictions import Evictions
from runtime.scheduler.order.forecasts import objective_for
from runtime.scheduler.order.planning import Plans
from runtime.scheduler.order.read_ahead import ReadingAhead
from runtime.scheduler.order.short_first import ShortFirst
from runtime.scheduler.placement.block_map import BlockMap
from runtime.scheduler.residency.turns import ModelTurns
from runtime.scheduler.residency.waiters import Closing, InTheWay
from runtime.scheduler.routing.route_cache import Route
from runtime.scheduler.sequences.lengths import ExpectedLengths
from runtime.scheduler.sequences.lifecycle import SequenceLifecycle
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState


def deadline_order(config: ClusterConfig, times: MeasuredTimes) -> DeadlineOrder | None:
    """Return the order by deadline, None where sequences run by arrival."""
    decoding = sum(role != "prefill" for _, role in config.roles) if config.roles else config.devices
    places = config.max_num_seqs * (decoding if config.roles or not config.order.by_cell else 1)
    return DeadlineOrder(config.order, places, times.record_request) if config.order.by_deadline else None


def waiting_queue(config: ClusterConfig, order: DeadlineOrder | None) -> WaitingQueue:
    """Return the queue of the sequences that wait."""
    turns = ModelTurns(config.order.turn_ms if config.order.takes_turns and config.residency == "swap" else 0)
    return WaitingQueue(None if order is None else order.forecasts, turns)


def expected_lengths(config: ClusterConfig, order: DeadlineOrder | None) -> ExpectedLengths | None:
    """Return the expected lengths of answers, None where nothing depends on them."""
    if not config.decode.needs_lengths:
        return None
    return ExpectedLengths(config.decode, None if order is None else order.lengths)


def cells_by(
    config: ClusterConfig, order: DeadlineOrder | None, devices: Devices, placed: BlockMap, times: MeasuredTimes
) -> CellAssignment | None:
    """Return the serving cells, None where sequences run on any devices."""
    if order is None or not config.order.by_cell:
        return None
    return CellAssignment(config, devices, placed, order.forecasts, times.loads)


class OrderParts:
    """The parts of one scheduler's order. `order`: the order by deadline, None where sequences run by arrival."""

    def __init__(self, state: ClusterState, seating: SequenceLifecycle, order: DeadlineOrder | None) -> None:
        self._state, self._seating, self._order = state, seating, order
        config, self._living = state.config, frozenset[str]()
        plans = config.order.plans and not config.order.takes_turns
        self.plans = Plans(state, order) if order is not None and plans else None
        self._evictions = None if order is None else Evictions(state, seating, order, config.order.evicts)
        self._ahead = ReadingAhead(state) if config.residency == "swap" and config.order.reads_ahead else None
        limit, soft = config.order.short_first_ms * 1_000_000, config.order.soft_deadline_ms * 1_000_000
        self._short = ShortFirst(order.forecasts, limit, soft) if order is not None and limit else None
        self._backfill = Backfill(state, order) if order is not None and config.order.backfills else None
        self._caps = BatchCaps(state, order) if order is not None and config.order.caps else None
        self._background = BackgroundRows(state, config.background_share) if config.background_share > 0 else None

    def forecast(self, sequence: ScheduledSequence, now: int) -> None:
        """Forecast the end of a request that has arrived; refuse it if that is too late and `overload` says so (QL-19).

        One without an objective, or that has tokens already, is never refused.
        """
        if self._background is not None:
            self._background.record_arrival(sequence.request.request, now)
        if self._order is None:
            return
        made, request, state = self._order.forecasts.promise(sequence, now), sequence.request, self._state
        objective = objective_for(sequence)
        if made is None or objective is None or state.config.order.overload != "reject" or request.output:
            return
        done = made.wait + self._order.context(sequence, sequence.tokens) if objective.first_token else made.end
        if (late := now + done - sequence.rank.order) <= 0:
            return
        state.waiting.remove(sequence)
        del state.sequences[sequence.seq]
        state.users[sequence.chain.loaded_as] -= 1
        self._order.record_end(sequence, "error", now)
        self.record_refusal(request.request, now)
        self._seating.refuse(request, late_reason(late), now)

    def expect_request(self, event: ExpectRequest, now: int) -> None:
        """Record that sequences of a request are about to come, or that they do not."""
        if self._background is not None:
            self._background.expect_request(event.request, event.comes, now)

    def record_refusal(self, request: str, now: int) -> None:
        """Record that a request has come and does not run."""
        if self._background is not None:
            self._background.expect_request(request, False, now)

    def block(self, sequence: ScheduledSequence, route: Route) -> None:
        """Record a waiting sequence that finds no room."""
        if self._evictions is not None:
            self._evictions.block(sequence, route)
        if self._backfill is not None:
            self._backfill.block(sequence, route)

    def block_handoff(self, sequence: ScheduledSequence, route: Route) -> None:
        """Record a sequence with a computed context that finds no room on the route where it is to decode."""
        if self._evictions is not None:
            self._evictions.block(sequence, route)

    def backfill(self, route_of: RouteOf, enters: Enters, now: int) -> None:
        """Let waiting sequences run before the first one that found no room in this pass."""
        if self._backfill is not None:
            self._backfill.run(route_of, enters, now)

    def block_load(self, sequence: ScheduledSequence, find: Callable[[], InTheWay | None], close: Closing) -> None:
        """Record a waiting sequence for which models in use leave no room."""
        if self._evictions is not None:
            self._evictions.block_load(sequence, find, close)

    def holds_back(self, sequence: ScheduledSequence, devices: Iterable[str], now: int) -> bool:
        """Return whether a waiting sequence is not to start on these devices now."""
        if self._caps is not None and self._caps.holds_back(sequence, devices, now):
            return True
        return self._background is not None and self._background.holds_back(sequence, devices, now)

    def record_rows(self, done: RowsDone, now: int) -> None:
        """Record rows that have been processed."""
        if self._caps is not None:
            self._caps.record_step(done, now)
        if self._background is not None:
            self._background.record_step(done, now)

    def begin(self, now: int) -> None:
        """Act on what has come, before rows are issued: devices that died or returned, and rows that are left out."""
        if self._state.placed and self._living != (living := frozenset(self._state.devices.living)):
            self._living = living
            self._review_cells()
        if self._caps is not None:
            self._caps.review(now)
        if self._background is not None:
            self._background.review(now)

    def end_handoffs(self, look: Callable[[int], None], now: int) -> None:
        """Make room where a sequence that was not handed off is to decode, and hand off again."""
        if self._evictions is not None and self._evictions.review(now):
            look(now)
            self._evictions.forget_blocked()

    def end_admission(self, admit: Callable[[int], None], now: int) -> None:
        """Make room for what was not admitted, and admit again."""
        if self._state.cells is not None and self._state.cells.balance():
            admit(now)
        if self._evictions is not None and self._evictions.review(now):
            admit(now)
            self._evictions.forget_blocked()

    def _review_cells(self) -> None:
        if self._state.cells is not None and self._state.placed:
            self._state.cells.review(self._state.in_use())

    def review(self, now: int) -> None:
        """Measure progress, partition devices again, where blocks were moved, and admit: what waits may be urgent.

        Plans are asked for, and devices are told what to read ahead.
        """
        if self._background is not None:
            self._background.review_all(now)
        if self._order is None:
            return
        self._review_cells()
        self._order.sample(self._state.running.values(), now)
        self._state.changed |= len(self._state.waiting) > 0
        if self.plans is not None:
            self.plans.review(now)
        if self._short is not None:
            self._short.review(now)
        if self._ahead is not None:
            self._ahead.review()
