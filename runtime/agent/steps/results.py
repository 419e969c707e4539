"""Turn the results of an engine's steps into messages and into the next rows.

    finish(result)   rows that have run: K and V filled, results to the next hop or the scheduler, credit spent
    fail(reason)     rows that a failed step has lost

Contract: a step is finished or failed once, in the order in which the steps of its lane were planned. Everything else
that follows from a step (bids, stages that leave) is the agent's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from runtime.agent.broadcast.bidding import HopBidding
from runtime.agent.migration.activation_cache import ActivationCache
from runtime.agent.migration.destination import IncomingMigrations
from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.sequences.sequence import Credit, QueuedRow, following
from runtime.agent.sequences.table import SequenceTable
from runtime.agent.speculation.hop import Alike, SpeculationResults, SpeculativeHop
from runtime.agent.stages.stages import StageTable
from runtime.agent.steps.decode_batches import DecodeBatches
from runtime.agent.steps.outbound import StepMessages, done_of, lost_of, onward, report_lengths
from runtime.agent.steps.prompt_times import PromptTimes
from runtime.agent.steps.queue import Lane, RowQueue, stands
from runtime.agent.steps.round_trips import RoundTrips
from runtime.agent.steps.steps import StepPlanner, sampled_by_seq
from runtime.chains import Array, StageResult, own
from runtime.control.agent_io import AgentCommand, Send
from runtime.messages import SCHEDULER, RowsLost
from runtime.types import Sampled, StepPlan, StepResult


def report_lost(
    device: str, tables: SequencePageTables, rows: Iterable[QueuedRow], reason: str, *, retry: bool,
    intact: bool = False,
) -> list[AgentCommand]:  # fmt: skip
    """Return the report of rows as lost, without those of sequences that have gone."""
    gone = [each for each in rows if stands(each, tables)]
    return [Send(SCHEDULER, lost_of(device, gone, reason, retry=retry, intact=intact))] if gone else []


def _may_run_again(row: QueuedRow) -> bool:
    """Return whether a row that wrote nothing that counts may run again as it was sent, with nothing else undone."""
    whole = not (row.part or row.before or row.credit is not None)
    return whole and not (row.move or row.shadow or (row.attempt and row.sequence.ahead is not None))


class StepResults:
    """The results of one device's steps.

    Args:
        alike, ran, looks_ahead: As of `Agent`.
        prompt_times: Where the times of prompts are recorded; None: nowhere.
    """

    def __init__(
        self, device: str, tables: SequencePageTables, sequence_table: SequenceTable, shelf: StageTable,
        queue: RowQueue, steps: StepPlanner, batches: DecodeBatches, round_trips: RoundTrips, ahead: SpeculativeHop,
        moves: IncomingMigrations, bidding: HopBidding, kept: ActivationCache, keeps: bool,
        prompt_times: PromptTimes | None, alike: Alike, ran: Callable[[StepPlan, StepResult, int], None] | None,
        looks_ahead: bool,
    ) -> None:  # fmt: skip
        self.device = device
        self._tables, self._sequence_table, self._shelf = tables, sequence_table, shelf
        self._queue, self._steps, self._batches, self._round_trips = queue, steps, batches, round_trips
        self._ahead, self._moves, self._bidding = ahead, moves, bidding
        self._kept, self._keeps, self._prompt_times = kept, keeps, prompt_times
        self._alike, self._ran, self._looks_ahead = alike, ran, looks_ahead
        self._earned: list[QueuedRow] = []
        #: Nanoseconds that the engine worked, tokens that it ran, and when the latest step ended.
        self.busy = self.tokens = self.ended = 0

    def first(self, result: StageResult, now: int) -> Send | None:
        """Return the message of a step that can be sent before `finish`, as `Agent.first`."""
        plan, rows = self._steps.oldest_step("all")
        told = result.result
        if (self._bidding.used and self._bidding.waits) or told.step != plan.step or told.sampled or told.deferred:
            return None
        return self._batches.first(rows, result.outputs, now)

    def finish(self, result: StageResult, now: int, lane: Lane) -> list[AgentCommand]:
        """Record the result of the oldest step of a lane and return the commands that follow from it.

        Raises ValueError, and changes nothing, if the result does not answer the plan.
        """
        plan, rows = self._steps.oldest_step(lane)
        sampled = sampled_by_seq(plan, result.result)
        self._steps.pop_step(lane)
        self.busy += result.result.busy
        if self._ran is not None:
            self._ran(plan, result.result, now)
        if lane != "ahead":
            self._round_trips.end_step(now)
        self.ended = now
        self.tokens += plan.tokens
        if result.result.deferred:
            rows = self._put_off(rows, frozenset(result.result.deferred))
        if result.saved:
            self._save(rows, result.saved)
        if self._prompt_times is not None:
            self._prompt_times.record_step(rows, result.result.busy)
        probed = report_lengths(self.device, rows, result.lengths) if result.lengths else ()
        if self._batches.already_sent(rows):
            self._all_through(rows, now)
            return [*probed]
        batch = self._batches.number_of_running(rows)
        together = None if self._keeps else self._together(rows, result, sampled, batch, now)
        if together is not None:
            self._all_through(rows, now)
            return [*probed, together]
        told, judged = StepMessages(self.device), SpeculationResults(self.device, self._alike)
        out: list[AgentCommand] = [*probed]
        fill, keeps = self._tables.fill, self._keeps
        for each in rows:
            if each.move:
                out += self._moves.finish_row(each, result.outputs, now)
                self._queue.rows += self._moves.take_rows()
                continue
            fill(each.name, each.tokens + each.steps - 1)
            if each.part:
                told.part(each, result.result.prompt_logprobs)
            elif each.sequence.here:
                if keeps and each.array is not None and not each.shadow:
                    self._kept.store_span(
                        each.sequence.seq, each.sequence.path[each.hop].lo, each.start, own(each.array)
                    )
                if each.credit is None or self._earns(each, each.credit, sampled[each.name], plan.step, now):
                    self._through(each, result.outputs, told, judged, now)
        self._steps.settle(rows)
        if self._earned:
            self._queue.ahead(self._earned)
            self._earned = []
        if not keeps:
            self._batches.end_step(rows, self._shelf.blocks)
        return [
            *out,
            *told.commands(sampled, result.result.prompt_logprobs, batch, now),
            *judged.drain_messages(),
        ]

    def _save(self, rows: Sequence[QueuedRow], saved: Mapping[str, Mapping[int, Array]]) -> None:
        """Save the hidden states that rows returned for their prompts (UN-15)."""
        for each in rows:
            if each.sequence.saving is not None and each.name in saved and each.sequence.here:
                each.sequence.saving.returned(each.start, saved[each.name])

    def _together(
        self, rows: Sequence[QueuedRow], result: StageResult, sampled: Mapping[str, Sampled], batch: int, now: int
    ) -> Send | None:
        """Return one message with the results of all rows if they have one receiver and no other results."""
        if result.result.prompt_logprobs or result.result.deferred:
            return None
        return self._batches.results(rows, sampled) or onward(rows, result.outputs, batch, now)

    def _put_off(self, rows: Sequence[QueuedRow], deferred: Collection[str]) -> list[QueuedRow]:
        """Put the rows that the engine deferred back at the head of the queue; return the rows that have run."""
        off = [each for each in rows if each.name in deferred]
        self._queue.put_back(off)
        self._steps.settle(off)
        self.tokens -= sum(each.tokens for each in off)
        return [each for each in rows if each.name not in deferred]

    def _earns(self, row: QueuedRow, credit: Credit, sampled: Sampled, step: int, now: int) -> bool:
        """Record a token decoded on credit; return whether the device reports to the scheduler now.

        Otherwise the sequence decodes on here, unless its credit has been cancelled.
        """
        if credit.over:
            return False
        if not credit.add_token(sampled, row.generated + 1):
            return True
        if not self._looks_ahead:
            self._earned.append(following(row, 0, now))
            self._earned[-1].ids = (sampled.token,)
            return False
        for each in (*self._queue.rows, *self._steps.running()):
            if each.awaits == step and each.credit is credit:
                each.ids, each.awaits = (sampled.token,), 0
        return False

    def _all_through(self, rows: Sequence[QueuedRow], now: int) -> None:
        """Record that all rows of a step have run and go on, or end, together."""
        fill, trips = self._tables.fill, self._round_trips
        for each in rows:
            fill(each.name, each.tokens + each.steps - 1)
            if trips.records_departures:
                trips.leaves(each, self.device, now)
        self._steps.settle(rows)
        self._batches.end_step(rows, self._shelf.blocks)

    def _through(
        self, row: QueuedRow, outputs: Mapping[str, Array], told: StepMessages, judged: SpeculationResults, now: int
    ) -> None:
        """Record that a row has run, and add it to the messages: to its next hop, or to the scheduler at its last hop.

        A row that a later one has superseded is dropped.
        """
        if row.attempt and row.sequence.superseded(row.hop, row.attempt, row.start):
            return
        if row.hop + 1 == len(row.sequence.path):
            told.ends(row)
        else:
            output = outputs[row.name]
            going = self._onward(row, output, judged) if row.attempt else row
            if going is not None and not (going.sequence.offers and self._bidding.offers(going, output)):
                told.goes_on(going, output)
        self._round_trips.leaves(row, self.device, now)

    def fail(self, reason: str, now: int, lane: Lane, retry: bool, intact: bool = False) -> list[AgentCommand]:
        """Report the rows of the oldest step of a lane as lost, as `Agent.fail_step`."""
        plan, rows = self._steps.oldest_step(lane)
        self._steps.pop_step(lane)
        self._batches.clear()
        again = [each for each in rows if intact and _may_run_again(each)]
        kept = {each.name for each in again}
        self._tables.queue_releases([row.seq for row in plan.rows if row.seq not in kept], plan.released)
        self._steps.settle(rows)
        out: list[AgentCommand] = self._earned_so_far(rows)
        for each in rows:
            out += self._moves.failed(each, reason, now) if each.move else []
        self._ahead.failed([each for each in rows if each.shadow])
        standing = [each for each in rows if not each.move and not each.shadow and each.name not in kept]
        lost = report_lost(self.device, self._tables, standing, reason, retry=retry)
        lost += report_lost(self.device, self._tables, again, reason, retry=retry, intact=True)
        for each in rows:
            if each.credit is not None:
                each.credit.over = True
        return [*out, *lost, *self._uncopied(plan)]

    def _earned_so_far(self, rows: Sequence[QueuedRow]) -> list[AgentCommand]:
        """Return the report of the tokens that rows got on credit before their step failed."""
        last: dict[str, Sampled] = {}
        for each in rows:
            if each.credit is not None and not each.credit.over and each.credit.told and each.sequence.here:
                last[each.name] = each.credit.told[-1]
        out: list[AgentCommand] = []
        if last:
            told = [each for each in rows if each.name in last]
            out.append(Send(SCHEDULER, done_of(self.device, told, last, {})))
        return out

    def _uncopied(self, plan: StepPlan) -> list[AgentCommand]:
        """Report sequences lost if a failed step was to copy their shared prefix; it is not known whether it did.

        Sequences with a row in that step are left out: `fail` reports them.
        """
        keys = {one.opened.request.seq for one in plan.copied} - {row.seq for row in plan.rows}
        gone = (
            [
                sequence
                for sequence in self._sequence_table.sequences.values()
                if not keys.isdisjoint(sequence.keys.values())
            ]
            if keys
            else []
        )
        if not gone:
            return []
        seqs, epochs = tuple(sequence.seq for sequence in gone), tuple(sequence.epoch for sequence in gone)
        return [
            Send(
                SCHEDULER,
                RowsLost(self.device, seqs, epochs, "the step in which its beginning was to be copied failed", True),
            )
        ]

    def _onward(self, row: QueuedRow, output: Array, judged: SpeculationResults) -> QueuedRow | None:
        """Return the row to send to the next hop after a row of a speculated sequence has run, or None."""
        if row.shadow:
            return self._ahead.predicted(row, output, [*self._steps.running(), *self._queue.rows])
        return None if judged.judge(row, output) else row
