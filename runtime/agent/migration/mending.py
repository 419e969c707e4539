"""Compute tokens of a sequence again that a dead device held, in a row in the middle of the sequence (IL-18).

    MendPages -> a table that begins as the sequence's table does -> a row -> its new pages of lost layers are the
                 sequence's, those of all other layers are free
    on hops before the one with lost layers: all of its new pages are free, MendPages goes on with its hidden states

The row attends to all tokens before it, wherever these are, and to none behind it. The sequence has no row of its own
under way meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.sequences.sequence import AgentSequence, QueuedRow
from runtime.chains import Array
from runtime.control.agent_io import AgentCommand, Send
from runtime.messages import SCHEDULER, MendPages, MigrationFailed, MigrationReady
from runtime.types import SamplingParams

#: What is asked of these rows: no token, and nothing of the prompt.
_SILENT = SamplingParams(1)


@dataclass(slots=True)
class PagesToMend:
    """Tokens that are computed again.

    Fields:
        key: Key of the table that they are computed in.
        mended: Key of the sequence's table, which gets their pages.
        row: The row that computes them.
    """

    order: MendPages
    key: str
    mended: str
    row: QueuedRow


class PageMending:
    """What one device computes again. Its rows are rows of a migration: `QueuedRow.move`."""

    def __init__(self, device: str, tables: SequencePageTables) -> None:
        self._device, self._tables = device, tables
        self._under_way: dict[int, PagesToMend] = {}

    def keys(self) -> set[str]:
        """Return the tables that tokens are computed in."""
        return {each.key for each in self._under_way.values()}

    def mends(self, key: str) -> bool:
        """Return whether tokens of a table are computed again now."""
        return any(each.mended == key for each in self._under_way.values())

    def close_gaps(self, key: str) -> list[PagesToMend]:
        """Release what waits for a step to compute tokens of a table; return it."""
        waits = [each for each in self._under_way.values() if each.mended == key and not self._tables.writes(each.key)]
        for each in waits:
            self._tables.release(each.key)
        return waits

    def open_gaps(self, closed: list[PagesToMend]) -> None:
        """Take up again what `close_gaps` has released: other devices may have more of the tokens before now."""
        for mend in closed:
            order = mend.order
            key = self._tables.open_gap(mend.mended, f"{order.seq}!{order.move}", order.path[0][1], order.first)
            mend.key = mend.row.name = mend.key if key is None else key

    def begin(
        self, order: MendPages, arrays: Sequence[Array], sequence: AgentSequence | None, rows: list[QueuedRow], now: int
    ) -> list[AgentCommand]:
        """Append the row that computes the tokens to `rows`. `arrays`: hidden states, behind the first hop."""
        if sequence is None or sequence.epoch != order.epoch:
            return []
        lo = order.path[0][1]
        mended = sequence.keys.get(lo, "")
        if not self._tables.has(mended):
            return self._failed(order, "the sequence is not here")
        # Behind the last lost layer nothing is needed, unless a later hop has it.
        layers = max(each.layers[1] for each in order.lost) if len(order.path) == 1 else 0
        if layers > self._tables.spec(mended).kv_layers:
            return self._failed(order, f"there is no layer {layers - 1}")
        key = self._tables.open_gap(mended, f"{order.seq}!{order.move}", lo, order.first)
        if key is None:
            return self._failed(order, "the tokens before them are not here")
        asked = AgentSequence(replace(sequence.request, sampling=_SILENT), order.epoch, (), ())
        stage, count = sequence.stages[lo], len(order.tokens)
        ids, states = (None, arrays[0]) if arrays else (order.tokens, None)
        row = QueuedRow(
            asked, order.epoch, 0, key, stage, order.first, count, ids, states, False, 0, 1, now, True, order.move,
            layers=layers,
        )  # fmt: skip
        self._under_way[order.move] = PagesToMend(order, key, mended, row)
        rows.append(row)
        return []

    def finish_row(self, row: QueuedRow, outputs: Mapping[str, Array]) -> list[AgentCommand] | None:
        """Give the sequence the pages that a row has written, or go on to its next hop; None if it is none of these."""
        mend = self._under_way.pop(row.move, None)
        if mend is None:
            return None
        order = mend.order
        if onward := order.path[1:]:
            self._tables.release(mend.key)
            return [Send(onward[0][0], structs.replace(order, path=onward), (outputs[row.name],))]
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
