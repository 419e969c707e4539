"""Compute tokens of a sequence again that a dead device held, in a row in the middle of the sequence (IL-18).

    MendPages -> a table that begins as the sequence's table does -> a row -> its new pages of lost layers are the
                 sequence's, those of all other layers are free

The row attends to all tokens before it, wherever these are, and to none behind it. The sequence has no row of its own
under way meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.sequences.sequence import AgentSequence, QueuedRow
from runtime.control.agent_io import AgentCommand, Send
from runtime.messages import SCHEDULER, MendPages, MigrationFailed, MigrationReady
from runtime.types import SamplingParams

#: What is asked of these rows: no token, and nothing of the prompt.
_SILENT = SamplingParams(1)


@dataclass(frozen=True, slots=True)
class PagesToMend:
    """Tokens that are computed again.

    Fields:
        key: Key of the table that they are computed in.
        mended: Key of the sequence's table, which gets their pages.
    """

    order: MendPages
    key: str
    mended: str


class PageMending:
    """What one device computes again. Its rows are rows of a migration: `QueuedRow.move`."""

    def __init__(self, device: str, tables: SequencePageTables) -> None:
        self._device, self._tables = device, tables
        self._under_way: dict[int, PagesToMend] = {}

    def keys(self) -> set[str]:
        """Return the tables that tokens are computed in."""
        return {each.key for each in self._under_way.values()}

    def begin(
        self, order: MendPages, sequence: AgentSequence | None, rows: list[QueuedRow], now: int
    ) -> list[AgentCommand]:
        """Append the row that computes the tokens to `rows`."""
        if sequence is None or sequence.epoch != order.epoch:
            return []
        mended = sequence.keys.get(order.lo, "")
        name = f"{order.seq}!{order.move}"
        key = self._tables.open_gap(mended, name, order.lo, order.first) if self._tables.has(mended) else None
        if key is None:
            return self._failed(order, "the tokens before them are not here")
        self._under_way[order.move] = PagesToMend(order, key, mended)
        asked = AgentSequence(replace(sequence.request, sampling=_SILENT), order.epoch, (), ())
        stage, count = sequence.stages[order.lo], len(order.tokens)
        rows.append(
            QueuedRow(
                asked, order.epoch, 0, key, stage, order.first, count, order.tokens, None, False, 0, 1, now, True,
                order.move,
            )
        )  # fmt: skip
        return []

    def finish_row(self, row: QueuedRow) -> list[AgentCommand] | None:
        """Give the sequence the pages that a row has written; None if it is not a row of these."""
        mend = self._under_way.pop(row.move, None)
        if mend is None:
            return None
        order = mend.order
        self._tables.fill(mend.key, row.tokens)
        if not self._tables.close_gap(mend.mended, mend.key, order.first, order.lost):
            self._tables.release(mend.key)
            return self._failed(order, "their pages cannot be the sequence's")
        span = order.first, order.first + len(order.tokens)
        return [Send(SCHEDULER, MigrationReady(self._device, order.move, order.seq, (), (span,), 0))]

    def failed(self, row: QueuedRow, reason: str) -> list[AgentCommand] | None:
        """Handle a failed step of a row; None if it is not a row of these."""
        mend = self._under_way.pop(row.move, None)
        if mend is None:
            return None
        self._tables.release(mend.key)
        return self._failed(mend.order, reason)

    def closed(self, seq: str, epoch: int) -> None:
        """Discard what is computed again of a sequence up to this epoch."""
        for move, mend in list(self._under_way.items()):
            if mend.order.seq == seq and mend.order.epoch <= epoch:
                del self._under_way[move]
                self._tables.release(mend.key)

    def _failed(self, order: MendPages, reason: str) -> list[AgentCommand]:
        return [Send(SCHEDULER, MigrationFailed(self._device, order.move, order.seq, reason))]
