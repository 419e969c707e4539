"""Run the state machine of one device: queue incoming rows, plan engine steps, send results to the next hop.

A driver calls, from one thread at a time, with `now` in nanoseconds of its own clock,

    handle(message or event, arrays, now)     returns commands (`control.agent_io`)
    next_step(now)                            a step for the engine, or None if there is none now
    finish_step(result, now)                  once per step; or fail_step(reason, now)

To save time a driver may call prepare() while nothing can run, and first(result) right before finish_step
(`agent.steps.decode_batches`). Steps have a lane: where hops are predicted, stand-ins run in a lane of their own
(`agent.speculation.hop`).

- A row waits in the queue and runs in the next step that has room; no step waits for a full batch (BL-14). Only if
  other rows are due back shortly is the step put off (`policy.batching.batch_wait`): `next_step` returns None until
  they arrive or the time `lingers` has passed.
- Rows of older epochs, and of hops that are not on this device, are dropped. Rows that arrive before their sequence is
  opened are kept for it (`agent.steps.early_rows`).
- Pages of a closed sequence are free once no step writes them. Rows that find no page wait up to the page timeout;
  then they are reported to the scheduler as lost.

This module uses no tensors, clocks, sockets or weights. `policy` chooses the rows of a step; the next device of a row
is in its path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from runtime.agent.broadcast.bidding import HopBidding
from runtime.agent.migration.activation_cache import ActivationCache
from runtime.agent.migration.by_layer import PagesByLayer
from runtime.agent.migration.destination import IncomingMigrations
from runtime.agent.migration.source import answer, answer_for_loan
from runtime.agent.sequences.host_copies import HostCopies
from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.sequences.prompt_states import PromptStates
from runtime.agent.sequences.table import SequenceTable
from runtime.agent.speculation.hop import Alike, SpeculativeHop, same_bits
from runtime.agent.stages.stages import StageTable
from runtime.agent.steps.decode_batches import DecodeBatches
from runtime.agent.steps.early_rows import EarlyRows
from runtime.agent.steps.hop_times import HopTimes
from runtime.agent.steps.inbound import rows_of_go, rows_of_pass
from runtime.agent.steps.prompt_times import PromptTimes
from runtime.agent.steps.queue import Lane, RowQueue
from runtime.agent.steps.results import StepResults, report_lost
from runtime.agent.steps.round_trips import RoundTrips
from runtime.agent.steps.steps import StepPlanner
from runtime.chains import Array, Lack, StageResult
from runtime.config import AgentConfig
from runtime.control.agent_io import (
    ActivationsVerified,
    AgentCommand,
    AgentEvent,
    CopiedIn,
    CopiedOut,
    HostChanged,
    PagesWritten,
    Send,
    StageFailed,
    StageLoaded,
    StageRead,
    StageStep,
)
from runtime.messages import (
    SCHEDULER,
    AgentStats,
    Bid,
    CloseSequences,
    DropStates,
    EndLoan,
    FinishMigration,
    ForwardRows,
    LoadStages,
    MendPages,
    Message,
    Offer,
    OpenSequences,
    PageData,
    PageRequest,
    PeerDown,
    PoolBeat,
    ReadAhead,
    Retract,
    RowsLost,
    RunRows,
    SaveSequences,
    SendAway,
    StartMigration,
    UnloadStages,
)
from runtime.policy.batching.step import HopLimits
from runtime.types import PageCounts, StepPlan, StepResult


class Agent:
    """The state machine of one device (see the top of the file).

    Args:
        device: Its name in paths.
        page_capacity: Pages of the device.
        config: Limits of a step, timeouts and cache sizes.
        alike: How predictions are compared with real outputs (BL-25).
        ran: Called with plan, result and time after each step that the engine has run without an error.
        lacks: What the engine cannot do.
        strides: Whether the engine decodes all the tokens of a row's `steps` in one step (simulated engines only).
        looks_ahead: Whether the engine takes a step before the one under way is over.
        page_bytes: Bytes of a page; 0: no K and V are kept in host memory.
        between_steps: Whether messages are handled between steps only, as by a loop that runs its steps itself.
    """

    def __init__(
        self, device: str, page_capacity: int, config: AgentConfig, alike: Alike = same_bits,
        ran: Callable[[StepPlan, StepResult, int], None] | None = None, lacks: Collection[Lack] = (),
        strides: bool = False, looks_ahead: bool = False, page_bytes: int = 0, between_steps: bool = False,
    ) -> None:  # fmt: skip
        self.device = device
        self._config = config
        self._tables = SequencePageTables(page_capacity)
        self._kept, self._keeps = ActivationCache(config.activation_cache_bytes), config.activation_cache_bytes > 0
        self._states = PromptStates()
        self.host_memory = config.host_memory_bytes if page_bytes else 0
        self._copies = HostCopies(self._tables, self.host_memory, page_bytes, "pages" in lacks)
        self._prompt_times = PromptTimes()
        self.between_steps = between_steps
        self._moves = IncomingMigrations(device, self._tables, config, self._kept, between_steps)
        self._shelf = StageTable(device, self._tables, config.max_num_seqs)
        self._round_trips = RoundTrips(config.batch_wait_us * 1000, config.return_slack)
        self._hop_times = HopTimes()
        self._early = EarlyRows()
        self._bidding = HopBidding(device)
        self._ahead = SpeculativeHop(device, self._tables)
        limits = HopLimits(
            config.max_num_batched_tokens, config.max_num_seqs, config.page_timeout_ms * 1_000_000, config.chunk_prefill
        )
        self._batches = DecodeBatches(device, self._tables, limits)
        self._queue = RowQueue(self._tables, self._shelf, self._ahead, self._round_trips, limits)
        self._sequence_table = SequenceTable(
            device,
            self._tables,
            self._shelf,
            self._moves,
            self._ahead,
            self._kept,
            self._closed,
            self._states,
            copies="pages" in lacks,
        )
        self._by_layer = PagesByLayer(device, self._tables, self._sequence_table.sequences, page_bytes)
        self._strides = strides
        #: Orders to send pages away or take them back that wait for a step; requests that wait for the end of a recall.
        self._late: list[SendAway | FinishMigration | PageRequest] = []
        self._steps = StepPlanner(
            self._tables,
            self._sequence_table,
            self._shelf,
            self._queue,
            self._batches,
            self._ahead,
            self._round_trips,
            looks_ahead,
            config.length_probes,
            config.probe_steps,
        )
        self._results = StepResults(
            device, self._tables, self._sequence_table, self._shelf, self._queue, self._steps, self._batches,
            self._round_trips, self._ahead, self._moves, self._bidding, self._kept, self._keeps,
            self._prompt_times if self.host_memory else None, alike, ran, looks_ahead,
        )  # fmt: skip

    @property
    def inputs(self) -> int:
        """Limit of the cache of hidden states that came into the stages, in bytes."""
        return self._config.activation_cache_bytes

    @property
    def fetch_sets(self) -> int:
        """Page sets of a migration to this device that are under way at once."""
        return self._config.fetch_window * self._config.max_inflight_fetches

    @property
    def recompute_chunk(self) -> int:
        """Tokens that a migration to this device recomputes at a time."""
        return self._config.recompute_chunk

    @property
    def busy(self) -> bool:
        """Whether a step is under way or rows wait for one."""
        return bool(self._steps.under_way) or bool(self._queue.rows) or bool(self._ahead.queue)

    @property
    def reused_steps(self) -> int:
        """Number of steps that took rows and plan from a persistent batch, advanced by one token."""
        return self._batches.reused

    @property
    def lingers(self) -> int | None:
        """Time until which the next step is put off, in ns; None if it is not."""
        return self._queue.lingers

    def handle(self, event: Message | AgentEvent, arrays: Sequence[Array], now: int) -> list[AgentCommand]:
        """Handle a message or an event and return the commands that follow from it.

        Stale ones are dropped. Raises TypeError for messages that are not for agents.
        """
        match event:
            case RunRows():
                self._queue_first_hops(event, now)
                return []
            case ForwardRows():
                self._queue_forwarded(event, arrays, now)
                return []
        out: list[AgentCommand] = []
        match event:
            case OpenSequences():
                return self._open(event, now)
            case CloseSequences():
                for seq, epoch in zip(event.seqs, event.epochs, strict=True):
                    out += self._close(seq, epoch)
                return [*out, *self._after_release(now)]
            case SendAway():
                return self._send_away(event)
            case EndLoan():
                return [*self._moves.end_loan(event), *self._after_release(now)]
            case SaveSequences():
                for seq, epoch, tokens in zip(event.seqs, event.epochs, event.tokens, strict=True):
                    out += self._save_sequence(seq, epoch, tokens)
                return [*out, *self._after_release(now)]
            case CopiedOut():
                return [*self._copies.copied_out(event), *self._after_release(now)]
            case CopiedIn():
                return [*self._copies.copied_in(event), *self._after_release(now)]
            case DropStates():
                self._states.drop_keys(event.keys)
                return []
            case Offer() | Bid() | Retract():
                return self._bid(event)
            case ReadAhead() | StageRead():
                return self._shelf.handle(event, now)
            case LoadStages() | UnloadStages() | StageLoaded() | StageFailed() | HostChanged():
                return self._provide(event, now)
            case (
                StartMigration()
                | FinishMigration()
                | MendPages()
                | PageRequest()
                | PageData()
                | PagesWritten()
                | ActivationsVerified()
                | PeerDown()
            ):
                return self._move(event, arrays, now)
        raise TypeError(f"{type(event).__name__} is not for relays")

    # -- steps ---------------------------------------------------------------------------------------------------------

    def next_step(self, now: int, lane: Lane = "all") -> StageStep | None:
        """Return the next step for the engine, or None if there is none now.

        Raises RuntimeError while as many steps of this lane are under way as the engine takes.
        """
        return self._steps.next(now, lane)

    def prepare(self) -> None:
        """Advance the persistent batches by one token, ahead of their messages.

        Only saves time; call it while nothing can run.
        """
        if not self._steps.under_way:
            self._batches.prepare()

    def first(self, result: StageResult, now: int) -> Send | None:
        """Return the message of a step to the next device if it can be sent before `finish_step`, else None.

        That is so for a persistent batch with a message built beforehand. `finish_step` has to be called right
        afterwards, and does not return this message again.
        """
        return self._results.first(result, now)

    def finish_step(self, result: StageResult, now: int, lane: Lane = "all") -> list[AgentCommand]:
        """Record the result of the oldest step of a lane and return the commands that follow from it.

        Raises ValueError, and changes nothing, if the result does not answer the plan.
        """
        out = self._results.finish(result, now, lane)
        if self._by_layer.waiting:
            out = [*out, *self._by_layer.settle()]
        return [*out, *self._go_late(now), *self._bids(), *self._parted()]

    def fail_step(
        self, reason: str, now: int, lane: Lane = "all", *, retry: bool = False, intact: bool = False
    ) -> list[AgentCommand]:
        """Report the rows of the oldest step of a lane as lost, because the engine failed on it.

        It is not known how far the engine got, so the next plan makes it forget the tables of these rows. Other rows
        are not affected.

        Args:
            retry: Whether only the step before it failed, so that the scheduler runs these rows again.
            intact: Whether K and V on another device could not be reached, and nothing else happened: the engine keeps
                the tables, and the same rows may run again.
        """
        names = {each.name for each in self._steps.oldest_step(lane)[1]} if self._by_layer.waiting else set()
        out = self._results.fail(reason, now, lane, retry, intact)
        return [*out, *self._go_late(now), *self._by_layer.fail(names), *self._bids(), *self._parted()]

    def answer_pages(self, want: PageRequest, now: int) -> list[AgentCommand]:
        """Answer a request for pages, or for kept hidden states. It only reads: a step may run meanwhile.

        It may arrive before the FinishMigration that ends a recall of these pages. Then it is answered after that.
        """
        if want.loan:
            return [answer_for_loan(want, self._moves.lent_pages(want))]
        if not want.before and self._moves.recalls(want.seq, want.epoch):
            self._late.append(want)
            return []
        if want.as_written:
            return self._by_layer.add(want, now)
        return [answer(want, self._sequence_table.sequences.get(want.seq), self.device, self._tables, self._kept)]

    def layers_written(self, passed: Mapping[str, int]) -> list[AgentCommand]:
        """Return commands for pages that wait for the step under way (TI-15).

        `passed`: by row, how many attention layers of its stage it has passed.
        """
        return self._by_layer.send_layers(self._steps.running(), passed) if self._by_layer.waiting else []

    def starved(self, now: int) -> list[AgentCommand]:
        """Report rows as lost that have waited for pages longer than the page timeout. Call it from time to time."""
        since = now - self._config.page_timeout_ms * 1_000_000
        late = self._queue.starved(since)
        self._early.expire(now)
        late_pages = self._by_layer.expire(now)
        self._copies.lost += self._copies.overdue(since)
        why = f"no pages for its next tokens on {self.device}"
        lost = report_lost(self.device, self._tables, late, why, retry=True)
        return [*lost, *late_pages, *self._lost_copies(), *self._bids()]

    # -- inspection ----------------------------------------------------------------------------------------------------

    def report(self) -> AgentStats:
        """Return the statistics that are sent to the scheduler."""
        entered = Counter(each.stage for each in self._queue.rows)
        queues = tuple((self._shelf.queue_of(stage), count) for stage, count in sorted(entered.items()))
        return AgentStats(
            self.device,
            len(self._queue.rows),
            self._steps.number,
            self._results.busy,
            self._results.tokens,
            self._tables.book.free,
            queues,
            prompt_tokens=sum(each.tokens for each in self._queue.rows if each.tokens > 1),
            hops=self._hop_times.drain(),
            host_kv=self._copies.nbytes,
            copies=self._copies.drain_times(),
            prompts=self._prompt_times.drain(),
        )

    @property
    def prompt_states(self) -> PromptStates:
        """The saved hidden states of prompts."""
        return self._states

    @property
    def host_copies(self) -> HostCopies:
        """K and V of sequences that gave way."""
        return self._copies

    def pages(self) -> PageCounts:
        return self._tables.book.counts()

    def beat(self, server: str) -> PoolBeat:
        """Return a heartbeat to the managers of the pool (IL-10). `server`: the machine it runs on."""
        counts, lent = self.pages(), Counter[str]()
        for debtor, pages in self._moves.lent():
            lent[debtor] += pages
        return PoolBeat(self.device, server, counts.capacity, counts.free, tuple(sorted(lent.items())))

    def check(self) -> None:
        """Verify that tables and sequences agree. For tests, after every event.

        Raises PageBookDamaged or RuntimeError.
        """
        self._tables.check(self._sequence_table.keys() | self._moves.keys() | self._copies.keys())
        self._copies.check(self._sequence_table.sequences.values())
        self._bidding.check()
        self._kept.check(self._sequence_table.sequences.keys() | self._moves.seqs())
        sequences = self._sequence_table.sequences
        if not all(sequence.here for sequence in sequences.values()):
            raise RuntimeError("a sequence that is here is said to have gone")
        if any(
            each.sequence.here != (sequences.get(each.sequence.seq) is each.sequence)
            for each in self._queue.rows
            if not each.move
        ):
            raise RuntimeError("a row's sequence has gone, and is said to be here")

    # -- inside: sequences ---------------------------------------------------------------------------------------------

    def _open(self, order: OpenSequences, now: int) -> list[AgentCommand]:
        refused: list[tuple[str, int]] = []
        out: list[AgentCommand] = []
        for at, (request, epoch) in enumerate(zip(order.requests, order.epochs, strict=True)):
            self._bidding.closed(request.seq, epoch - 1)
            swapped = order.swapped[at] if order.swapped else 0
            if len(self._copies) and not swapped:
                out += self._copies.closed(request.seq, epoch - 1)
            seated = self._sequence_table.open(order, at)
            if seated and swapped:
                opened = self._sequence_table.sequences[request.seq]
                if not self._copies.claim(opened, swapped, order.computed[at], now):
                    self._sequence_table.close(request.seq, epoch)
                    seated = False
            if seated is False:
                refused.append((request.seq, epoch))
            elif seated and (early := self._early.pop_row(request.seq, epoch)) is not None:
                self._queue_forwarded(early.rows, (early.array,), now)
        if self._copies.returns:
            out += self._after_release(now)
        if not refused:
            return out
        seqs, epochs = zip(*refused, strict=True)
        return [
            *out,
            Send(
                SCHEDULER,
                RowsLost(self.device, seqs, epochs, "a stage of its path, or K and V that it needs, is not here", True),
            ),
        ]

    def _closed(self, key: str) -> None:
        """Stop expecting rows at a page table: its sequence has left."""
        self._round_trips.remove_table(key)

    def _close(self, seq: str, epoch: int) -> list[AgentCommand]:
        out = self._copies.closed(seq, epoch) if len(self._copies) else []
        self._sequence_table.close(seq, epoch)
        self._early.pop_row(seq, epoch)
        self._bidding.closed(seq, epoch)
        self._by_layer.close(seq, epoch)
        return [*out, *self._moves.drop_loans()]

    def _send_away(self, order: SendAway) -> list[AgentCommand]:
        """Free pages that another device has now; if they cannot be, the sequence runs again.

        A row that came over an earlier hop may be faster than the order: then they are freed behind its step, or before
        it, if it computes lost tokens and has to wait for pages.
        """
        sequence = self._sequence_table.sequences.get(order.seq)
        if sequence is None or sequence.epoch != order.epoch:
            return []
        key = sequence.keys.get(order.lo, "")
        mending = self._moves.mending
        closed = mending.close_gaps(key)
        gone = self._tables.send_away(key, order.creditor, order.loan, order.first, order.last, order.layers)
        mending.open_gaps(closed)
        if gone:
            return []
        if self._tables.writes(key) or mending.mends(key):
            self._late.append(order)
            return []
        why = "its pages cannot be another device's"
        return [Send(SCHEDULER, RowsLost(self.device, (order.seq,), (order.epoch,), why, True))]

    def _settle(self, order: FinishMigration) -> list[AgentCommand]:
        """End a migration to this device; pages that come back are put off as those that go are (`_send_away`)."""
        sequence = self._sequence_table.sequences.get(order.seq)
        keys = {} if sequence is None else sequence.keys
        key, mending = self._moves.recalled_into(order, keys), self._moves.mending
        if key and self._tables.writes(key):
            self._late.append(order)
            return []
        closed = mending.close_gaps(key) if key else []
        out = self._moves.settle(order, keys)
        mending.open_gaps(closed)
        return out

    def _go_late(self, now: int) -> list[AgentCommand]:
        """Carry out, in their order, what waited for a step or for an order."""
        late, self._late = self._late, []
        out: list[AgentCommand] = []
        for order in late:
            match order:
                case SendAway():
                    out += self._send_away(order)
                case FinishMigration():
                    out += self._settle(order)
                case PageRequest():
                    out += self.answer_pages(order, now)
        return out

    def _save_sequence(self, seq: str, epoch: int, tokens: int) -> list[AgentCommand]:
        """Close a sequence, and keep its K and V in host memory (QL-10)."""
        sequence = self._sequence_table.take_out(seq, epoch)
        out = [] if sequence is None else self._copies.save(sequence, tokens)
        self._moves.closed(seq, epoch)
        self._early.pop_row(seq, epoch)
        self._bidding.closed(seq, epoch)
        self._by_layer.close(seq, epoch)
        return out

    def _after_release(self, now: int) -> list[AgentCommand]:
        """Return commands for what may have waited for pages: K and V that come back, and loads."""
        out: list[AgentCommand] = []
        if self._copies.returns:
            out += self._copies.begin_due()
        if self._copies.lost:
            out += self._lost_copies()
        if rows := self._copies.take_rows():
            self._queue.add_rows(rows, False, now)
        return [*out, *self._shelf.unloading.due(False)]

    def _lost_copies(self) -> list[AgentCommand]:
        """Report the sequences that cannot return; the scheduler closes them and runs them again."""
        lost, self._copies.lost = self._copies.lost, []
        gone = [each for each in lost if each.here]
        if not gone:
            return []
        seqs, epochs = tuple(each.seq for each in gone), tuple(each.epoch for each in gone)
        return [Send(SCHEDULER, RowsLost(self.device, seqs, epochs, "its K and V did not come back", True))]

    # -- inside: rows --------------------------------------------------------------------------------------------------

    def _queue_first_hops(self, go: RunRows, now: int) -> None:
        came = self._batches.rows_of(go, (), now)
        if came is None:
            came = rows_of_go(go, self._sequence_table.sequences, self._shelf.specs, now, self._strides)
            self._batches.arrived(go, came)
        if self._copies.returns:
            came = self._copies.hold_rows(came)
        self._queue.add_rows(came, bool(go.attempts), now)

    def _queue_forwarded(self, rows: ForwardRows, arrays: Sequence[Array], now: int) -> None:
        came = self._batches.rows_of(rows, arrays, now)
        in_full = came is None
        if came is None:
            came = rows_of_pass(rows, arrays, self.device, self._sequence_table.sequences, self._early, now)
            self._batches.arrived(rows, came)
        if rows.sent > self._results.ended and came and came[0].hop and not self._steps.under_way:
            self._hop_times.record(came[0].sequence.path[came[0].hop - 1].device, rows, arrays, in_full, now)
        if self._copies.returns:
            came = self._copies.hold_rows(came)
        self._queue.add_rows(came, bool(rows.attempts), now)

    def _bid(self, event: Offer | Bid | Retract) -> list[AgentCommand]:
        match event:
            case Bid():
                return [*self._bidding.bid(event)]
            case Retract():
                self._bidding.retracted(event)
            case Offer():
                self._bidding.add_offer(event)
        return self._bids()

    def _bids(self) -> list[AgentCommand]:
        """Return new offers, and bids for the offers of other devices.

        Bids are made only between steps: during one the room in the next step is not known yet.
        """
        if not self._bidding.used or not self._bidding.waits:
            return []
        out: list[AgentCommand] = [*self._bidding.drain_messages()]
        if not self._steps.under_way:
            waiting = sum(each.tokens for each in self._queue.rows)
            out += self._bidding.bids(self._config.max_num_batched_tokens - waiting if waiting else None)
        return out

    # -- inside: stages and migrations ---------------------------------------------------------------------------------

    def _provide(
        self, event: LoadStages | UnloadStages | StageLoaded | StageFailed | HostChanged, now: int
    ) -> list[AgentCommand]:
        self._batches.clear()
        out = self._shelf.handle(event, now)
        if isinstance(event, LoadStages):
            self._round_trips.slots = self._shelf.limited
        return [*out, *self._parted()] if isinstance(event, UnloadStages) else out

    def _move(
        self,
        event: StartMigration
        | FinishMigration
        | MendPages
        | PageRequest
        | PageData
        | PagesWritten
        | ActivationsVerified
        | PeerDown,
        arrays: Sequence[Array],
        now: int,
    ) -> list[AgentCommand]:
        match event:
            case StartMigration():
                donor = self._sequence_table.sequences.get(event.shared[0]) if event.shared is not None else None
                out = self._moves.receive(event, self._shelf.specs.get(event.stage.id), now, donor)
            case FinishMigration():
                out = [*self._settle(event), *self._go_late(now)]
            case MendPages():
                out = self._moves.mend(event, arrays, self._sequence_table.sequences.get(event.seq), now)
            case PageRequest():
                out = self.answer_pages(event, now)
            case PageData():
                out = self._moves.arrived(event, arrays, now)
            case PagesWritten():
                out = self._moves.written(event, now)
            case ActivationsVerified():
                out = self._moves.checked(event, now)
            case PeerDown():
                self._by_layer.remove_device(event.device)
                out = [
                    *self._moves.unreachable(event.device, now),
                    *self._bidding.remove_device(event.device, self._sequence_table.sequences.values()),
                ]
        self._queue.rows += self._moves.take_rows()
        return [*out, *self._moves.drop_loans(), *self._shelf.unloading.due(False)]

    def _parted(self) -> list[AgentCommand]:
        """Return commands for stages that leave or come and have waited; none are dropped while a step runs."""
        unloading = self._shelf.unloading
        waits = unloading.stages or unloading.later  # attributes: nothing is called where nothing waits
        due: list[AgentCommand] = [*unloading.due(not self._steps.under_way)] if waits else []
        return [*self._after_release(self._results.ended), *due] if self._copies.returns else due
