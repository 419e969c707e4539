"""Keep rows that arrive before their sequence is opened here.

A message of another agent may overtake the scheduler's OpenSequences, because they come over different links. At most
one row of a sequence is kept, that of its newest epoch: only one is under way at a time. Rows of sequences that are
already closed are never asked for; `expire` drops them.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.chains import Array
from runtime.messages import ForwardRows

#: How long a row is kept, in nanoseconds: far longer than one link may lag behind another.
_KEPT_NS = 30 * 1_000_000_000


@dataclass(frozen=True, slots=True)
class EarlyRow:
    """A message of one row that is kept.

    Fields:
        since: When it arrived, in ns.
    """

    rows: ForwardRows
    array: Array
    since: int


class EarlyRows:
    """The early rows of one device, by sequence."""

    def __init__(self) -> None:
        self._rows: dict[str, EarlyRow] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def store_row(self, rows: ForwardRows, at: int, array: Array, now: int) -> None:
        """Keep row `at` of a message, unless one of a newer epoch is kept already."""
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
        """Return the row of a sequence that has just been opened, or None; drop a row of an older epoch."""
        known = self._rows.get(seq)
        if known is None or known.rows.epochs[0] > epoch:
            return None
        del self._rows[seq]
        return known if known.rows.epochs[0] == epoch else None

    def expire(self, now: int) -> None:
        """Drop rows that are older than the limit."""
        for seq in [seq for seq, row in self._rows.items() if row.since < now - _KEPT_NS]:
            del self._rows[seq]
