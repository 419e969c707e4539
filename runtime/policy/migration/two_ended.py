"""Track one migration of K and V from both ends at once: recomputed from the front, copied from the back (BL-16).

A `TwoEnded` belongs to the destination, which alone assigns page sets to the two ends. Each page set goes

    wanted -> recomputing -> recomputed        wanted -> copying -> copied        (a failed copy is wanted again)

so it is brought exactly once: an end gets page sets only from `next_front` and `next_back`, and results for page sets
that are no longer assigned to it are refused. A page set is recomputed only when all before it are here, because
attention reads them. Token ranges start with a page set and end with one, or with the last token. The first page sets
may be present at the destination; they are brought by neither end.

Page sets without inputs for the front (`inputs`) are copied. Those that block the front are copied first, so that it
can continue behind them. Pure bookkeeping; `pace` tracks how fast each end is.
"""

from __future__ import annotations

from enum import IntEnum


class _State(IntEnum):
    WANTED = 0
    RECOMPUTING = 1
    COPYING = 2
    RECOMPUTED = 3
    COPIED = 4
    PRESENT = 5


Spans = tuple[tuple[int, int], ...]


def met_at(recomputed: Spans) -> int:
    """Return the first token that was not recomputed, of a completed migration."""
    return recomputed[0][1] if recomputed and recomputed[0][0] == 0 else 0


