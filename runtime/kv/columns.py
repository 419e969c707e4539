"""Track the columns of a left-padded cache (Baton): its length, the span of each row, and what can be released.

    logical     begin ................ end          every row is aligned to the end; a row's *span* reaches from its
                                                    first token to there
    row 0       . . . . k k k k k k k k             span 8: real tokens, or placeholders after its first one where a
                                                    window was wider
    row 1       . . k k k k k . . . k k             than what the row had to run (vector shaping, BA-03)
    physical    logical modulo capacity             the store is a ring: cutting on the left and growing on the right
                                                    move nothing

Rows are numbered from 0 without gaps. A row that is removed is replaced by the last one. `release` cuts columns that
are padding in every row (BA-06); `enter` may extend the cache on the left (BA-10); `advance` extends it on the right.

Pure bookkeeping without torch: the tokens and the memory are kept elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence


class NoRoom(Exception):
    """Raised when more columns are needed than the store has. Nothing was changed."""


class Columns:
    """Track begin, end and row spans of one cache. Operations: `enter`, `remove_row`, `advance`, `release`, `move`."""

    def __init__(self, capacity: int = 0) -> None:
        self._capacity = capacity
        self._begin = self._end = 0
        self._spans: list[int] = []

    @property
    def capacity(self) -> int:
        """Return the number of columns of the store."""
        return self._capacity

    @property
    def rows(self) -> int:
        return len(self._spans)

    @property
    def length(self) -> int:
        """Return the length of the cache in columns, from begin to end (BA-01)."""
        return self._end - self._begin

    @property
    def needed(self) -> int:
        """Return the length of the longest row; columns beyond it can be released."""
        return max(self._spans, default=0)

    def span(self, row: int) -> int:
        return self._spans[row]

    def physical(self, count: int, before: int = 0) -> list[int]:
        """Return the physical positions of the `count` columns that end `before` columns ahead of the end, in order."""
        return [(self._end - before - count + at) % self._capacity for at in range(count)] if count else []

    def enter(self, span: int) -> int:
        """Add a row with K and V of `span` columns, aligned to the end, and return its number.

        A row longer than the cache extends it to the left, with placeholders for the other rows (BA-10). Raises NoRoom.
        """
        if span > self._capacity:
            raise NoRoom(f"{span} columns do not fit {self._capacity}")
        self._begin = min(self._begin, self._end - span)
        self._spans.append(span)
        return len(self._spans) - 1

    def remove_row(self, row: int) -> int:
        """Remove a row; the last row takes its number.

        Return the number that the moved row had (`row` if it was the last).
        """
        last = len(self._spans) - 1
        self._spans[row] = self._spans[last]
        self._spans.pop()
        return last

    def advance(self, tokens: Sequence[int]) -> int:
        """Append a window with `tokens[row]` real tokens per row, as wide as the largest of them, and return its width.

        Rows that have begun get placeholders after their tokens; new rows get padding before them. Raises NoRoom.
        """
        width = max(tokens, default=0)
        if self.length + width > self._capacity:
            raise NoRoom(f"{self.length} columns and {width} more do not fit {self._capacity}")
        self._spans = [span + width if span else count for span, count in zip(self._spans, tokens, strict=True)]
        self._end += width
        return width

    def release(self) -> int:
        """Cut the columns on the left that are padding in all rows, and return their number.

        Without rows, all are cut.
        """
        cut = self.length - self.needed
        self._begin += cut
        return cut

    def move(self, capacity: int) -> None:
        """Change the store to `capacity` columns, with the cache at its first one.

        Raises NoRoom if the cache is longer.
        """
        if self.length > capacity:
            raise NoRoom(f"{self.length} columns do not fit {capacity}")
        self._capacity = capacity
        self._end -= self._begin
        self._begin = 0
