"""Queue the rows that wait on one device, and choose those that run in the next step.

Rows are queued in the order of arrival. `next_step_rows` returns those that run now and takes the pages that they
write; the rest stay, and rows of closed sequences are dropped. `policy.batching.step` makes the choice. A step is put
off while rows are due back shortly (`policy.batching.batch_wait`). The queue sends no messages and calls no engine.
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

#: With one lane ("all") steps of shadow rows run before those of real rows; with two, each kind has its own lane.
Lane = Literal["all", "real", "ahead"]


def stands(row: QueuedRow, tables: SequencePageTables) -> bool:
    """Return whether a row may still run: it is not superseded, its credit not over, its sequence or migration open."""
    if row.move:
        return tables.has(row.name)
    sequence = row.sequence
    if row.credit is not None and row.credit.over:
        return False
    return sequence.here and (not row.attempt or not sequence.superseded(row.hop, row.attempt, row.start))


class RowQueue:
    """The waiting rows of one device.

    Attributes:
        rows: Waiting rows, without shadow rows (those of stand-ins).
        lingers: Time until which the next step is put off, in ns; None if it is not.
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
        """Add rows that have arrived; the queue owns the list from now on.

        Args:
            attempts: Whether some of the rows are speculated.
        """
        if attempts or self._round_trips.records_returns:
            for row in rows:
                self._comes(row, now)
        else:
            for row in rows if self._round_trips.due else ():
                self._round_trips.comes(row.name, now)
            self.rows = [*self.rows, *rows] if self.rows else rows

    def put_back(self, rows: Sequence[QueuedRow]) -> None:
        """Put rows that the engine deferred back at the head, in their order.

        A row that was a part is joined with the rest of its tokens.
        """
        back = [self._rest(row) if row.part else row for row in rows]
        known = set(map(id, back))
        self.rows = [*back, *(each for each in self.rows if id(each) not in known)]

    def waits(self, now: int) -> bool:
        """Return whether the next step waits for rows that are due back, and set `lingers`."""
        self.lingers = None
        trips = self._round_trips
        if trips.due and self.rows:
            deadline = trips.deadline(now)
            self.lingers = until(len(self.rows), trips.due, deadline, trips.step, trips.wait_limit, now)
        return self.lingers is not None

    def take_all(self) -> list[QueuedRow]:
        """Remove and return all waiting rows, which are known to fit into one step and to have pages."""
        chosen, self.rows = self.rows, []
        self._tables.write([each.name for each in chosen])
        return chosen

    def next_step_rows(self, now: int, lane: Lane, running: Sequence[QueuedRow]) -> list[QueuedRow]:
        """Return the rows of the next step. Shadow rows come first, in a step of their own.

        Args:
            running: Rows of steps that are under way.
        """
        if self._ahead.queue and lane != "real":
            chosen = self._pick(self._ahead.due([*running, *self.rows], self._stands), now)
            self._ahead.mark_running(chosen)
            if chosen:
                return chosen
        if lane == "ahead":
            return []
        # `_stands`, with a fast path for rows without migration, speculation or credit: nearly all are.
        waiting = [
            each for each in self.rows
            if (each.sequence.here if not (each.move or each.attempt) and each.credit is None else self._stands(each))
        ]  # fmt: skip
        if running and lane == "all":  # migrations and speculated rows wait until the step under way is over
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
        """Put rows that decode on credit in front of those that wait."""
        if rows:
            self.rows = [*rows, *self.rows]

    def starved(self, since: int) -> list[QueuedRow]:
        """Remove and return rows that have waited since before `since` (ns) and for which too few pages are free."""
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
        """Return a part joined with the rest of the row that it was cut from."""
        rest = next((each for each in self.rows if each.name == part.name and not each.move), None)
        return part if rest is None else joined(part, rest)

    def _stands(self, row: QueuedRow) -> bool:
        return stands(row, self._tables)

    def _comes(self, row: QueuedRow, now: int) -> None:
        """Add a row; a speculated one supersedes earlier rows and may get a shadow row."""
        self._round_trips.comes(row.name, now)
        self.rows.append(row)
        if row.attempt:
            row.sequence.comes(row.hop, row.attempt, row.start)
            self._ahead.comes(row)

    def _pick(self, waiting: Sequence[QueuedRow], now: int) -> list[QueuedRow]:
        """Return the rows that run now, with pages for what they write."""
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
        """Return the rows that run now if some of them are divided. A divided row is never speculated."""
        chosen: list[QueuedRow] = []
        for place in decision.rows:
            row, count = waiting[place], decision.parts.get(place)
            if row.attempt:
                self._tables.rewind(row.name, row.start)
            if self._tables.reach(row.name, row.start, row.work if count is None else count):
                chosen.append(row if count is None else first_part(row, count, now))
        return chosen
