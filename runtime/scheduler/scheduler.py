"""Run the state machine of a cluster: track every sequence and decide which device runs which row next.

    AddRequest -> waiting --path, pages--> OpenSequences, RunRows -> RowsDone -> RunRows -> … -> CloseSequences

One row of a sequence is in flight at a time; each token leaves as EmitTokens.

Contract:
- A driver calls `handle` with each message and event in order of arrival, and carries out the returned commands in
  order.
- The scheduler keeps the prompt and output of every sequence. Whatever is lost (a device, a row, pages), the sequence
  runs again from them on another path, under a new epoch, and no token is emitted twice.
- Every sequence gets exactly one event with `finish`, its last.
- Pages are taken here, on all devices of the path, before a row is sent, so that no row waits for pages behind another.

It handles no tensors, clocks, transports or text. Its parts: `admission`, `decode` (the next rows), `sequences`
(placement on devices and removal), `devices`, `migration`, `placement` (where blocks are), `routing` (paths), `kv`
(page accounting, prefix index and cache), `controllers` (periodic actions), `models` (versions), `speculation`,
`broadcast`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from runtime.chains import Block, Chain, Surrogate
from runtime.config import ClusterConfig
from runtime.control.counters import AgentState, Counters
from runtime.control.pool_io import PoolAnswer
from runtime.control.scheduler_io import (
    AbortSequence,
    AddRequest,
    AddRequests,
    AgentDown,
    ExpectRequest,
    LengthPredicted,
    MoveSequence,
    PauseSequence,
    PlanSolved,
    ResumeSequence,
    SchedulerCommand,
    SchedulerEvent,
    ServeModel,
    SetRoles,
    Tick,
    WithdrawModel,
)
from runtime.control.trace_events import TraceEvents
from runtime.messages import (
    AgentHello,
    AgentStats,
    HopAssigned,
    HostWeights,
    LengthsProbed,
    Message,
    MigrationFailed,
    MigrationReady,
    RowsDone,
    RowsLost,
    SpeculationResult,
    StageLoadFailed,
    StageReady,
)
from runtime.policy.migration.order import Mover
from runtime.scheduler.admission.admission import Admission
from runtime.scheduler.admission.variant_choice import VariantChoice, VariantChooser
from runtime.scheduler.broadcast.dispatch import BroadcastDispatch, Candidates
from runtime.scheduler.controllers.controller import Controller
from runtime.scheduler.decode.rows import DecodeLoop
from runtime.scheduler.devices.devices import Devices
from runtime.scheduler.devices.events import DeviceEvents
from runtime.scheduler.devices.roles import DeviceRoles
from runtime.scheduler.handoff.handoffs import Handoffs
from runtime.scheduler.handoff.role_changes import RoleChanges
from runtime.scheduler.kv.page_accounting import PageAccounting
from runtime.scheduler.kv.prefix_cache import PrefixCache
from runtime.scheduler.kv.shared_prompts import SharedPrompts
from runtime.scheduler.kv.swapping import Swapping
from runtime.scheduler.lending.lending import Lending
from runtime.scheduler.lending.limits import LendingLimits
from runtime.scheduler.migration.migration import Moves
from runtime.scheduler.migration.migrations import Migrations
from runtime.scheduler.models.updates import ModelUpdates
from runtime.scheduler.observe.consistency import check
from runtime.scheduler.observe.measured_times import MeasuredTimes
from runtime.scheduler.observe.totals import state_of
from runtime.scheduler.order.deadlines import DeadlineOrder
from runtime.scheduler.order.ordering import OrderParts, cells_by, deadline_order, expected_lengths, waiting_queue
from runtime.scheduler.outbox import CommandOutbox
from runtime.scheduler.placement.block_map import BlockMap
from runtime.scheduler.residency.residency import Residency
from runtime.scheduler.routing.estimates import LatencyEstimates
from runtime.scheduler.routing.router import Router
from runtime.scheduler.routing.used_paths import UsedPaths
from runtime.scheduler.sequences.lifecycle import Hooks, SequenceLifecycle, SharingCounts
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.speculation.speculation import Speculation
from runtime.scheduler.state import ClusterState
from runtime.tracing.sink import TraceSink
from runtime.types import ModelSpec


class Scheduler:
    """The state machine of a cluster; see the module docstring for its contract.

    Args:
        chains: The models that are served.
        blocks: All blocks of these chains.
        config: Settings of the scheduler.
        trace: Receives trace events; None for no trace.
        surrogates: By model, cheaper stand-ins of parts of it (BL-25).
        adaptation: Variants that may replace these chains where a request allows it; their blocks are among `blocks`.
            Its profiles give the time a row takes on a device; without them paths are chosen by load.
    """

    def __init__(
        self, chains: Iterable[Chain], blocks: Iterable[Block], config: ClusterConfig, trace: TraceSink | None = None,
        surrogates: Mapping[str, Sequence[Surrogate]] = MappingProxyType({}), adaptation: VariantChoice | None = None,
    ) -> None:  # fmt: skip
        devices, adaptation = Devices(DeviceRoles(config.roles)), adaptation or VariantChoice()
        placed = BlockMap(blocks, config, devices)
        used, tell = UsedPaths(placed), TraceEvents(trace, "scheduler")
        times = MeasuredTimes(config.control, adaptation.profiles, tell)
        measured = () if adaptation.profiles is None else adaptation.profiles.blocks
        estimates = LatencyEstimates({each.block: each for each in measured}, times, config.prefill_chunk)
        router = Router(config, devices, placed, used.reads, estimates)
        served, out, counters = {chain.model: chain for chain in chains}, CommandOutbox(), Counters()
        prompts = SharedPrompts(config, served, devices, out, counters)
        swapping = Swapping(config, devices, out, counters, tell, times, adaptation.profiles, estimates, placed)
        order = deadline_order(config, times)
        self._state = ClusterState(
            config, served, devices, placed, router, used, tell, PageAccounting(devices), times, prompts, swapping,
            LendingLimits(devices, config.lending), out,
            counters=counters, order=order, waiting=waiting_queue(config, order),
            cells=cells_by(config, order, devices, placed, times), lengths=expected_lengths(config, order),
        )  # fmt: skip
        self._prefix_cache = PrefixCache(self._state)
        self._updates = ModelUpdates(self._state, self._prefix_cache)
        self._updates.know(adaptation.variants)
        self.speculation = Speculation(self._state, surrogates)
        self._moves = moves = Moves(self._state)
        hooks = Hooks(self.speculation.plan, Candidates(self._state).hop_candidates, self._leaving)
        self._seating = SequenceLifecycle(self._state, self._prefix_cache, hooks)
        self.offers = BroadcastDispatch(self._state, self._seating)
        self.residency = Residency(self._state, self._prefix_cache, moves)
        ordered = order is not None or config.background_share > 0
        self._order = OrderParts(self._state, self._seating, order) if ordered else None
        self.plans = None if self._order is None else self._order.plans
        chooser = VariantChooser(self._state, adaptation.limits, estimates)
        self.migrations = Migrations(self._state, self._seating, moves)
        self.lending = Lending(self._state, moves.new_number, self._seating.hide, self._prefix_cache.give_way)
        known = (self.residency, moves, self.lending, self._order)
        self._admission = Admission(self._state, self._seating, chooser, *known)
        self._roles = RoleChanges(self._state, self._seating)
        self._handoffs = Handoffs(self._state, self._seating, self.migrations, self._order)
        onward = (self.migrations.at_rest, self._handoffs.begin, self._handoffs.send_ahead, self._handoffs.rests)
        self._rows = DecodeLoop(self._state, self._seating, self.speculation, self.residency, self.lending, *onward)
        parts = (self._state, self._seating, self._admission, self.migrations, self.lending, self._updates, self.offers)
        self._fleet = DeviceEvents(*parts)
        self.control = Controller(self._state, self.migrations, self._prefix_cache, self._roles)

    # -- events --------------------------------------------------------------------------------------------------------

    def handle(self, event: Message | SchedulerEvent, now: int) -> list[SchedulerCommand]:
        """Process one message or event and return the commands that follow from it, in order.

        `now` is the driver's clock in ns. Raises TypeError for a type that schedulers do not handle.
        """
        match event:
            case RowsDone():
                self._rows.rows_done(event, now)
                if self._order is not None:
                    self._order.record_rows(event, now)
            case AddRequest():
                self._admission.arrive(event.request, now)
            case AddRequests():
                for at, request in enumerate(event.requests):
                    self._admission.arrive(request, now, event.forecasts[at] if event.forecasts else None)
            case AbortSequence():
                self._abort(event.seq, now)
            case AgentHello():
                self._fleet.up(event, now)
            case AgentDown():
                self._fleet.down(event, now)
                self.residency.remove_device(event.device)
            case StageReady():
                self._fleet.loaded(event, now)
                self.residency.record_load(event.device, event.stage, now)
            case HostWeights():
                self._state.times.loads.keep_blocks(event.device, event.blocks)
            case StageLoadFailed():
                self._fleet.refused(event, now)
                self._updates.refused(event.stage)
            case RowsLost():
                self._rows.rows_lost(event, now)
            case MigrationReady():
                if not self.lending.held(event, now):
                    self.migrations.moved(event, now)
            case MigrationFailed():
                if not self.lending.refused(event, now):
                    self.migrations.stuck(event, now)
            case AgentStats():
                self._fleet.report(event, now)
                self.speculation.observe(event)
            case HopAssigned():
                self.offers.won(event, now)
            case SpeculationResult():
                self._rows.judged(event, now)
            case ServeModel():
                self._updates.serve(event, now)
            case WithdrawModel():
                self._updates.withdraw(event, now)
            case Tick():
                self.speculation.review()
                self._prefix_cache.sweep(now)
                self._fleet.overdue(now)
                self._fleet.relent(now)
                self.residency.retry_waiting(now)
                self.control.tick(now)
                self.lending.review(now)
                self._seating.sample_lengths()
                if self._order is not None:
                    self._order.review(now)
            case PauseSequence():
                self.control.pauses.pause(event.seq, event.expected, now)
            case ResumeSequence():
                self.control.pauses.resume(event.seq, now)
            case MoveSequence():
                self._move(event, now)
            case SetRoles():
                self._roles.change(event, now)
            case PoolAnswer() if self.lending.talks is not None:
                self.lending.talks.offered(event, now)
            case ExpectRequest() if self._order is not None:
                self._order.expect_request(event, now)
            case LengthPredicted():
                self._seating.record_forecast(event.seq, event.forecast, now)
            case LengthsProbed():
                self._seating.record_probed(event, now)
            case PlanSolved() if self.plans is not None:
                self.plans.solved(event, now)
            case _:
                raise TypeError(f"{type(event).__name__} is not for schedulers")
        return self._settle(now)

    def _settle(self, now: int) -> list[SchedulerCommand]:
        """Finish an event and return its commands.

        Sends next rows, retries sequences that wait for pages, and admits waiting ones where something has changed.
        """
        state = self._state
        if self._order is not None:
            self._order.begin(now)
        self._issue(now)
        if state.starved:
            self._rows.feed(now)
        if self._handoffs.waiting and self._handoffs.due:
            self._handoffs.look(now)
            if self._order is not None:
                self._order.end_handoffs(self._handoffs.look, now)
            self._issue(now)
        if state.changed:
            state.changed = False
            self._updates.go_on(now)
            if len(state.waiting):
                self._admission.admit(now)
                if self._order is not None:
                    self._order.end_admission(self._admission.admit, now)
                self._issue(now)
        return state.out.flush()

    def _issue(self, now: int) -> None:
        ready, self._state.ready = self._state.ready, []
        self._rows.go_on_all(ready, now)
        if self._state.ready:  # a migration was committed or aborted
            self._issue(now)

    def _leaving(self, sequence: ScheduledSequence) -> None:
        self._moves.cancel(sequence)
        self.lending.leaving(sequence)
        self._handoffs.remove_sequence(sequence)

    def _abort(self, seq: str, now: int) -> None:
        if (sequence := self._state.sequences.get(seq)) is not None:
            self._seating.end(sequence, "abort", now)

    def _move(self, event: MoveSequence, now: int) -> None:
        why = f"no sequence {event.seq}"
        if (sequence := self._state.sequences.get(event.seq)) is not None:
            why = self.migrations.start(sequence, range(event.lo, event.hi), event.target, now) or ""
        self._state.out.moving(event.seq, why)

    # -- views ---------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any sequence is alive."""
        return bool(self._state.sequences)

    @property
    def sequences(self) -> Mapping[str, ScheduledSequence]:
        return self._state.sequences

    @property
    def times(self) -> MeasuredTimes:
        """What hops, loads and moves take."""
        return self._state.times

    @property
    def order(self) -> DeadlineOrder | None:
        """Deadlines and forecasts; None where the order is by arrival."""
        return self._state.order

    @property
    def devices(self) -> Devices:
        return self._state.devices

    @property
    def block_map(self) -> BlockMap:
        return self._state.block_map

    @property
    def router(self) -> Router:
        return self._state.router

    @property
    def used_paths(self) -> UsedPaths:
        return self._state.used_paths

    @property
    def loading(self) -> bool:
        """Whether blocks are not placed yet, or any device is loading a stage."""
        return not self._state.placed or any(device.stages.loading for device in self._state.devices)

    @property
    def max_running(self) -> int:
        """Limit of sequences on one device at a time."""
        return self._state.config.max_num_seqs

    @property
    def starved(self) -> int:
        """Number of running sequences that wait for pages."""
        return len(self._state.starved)

    def chains(self) -> tuple[Chain, ...]:
        """Return the version of each model that new sequences get."""
        return tuple(self._state.chains.values())

    def models(self) -> tuple[ModelSpec, ...]:
        return tuple(chain.spec for chain in self._state.chains.values())

    def serving(self, model: str) -> bool:
        """Return whether a model takes requests and each of its blocks has a living device."""
        chain = self._state.chains.get(model)
        return chain is not None and self._state.block_map.up(chain)

    def uses(self, model: str) -> bool:
        """Return whether a version of a model that new sequences no longer get still has sequences or stages."""
        return any(chain.model == model for chain in self._state.leaving.values())

    def state(self) -> AgentState:
        """Return the state of all devices together, in the form of one agent's state."""
        return state_of(self._state, self.migrations.counts(), self.residency.counts)

    @property
    def prefix_cache(self) -> PrefixCache:
        return self._prefix_cache

    def sharing(self) -> SharingCounts:
        """Return how many sequences started from cached pages, and how many tokens were not computed for it."""
        return self._seating.sharing()

    def movers(self, device: str) -> list[Mover]:
        """Return the running sequences that have pages on a device and could move, for `policy.migration.order`."""
        running, mover = self._state.running.values(), self._state.page_accounting.mover
        able = (each for each in running if device in each.place.devices and not each.waits.move)
        groups = ((each, each.computed // each.spec.page_tokens) for each in able)
        return [mover(each.seq, each.pages.holding, count, device) for each, count in groups]

    def stay(self, device: str) -> list[Mover]:
        """Return the cached prefixes with their pages on a device, as holders that do not move
        (`policy.migration.order`).
        """
        return [
            self._state.page_accounting.mover(each.name, each.holding, each.known, device)
            for each in self._prefix_cache
        ]

    def check(self) -> None:
        """Raise RuntimeError unless sequences, queues and pages agree. For tests, after every event."""
        check(self._state, self._prefix_cache, self._moves, self.lending)
