"""Rows that came before their sequence was opened here: an agent's message may overtake the scheduler's, for those are
different links.

Contract: at most one row of a sequence, that of its newest epoch, for one row of a sequence is under way at a time.
Rows of what has been
closed come late and are never asked for: they are let go when they are old.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.chains import Array
from runtime.messages import ForwardRows

#: How long a row is kept: far longer than one link may be behind another, in nanoseconds.
_KEPT_NS = 30 * 1_000_000_000


@dataclass(frozen=True, slots=True)
class EarlyRow:
    """`rows`: one row. `since`: when it came."""

    rows: ForwardRows
    array: Array
    since: int


class EarlyRows:
    def __init__(self) -> None:
        self._rows: dict[str, EarlyRow] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def store_row(self, rows: ForwardRows, at: int, array: Array, now: int) -> None:
        """Row `at` of a message, unless a newer one is there."""
        seq, epoch = rows.seqs[at], rows.epochs[at]
        known = self._rows.get(seq)
        if known is None or known.rows.epochs[0] <= epoch:
            one = slice(at, at + 1)
            row = ForwardRows(
                rows.seqs[one],
                rows.epochs[one],
                rows.hops[one],
                rows.starts[one],
                rows.counts[one],
                rows.sample[one],
                rows.generated[one],
                rows.attempts[one],
                rows.speculate[one],
            )
            self._rows[seq] = EarlyRow(row, array, now)

    def pop_row(self, seq: str, epoch: int) -> EarlyRow | None:
        """The row of a sequence that has just been opened; older ones are let go."""
        known = self._rows.get(seq)
        if known is None or known.rows.epochs[0] > epoch:
            return None
        del self._rows[seq]
        return known if known.rows.epochs[0] == epoch else None

    def expire(self, now: int) -> None:
        """Let go what is old."""
        for seq in [seq for seq, row in self._rows.items() if row.since < now - _KEPT_NS]:
            del self._rows[seq]
