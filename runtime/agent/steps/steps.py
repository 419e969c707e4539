"""Plan the steps of one device: turn waiting rows into plans for the engine.

`StepPlanner.next` returns the step that runs now, or None; it is under way until `pop_step`. Each lane has one step
under way. If the engine launches ahead, a second one may be planned meanwhile: rows that decode on credit then start
from tokens that only the engine has (`Row.awaits`).

A plan also carries what has changed since the last one: sequences opened or released, and new pages. The queue chooses
the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.sequences.sequence import QueuedRow, following
from runtime.agent.sequences.table import SequenceTable
from runtime.agent.speculation.hop import SpeculativeHop
from runtime.agent.stages.stages import StageTable
from runtime.agent.steps.decode_batches import DecodeBatches
from runtime.agent.steps.queue import Lane, RowQueue
from runtime.agent.steps.round_trips import RoundTrips
from runtime.chains import Array, Slice, stacked
from runtime.control.agent_io import StageStep
from runtime.types import Opened, Row, Sampled, StepPlan, StepResult


class StepPlanner:
    """Plan the steps of one device and track those under way.

    Args:
        looks_ahead: Whether the engine takes a step before the one under way is over.
        probes: Whether the engine is asked to forecast lengths of answers with the last rows of their prompts.
        probe_steps: Steps after which it is asked again, for all answers that are decoded then; 0: it is not. In the
            same step for all of them, as such a step is not replayed from a recording.

    Attributes:
        number: Number of the latest step.
        under_way: By lane: plans with the rows that they were made of, the oldest first.
    """

    def __init__(
        self,
        tables: SequencePageTables,
        sequence_table: SequenceTable,
        shelf: StageTable,
        queue: RowQueue,
        batches: DecodeBatches,
        ahead: SpeculativeHop,
        round_trips: RoundTrips,
        looks_ahead: bool = False,
        probes: bool = False,
        probe_steps: int = 0,
    ) -> None:
        self._tables = tables
        self._sequence_table = sequence_table
        self._shelf = shelf
        self._queue = queue
        self._batches = batches
        self._ahead = ahead
        self._round_trips = round_trips
        self._looks_ahead, self._probes = looks_ahead, probes
        self._probe_steps, self._probed_at = probe_steps if probes else 0, 0
        self.number = 0
        self.under_way: dict[Lane, list[tuple[StepPlan, list[QueuedRow]]]] = {}

    def running(self) -> list[QueuedRow]:
        """Return the rows of all steps under way, without shadow rows, in their order."""
        return [each for steps in self.under_way.values() for _, rows in steps for each in rows if not each.shadow]

    def oldest_step(self, lane: Lane) -> tuple[StepPlan, list[QueuedRow]]:
        """Return the oldest step under way in a lane. Raises RuntimeError if there is none."""
        if lane not in self.under_way:
            raise RuntimeError("no step is under way")
        return self.under_way[lane][0]

    def pop_step(self, lane: Lane) -> None:
        """Remove the oldest step of a lane: it is over."""
        del self.under_way[lane][0]
        if not self.under_way[lane]:
            del self.under_way[lane]

    def settle(self, rows: Sequence[QueuedRow]) -> None:
        """Mark the tables of a finished step as no longer written, except those that another step under way writes."""
        names = [each.name for each in rows]
        if self.under_way:
            names = sorted(
                set(names) - {each.name for steps in self.under_way.values() for _, others in steps for each in others}
            )
        self._tables.settle(names)

    def next(self, now: int, lane: Lane) -> StageStep | None:
        """Return the next step for the engine, or None if there is none now.

        A step without rows is returned if nothing else runs and the engine has tables to forget. Raises RuntimeError
        while as many steps of this lane are under way as the engine takes.
        """
        if lane in self.under_way:
            if not self._looks_ahead or lane != "all" or len(self.under_way[lane]) > 1:
                raise RuntimeError("a step is still under way")
            if not self._may_look_ahead():
                return None
        if lane != "ahead" and self._queue.waits(now):
            return None
        if lane == "all" and not self.under_way and (step := self._expected(now)) is not None:
            return step
        chosen = self._queue.next_step_rows(now, lane, self.running())
        if not chosen and (lane == "ahead" or self.under_way or not self._tables.released):
            return None
        opened: list[Opened] = []
        again = lane != "ahead" and self._probes_answers()
        if again:
            self._probed_at = self.number + 1
        rows = tuple([self._row(each, opened, again) for each in chosen])
        brought = [(each.name, array) for each in chosen if (array := _input(each)) is not None]
        inputs = stacked([name for name, _ in brought], [array for _, array in brought])
        plan = self._begin(now, lane, rows, tuple(opened), chosen, self._batches.number_of(chosen))
        return StageStep(plan, inputs, {each.name: each.steps for each in chosen if each.steps > 1})

    # -- inside --------------------------------------------------------------------------------------------------------

    def _begin(
        self,
        now: int,
        lane: Lane,
        rows: tuple[Row, ...],
        opened: tuple[Opened, ...],
        chosen: list[QueuedRow],
        batch: int,
    ) -> StepPlan:
        self.number += 1
        copied = self._sequence_table.take_copied() if self._sequence_table.copied else ()
        places = self._tables.take_place_changes() if self._tables.place_changes else ()
        # Shadow rows, and rows that the next step has been planned with, cannot be put back into the queue.
        defers = lane != "ahead" and not self._looks_ahead and not (chosen and chosen[0].shadow)
        plan = StepPlan(self.number, rows, opened, self._tables.take_released(), copied, batch, places, defers)
        self.under_way.setdefault(lane, []).append((plan, chosen))
        if self._looks_ahead:
            on = [each for each in chosen if each.credit is not None and each.generated + 1 < each.credit.until]
            self._queue.ahead([following(each, self.number, now) for each in on])
        if lane != "ahead":
            self._round_trips.begin_step(now)
        return plan

    def _may_look_ahead(self) -> bool:
        """Return whether a step may be planned while one is under way.

        The rows under way must have one hop each and not be of a migration. Shadow rows, and stages that wait to be
        dropped, need the device idle.
        """
        rows = self.running()
        return not (self._ahead.queue or self._shelf.parts) and all(
            len(each.sequence.path) == 1 and not each.move for each in rows
        )

    def _expected(self, now: int) -> StageStep | None:
        """Return the next step of a known persistent batch, if exactly its rows wait."""
        if self._ahead.queue or self._round_trips.records_returns or self._probes_answers():
            return None
        known = self._batches.begin(self._queue.rows)
        if known is None:
            return None
        batch, rows, inputs = known
        return StageStep(self._begin(now, "all", rows, (), self._queue.take_all(), batch), inputs, {})

    def _probes_answers(self) -> bool:
        """Return whether the next step forecasts lengths of answers that are decoded."""
        return self._probe_steps > 0 and self.number + 1 - self._probed_at >= self._probe_steps

    def _row(self, each: QueuedRow, opened: list[Opened], again: bool = False) -> Row:
        name, start, count, ids, tables = each.name, each.start, each.tokens, each.ids, self._tables
        end = start + count + each.steps - 1
        groups: tuple[tuple[int, ...], ...] = ()
        if end > tables.told.get(name, -1):
            if tables.introduce(name):
                opened.append(Opened(replace(each.sequence.request, seq=name, model=each.stage), each.sequence.output))
            groups = tables.announce_pages(name, end)
        sample = each.sample and each.move == 0 and each.hop + 1 == len(each.sequence.path)
        enters = each.enters
        if not enters and each.sequence.entry is not None and not each.move:
            each.sequence.entry = None  # its rows have run
        return Row(
            name,
            each.stage,
            (0,) * count if ids is None or enters else ids,
            start,
            groups,
            sample,
            each.generated,
            each.awaits > 0,
            enters,
            each.saves,
            self._probes and (again or not each.generated) and each.forecasts,
            each.layers,
        )


def _input(row: QueuedRow) -> Array | Slice | None:
    """Return the hidden states that a row enters with, None for one that starts from tokens."""
    entry = row.sequence.entry
    if row.array is not None or entry is None or not row.enters:
        return row.array
    return entry.array(row.start, row.tokens)


def sampled_by_seq(plan: StepPlan, result: StepResult) -> dict[str, Sampled]:
    """Return the sampled tokens of a step by table name, after checking that the engine's result answers the plan.

    Called before any state changes, so that the step can still be failed.

    Raises ValueError unless there is exactly one for each row that samples and was not deferred, and the deferred rows
    are some, but not all, of the plan's.
    """
    if result.step != plan.step:
        raise ValueError(f"the engine answered step {result.step} instead of {plan.step}")
    if not result.sampled and not result.deferred and not any([row.sample for row in plan.rows]):  # noqa: C419
        return {}
    sampled = {one.seq: one for one in result.sampled}
    deferred = set(result.deferred)
    if deferred and not deferred < {row.seq for row in plan.rows}:
        raise ValueError(f"step {plan.step}: the engine put off rows that it was not given, or all of them")
    expected = {row.seq for row in plan.rows if row.sample and row.seq not in deferred}
    if sampled.keys() != expected or len(result.sampled) != len(expected):
        raise ValueError(f"step {plan.step}: the engine sampled {len(result.sampled)} rows instead of {len(expected)}")
    return sampled
