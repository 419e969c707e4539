"""Queue the rows that wait on one device, and take those that run in the next step.

Contract: rows join in the order of their arrival. `take` returns those that run now, with pages for what they write;
other rows stay, and rows of sequences that were closed are dropped. A step is put off while rows are due back within a
moment (`policy.batching.batch_wait`). `policy.batching.step` decides whose turn it is; the queue sends nothing and
knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.sequences.sequence import QueuedRow, first_part, joined
from runtime.agent.speculation.hop import SpeculativeHop
from runtime.agent.stages.stages import StageTable
from runtime.agent.steps.round_trips import RoundTrips
from runtime.policy.batching.batch_wait import until
from runtime.policy.batching.step import HopDecision, HopLimits, decide

#: A driver with one stream takes all rows in turn, what predicts before what is predicted; one with two takes either
#: kind on its own.
Lane = Literal["all", "real", "ahead"]


def stands(row: QueuedRow, tables: SequencePageTables) -> bool:
    """Whether a row's sequence, or its move, is as it was when the row came."""
    if row.move:
        return tables.has(row.name)
    sequence = row.sequence
    if row.credit is not None and row.credit.over:
        return False
    return sequence.here and (not row.attempt or not sequence.superseded(row.hop, row.attempt, row.start))


class RowQueue:
    """`rows`: that wait, without those that predict. `lingers`: until when the next step is put off; None while it is
    not.
    """

    def __init__(
        self,
        tables: SequencePageTables,
        shelf: StageTable,
        ahead: SpeculativeHop,
        round_trips: RoundTrips,
        limits: HopLimits,
    ) -> None:
        self._tables = tables
        self._shelf = shelf
        self._ahead = ahead
        self._round_trips = round_trips
        self._limits = limits
        self.rows: list[QueuedRow] = []
        self.lingers: int | None = None

    def add_rows(self, rows: list[QueuedRow], attempts: bool, now: int) -> None:
        """Rows of sequences join; the list is the queue's from now on. `attempts`: some of them have one."""
        if attempts or self._round_trips.records_returns:
            for row in rows:
                self._comes(row, now)
        else:
            for row in rows if self._round_trips.due else ():
                self._round_trips.comes(row.name, now)
            self.rows = [*self.rows, *rows] if self.rows else rows

    def put_back(self, rows: Sequence[QueuedRow]) -> None:
        """Rows that the engine has put off wait at the head, in their order. One that was a part is joined with
        what is left of it.
        """
        back = [self._rest(row) if row.part else row for row in rows]
        known = set(map(id, back))
        self.rows = [*back, *(each for each in self.rows if id(each) not in known)]

    def waits(self, now: int) -> bool:
        """Whether the next step waits for rows that are due; then `lingers` says how long."""
        self.lingers = None
        trips = self._round_trips
        if trips.due and self.rows:
            deadline = trips.deadline(now)
            self.lingers = until(len(self.rows), trips.due, deadline, trips.step, trips.wait_limit, now)
        return self.lingers is not None

    def take_all(self) -> list[QueuedRow]:
        """All that wait, whose turn is certain and whose pages are there."""
        chosen, self.rows = self.rows, []
        self._tables.write([each.name for each in chosen])
        return chosen

    def next_step_rows(self, now: int, lane: Lane, running: Sequence[QueuedRow]) -> list[QueuedRow]:
        """The rows of the next step. What predicts comes first. `running`: rows of steps that are under way."""
        if self._ahead.queue and lane != "real":
            chosen = self._pick(self._ahead.due([*running, *self.rows], self._stands), now)
            self._ahead.mark_running(chosen)
            if chosen:
                return chosen
        if lane == "ahead":
            return []
        # Nearly all rows have neither a move nor a turn: asked of each of them at every step.
        waiting = [
            each for each in self.rows
            if (each.sequence.here if not (each.move or each.attempt) and each.credit is None else self._stands(each))
        ]  # fmt: skip
        if running and lane == "all":  # a step is under way: what has to be at rest for its turn waits until it is over
            chosen = self._pick([each for each in waiting if not each.move and not each.attempt], now)
        else:
            chosen = self._pick(waiting, now)
        if len(chosen) == len(waiting) and not any(each.part for each in chosen):
            self.rows = []
        else:
            taken = set(map(id, chosen))
            self.rows = [each for each in waiting if id(each) not in taken]
        return chosen

    def ahead(self, rows: Sequence[QueuedRow]) -> None:
        """Rows that decode on, on credit, before those that wait."""
        if rows:
            self.rows = [*rows, *self.rows]

    def starved(self, since: int) -> list[QueuedRow]:
        """Rows that have waited for pages since before then; they leave."""
        late = [
            each
            for each in self.rows
            if each.since < since and self._stands(each) and not self._tables.fits(each.name, each.work)
        ]
        gone = set(map(id, late))
        self.rows = [each for each in self.rows if id(each) not in gone]
        return late

    # -- inside --------------------------------------------------------------------------------------------------------

    def _rest(self, part: QueuedRow) -> QueuedRow:
        """The row that a part was cut from, whole again."""
        rest = next((each for each in self.rows if each.name == part.name and not each.move), None)
        return part if rest is None else joined(part, rest)

    def _stands(self, row: QueuedRow) -> bool:
        return stands(row, self._tables)

    def _comes(self, row: QueuedRow, now: int) -> None:
        """If it has a turn, what it supersedes will not run, and perhaps it is predicted."""
        self._round_trips.comes(row.name, now)
        self.rows.append(row)
        if row.attempt:
            row.sequence.comes(row.hop, row.attempt, row.start)
            self._ahead.comes(row)

    def _pick(self, waiting: Sequence[QueuedRow], now: int) -> list[QueuedRow]:
        """Those of these rows that run now, with pages for what they write."""
        if not waiting:
            return []
        decision = decide(waiting, self._round_trips.expected(), self._shelf.blocks, self._limits, now)
        if decision.parts:
            chosen = self._divide(waiting, decision, now)
        else:
            rows = [waiting[place] for place in decision.rows]
            for each in rows:
                if each.attempt:
                    self._tables.rewind(each.name, each.start)
            chosen = [each for each in rows if self._tables.reach(each.name, each.start, each.tokens + each.steps - 1)]
        self._tables.write(each.name for each in chosen)
        return chosen

    def _divide(self, waiting: Sequence[QueuedRow], decision: HopDecision, now: int) -> list[QueuedRow]:
        """Where of some rows a part runs; none of those has a turn."""
        chosen: list[QueuedRow] = []
        for place in decision.rows:
            row, count = waiting[place], decision.parts.get(place)
            if row.attempt:
                self._tables.rewind(row.name, row.start)
            if self._tables.reach(row.name, row.start, row.work if count is None else count):
                chosen.append(row if count is None else first_part(row, count, now))
        return chosen
