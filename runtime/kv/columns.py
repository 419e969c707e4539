"""Columns of a left-padded cache (Baton): how long it is, how far each row reaches, where a column lies, and what
can be cut.

    logical     begin ................ end          every row is aligned to the end; a row's *span* reaches from its
                                                    first token to there
    row 0       . . . . k k k k k k k k             span 8: real tokens, or placeholders behind its first one where a
                                                    window was wider
    row 1       . . k k k k k . . . k k             than what the row had to run (vector shaping, BA-03)
    physical    logical modulo capacity             the store is a ring: cutting on the left and growing on the right
                                                    move nothing

Contract: rows are numbered from 0 without gaps. A row that leaves is replaced by the last one. Columns that are
padding for every row are cut by `release` (BA-06); `enter` may make the cache longer, on the left (BA-10);
`advance` makes it longer on the right. Which tokens stand where, and what memory that is, others know. Pure
bookkeeping: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence


class NoRoom(Exception):
    """More columns are needed than the store has. Nothing was changed."""


class Columns:
    """See the top of the file. Verbs: `enter`, `leave`, `advance`, `release`, `move`."""

    def __init__(self, capacity: int = 0) -> None:
        self._capacity = capacity
        self._begin = self._end = 0
        self._spans: list[int] = []

    @property
    def capacity(self) -> int:
        """Columns of the store."""
        return self._capacity

    @property
    def rows(self) -> int:
        return len(self._spans)

    @property
    def length(self) -> int:
        """Columns between begin and end: the length of the cache (BA-01)."""
        return self._end - self._begin

    @property
    def needed(self) -> int:
        """Columns that some row needs; what is longer can be released."""
        return max(self._spans, default=0)

    def span(self, row: int) -> int:
        return self._spans[row]

    def physical(self, count: int, before: int = 0) -> list[int]:
        """Where the `count` columns lie that end `before` columns ahead of the end, in order."""
        return [(self._end - before - count + at) % self._capacity for at in range(count)] if count else []

    def enter(self, span: int) -> int:
        """A row with K and V of `span` columns joins, aligned to the end; returns its number.

        A longer row than the cache is extends it to the left, with placeholders for all others (BA-10).
        Raises NoRoom.
        """
        if span > self._capacity:
            raise NoRoom(f"{span} columns do not fit {self._capacity}")
        self._begin = min(self._begin, self._end - span)
        self._spans.append(span)
        return len(self._spans) - 1

    def remove_row(self, row: int) -> int:
        """A row goes; the last one takes its number. Returns the number that the mover had (`row` itself if it was the
        last).
        """
        last = len(self._spans) - 1
        self._spans[row] = self._spans[last]
        self._spans.pop()
        return last

    def advance(self, tokens: Sequence[int]) -> int:
        """A window: `tokens[row]` real tokens of each row, as wide as the most of them. Returns its width.

        In rows that have begun, what is not real is placeholders behind their tokens; in new ones it is before them.
        Raises NoRoom.
        """
        width = max(tokens, default=0)
        if self.length + width > self._capacity:
            raise NoRoom(f"{self.length} columns and {width} more do not fit {self._capacity}")
        self._spans = [span + width if span else count for span, count in zip(self._spans, tokens, strict=True)]
        self._end += width
        return width

    def release(self) -> int:
        """Cut the columns on the left that are padding for all rows; returns how many. Without rows, all are cut."""
        cut = self.length - self.needed
        self._begin += cut
        return cut

    def move(self, capacity: int) -> None:
        """The store has `capacity` columns now, and the cache begins at the first of them. Raises NoRoom if it is
        longer.
        """
        if self.length > capacity:
            raise NoRoom(f"{self.length} columns do not fit {capacity}")
        self._capacity = capacity
        self._end -= self._begin
        self._begin = 0