class TwoEnded:
    """Track the page sets of one migration.

    Operations in pairs: `next_front` and `recomputed`, `next_back` and `copied` or `copy_failed`.
    """

    def __init__(
        self,
        tokens: int,
        page_tokens: int,
        recompute: bool = True,
        copy: bool = True,
        failures: int = 3,
        present: int = 0,
    ) -> None:
        """Start with `tokens` tokens to bring, `page_tokens` per page set.

        `recompute` and `copy` enable the ends; copying stops after `failures` failed copies. `present`: full page sets,
        from the first one, that the destination has. Raises ValueError for negative tokens, `page_tokens` below 1, or
        more that are present than there are.
        """
        if tokens < 0 or page_tokens < 1:
            raise ValueError(f"{tokens} tokens in pages of {page_tokens} cannot be moved")
        if not 0 <= present * page_tokens <= tokens:
            raise ValueError(f"{present} page sets of {tokens} tokens cannot be there")
        self.tokens = tokens
        self._width = page_tokens
        self._recompute, self._copy = recompute, copy
        self._failures = failures
        self._groups = bytearray(-(-tokens // page_tokens))
        self._groups[:present] = bytes([_State.PRESENT]) * present
        self._counts = [len(self._groups) - present, 0, 0, 0, 0, present]  # page sets by state
        self._low = 0  # every page set below is here
        self._high = len(self._groups)  # no page set from here on is wanted
        self._grown = len(self._groups)  # page sets from here on were added during the migration: copied if possible
        self._blind = bytearray(len(self._groups))  # page sets without inputs for the front

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Return whether all page sets are here."""
        return sum(self._counts[_State.RECOMPUTED :]) == len(self._groups)

    @property
    def stuck(self) -> bool:
        """Return whether page sets are wanted that neither end can bring."""
        if not self._counts[_State.WANTED] or self._copy:
            return False
        self._close_in()
        first = self._low  # the first page set that is not here
        return not self._recompute or (self._groups[first] == _State.WANTED and self._blind[first] == 1)

    @property
    def recomputing(self) -> int:
        """Return the number of page sets being recomputed, which a step may be writing."""
        return self._counts[_State.RECOMPUTING]

    @property
    def copying(self) -> int:
        """Return the number of page sets requested from the source."""
        return self._counts[_State.COPYING]

    @property
    def front_rests(self) -> bool:
        """Return whether the front is idle and has nothing to do now, because the next page set must be copied."""
        if not self._recompute:
            return True
        self._close_in()
        first = self._first_not_brought()
        end = self._grown if self._copy else len(self._groups)
        return first >= end or (self._groups[first] == _State.WANTED and self._blind[first] == 1)

    @property
    def front_lacks(self) -> bool:
        """Return whether the next page set is not assigned; what the front was given beyond it must wait."""
        self._close_in()
        first = self._first_not_brought()
        return first < len(self._groups) and self._groups[first] == _State.WANTED

    @property
    def gap(self) -> tuple[int, int]:
        """Return the tokens [lo, hi) between both ends.

        `lo` is the first token that is not here; from `hi` on, all tokens are here or assigned.
        """
        self._close_in()
        lo = min(self._low * self._width, self.tokens)
        return lo, max(lo, min(self._high * self._width, self.tokens))

    @property
    def recomputed_spans(self) -> Spans:
        """Return the recomputed token ranges [lo, hi), in order.

        Disjoint from the copied ones; together they cover all tokens but those that were present, once complete.
        """
        return self._spans(_State.RECOMPUTED)

    @property
    def copied_spans(self) -> Spans:
        """Return the copied token ranges [lo, hi), in order."""
        return self._spans(_State.COPIED)

    # -- the front -----------------------------------------------------------------------------------------------------

    def next_front(self, chunk_tokens: int, ahead: bool = False) -> range | None:
        """Assign the front its next whole page sets, up to `chunk_tokens` tokens and at least one.

        Returns None if there are none now: all are assigned, or the front is busy, or what it would read or start from
        is on its way. `ahead`: also while it is busy, the page sets directly behind.
        """
        if not self._recompute:
            return None
        self._close_in()
        first = self._low
        while ahead and first < len(self._groups) and self._groups[first] == _State.RECOMPUTING:
            first += 1
        end = min(first + max(1, chunk_tokens // self._width), self._grown if self._copy else len(self._groups))
        last = first
        while last < end and self._groups[last] == _State.WANTED and not self._blind[last]:
            last += 1
        return self._assign_range(first, last, _State.RECOMPUTING)

    def inputs(self, spans: Spans) -> None:
        """Set the token ranges, in order, for which the front has inputs. By default it has them for all."""
        blind = bytearray(b"\x01") * len(self._groups)
        for lo, hi in spans:
            first = max(0, -(-lo // self._width))
            last = len(self._groups) if hi >= self.tokens else hi // self._width
            if first < last:
                blind[first:last] = bytes(last - first)
        self._blind = blind

    def recomputed(self, span: range) -> bool:
        """Record that the front's page sets are here.

        Returns False, and changes nothing, if they are not assigned to it.
        """
        return self._settle(span, _State.RECOMPUTING, _State.RECOMPUTED)

    def recompute_failed(self, span: range) -> bool:
        """Release page sets that the front will not bring; either end may get them.

        Returns False if they are not assigned to it.
        """
        return self._settle(span, _State.RECOMPUTING, _State.WANTED)

    def stop_recompute(self) -> None:
        """Stop the front; the page sets that it works on are wanted again."""
        self._recompute = False
        self._withdraw(_State.RECOMPUTING)

    # -- the back ------------------------------------------------------------------------------------------------------

    def next_back(self, window_groups: int) -> range | None:
        """Assign the back the last wanted page sets, up to `window_groups` in a row; None if there are none.

        Page sets that block the front, which has no inputs for them, come first. May be called again before they have
        arrived.
        """
        if not self._copy:
            return None
        self._close_in()
        gap = self._gap_before_front()
        if gap is not None:
            return self._assign_range(gap, self._end_of_gap(gap, max(1, window_groups)), _State.COPYING)
        first = self._high
        while (
            first > self._low
            and self._high - first < max(1, window_groups)
            and self._groups[first - 1] == _State.WANTED
        ):
            first -= 1
        return self._assign_range(first, self._high, _State.COPYING)

    def awaits(self, span: range) -> bool:
        """Return whether these page sets are assigned to the back; otherwise data for them must not be written."""
        return self._are(span, _State.COPYING)

    def copied(self, span: range) -> bool:
        """Record that the back's page sets are here.

        Returns False, and changes nothing, if they are not assigned to it.
        """
        return self._settle(span, _State.COPYING, _State.COPIED)

    def copy_failed(self, span: range) -> bool:
        """Record that the back's page sets did not arrive; either end may get them.

        Returns False if they are not assigned to the back any more.
        """
        if not self._settle(span, _State.COPYING, _State.WANTED):
            return False
        self._failures -= 1
        if self._failures <= 0:
            self.stop_copy()
        return True

    def stop_copy(self) -> None:
        """Stop the back, because the source is gone; the front brings the rest.

        Page sets that are being written must be reported as `copied` first.
        """
        self._copy = False
        self._withdraw(_State.COPYING)

    # -- both ends -----------------------------------------------------------------------------------------------------

    def extend(self, tokens: int) -> None:
        """Add the tokens that the sequence has computed since, up to `tokens`.

        The new page sets, and the last one if it was partial, are copied, or recomputed without copies. Raises
        ValueError for fewer tokens than before, or unless `is_complete`.
        """
        if not self.is_complete or tokens < self.tokens:
            raise ValueError(f"a move of {self.tokens} tokens cannot go on to {tokens} now")
        first = self.tokens // self._width if tokens > self.tokens else len(self._groups)
        for group in range(first, len(self._groups)):
            self._set(group, _State.WANTED)
        more = -(-tokens // self._width) - len(self._groups)
        self._groups.extend(bytes(more))
        self._blind[first:] = bytes(len(self._groups) - first)
        self._counts[_State.WANTED] += more
        self.tokens = tokens
        self._grown, self._low, self._high = first, min(self._low, first), len(self._groups)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _close_in(self) -> None:
        """Advance both ends over settled page sets; apart from failures and growth each moves in one direction only."""
        while self._low < len(self._groups) and self._groups[self._low] >= _State.RECOMPUTED:
            self._low += 1
        while self._high > self._low and self._groups[self._high - 1] != _State.WANTED:
            self._high -= 1

    def _gap_before_front(self) -> int | None:
        """Return the first wanted page set without inputs that keeps the front from page sets behind it, or None."""
        first = self._first_not_brought()
        if first >= self._high or self._groups[first] != _State.WANTED or not self._blind[first] or not self._recompute:
            return None
        end = min(self._high, self._grown)
        sighted = any(self._groups[group] == _State.WANTED and not self._blind[group] for group in range(first, end))
        return first if sighted else None

    def _first_not_brought(self) -> int:
        """Return the first page set that is neither here nor on its way from the source."""
        first = self._low
        while first < len(self._groups) and self._groups[first] >= _State.COPYING:
            first += 1
        return first

    def _end_of_gap(self, first: int, most: int) -> int:
        last = first
        while last < self._high and last - first < most and self._groups[last] == _State.WANTED and self._blind[last]:
            last += 1
        return last

    def _assign_range(self, first: int, last: int, to: _State) -> range | None:
        if first >= last:
            return None
        for group in range(first, last):
            self._set(group, to)
        return self._tokens(first, last)

    def _settle(self, span: range, before: _State, after: _State) -> bool:
        if not self._are(span, before):
            return False
        for group in self._within(span):
            self._set(group, after)
        if after == _State.WANTED:
            self._high = len(self._groups)
        return True

    def _withdraw(self, state: _State) -> None:
        for group in range(len(self._groups)):
            if self._groups[group] == state:
                self._set(group, _State.WANTED)
        self._high = len(self._groups)

    def _are(self, span: range, state: _State) -> bool:
        groups = self._within(span)
        return (
            len(groups) > 0
            and span == self._tokens(groups[0], groups[-1] + 1)
            and all(self._groups[group] == state for group in groups)
        )

    def _within(self, span: range) -> range:
        """Return the page sets of a token range; empty if the range is not part of this migration."""
        if not 0 <= span.start < span.stop <= self.tokens:
            return range(0)
        return range(span.start // self._width, -(-span.stop // self._width))

    def _tokens(self, first: int, last: int) -> range:
        return range(first * self._width, min(last * self._width, self.tokens))

    def _set(self, group: int, state: _State) -> None:
        self._counts[self._groups[group]] -= 1
        self._counts[state] += 1
        self._groups[group] = state

    def _spans(self, state: _State) -> Spans:
        spans: list[tuple[int, int]] = []
        for group, each in enumerate(self._groups):
            if each != state:
                continue
            tokens = self._tokens(group, group + 1)
            if spans and spans[-1][1] == tokens.start:
                spans[-1] = (spans[-1][0], tokens.stop)
            else:
                spans.append((tokens.start, tokens.stop))
        return tuple(spans)
