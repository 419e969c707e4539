"""One move of a sequence's K and V, from both ends at once: recomputed from the front, copied from the back, until they
meet (BL-16).

Contract: a `TwoEnded` belongs to the destination, which is the only one to say who brings a page group. Each group is

    wanted -> recomputing -> recomputed        wanted -> copying -> copied        (a copy that fails is wanted again)

so it has exactly one winner: a side is given groups only by `next_front` and `next_back`, and an answer for groups that
are not given to its side any more is refused. A group is recomputed only when all before it is here, for attention
reads that. Tokens go in ranges that begin with a group and end with one, or with the last token.

Groups that the front has no inputs for (`inputs`) are copied: those that it stands before come first, so that it can go
on behind them.

It does not know pages' places, tensors, clocks or how fast either side is (`migration` does), and it sends nothing.
"""

from __future__ import annotations

from enum import IntEnum


class _State(IntEnum):
    WANTED = 0
    RECOMPUTING = 1
    COPYING = 2
    RECOMPUTED = 3
    COPIED = 4


Spans = tuple[tuple[int, int], ...]


def met_at(recomputed: Spans) -> int:
    """The first token that was not recomputed, of a move that is done."""
    return recomputed[0][1] if recomputed and recomputed[0][0] == 0 else 0


class TwoEnded:
    """The groups of one move. Verbs in pairs: `next_front` and `recomputed`, `next_back` and `copied` or
    `copy_failed`.
    """

    def __init__(
        self, tokens: int, page_tokens: int, recompute: bool = True, copy: bool = True, failures: int = 3
    ) -> None:
        """`tokens` to bring here, `page_tokens` to a group; which sides may work; after so many failed copies that side
        gives up.

        Raises ValueError for negative tokens or pages without any.
        """
        if tokens < 0 or page_tokens < 1:
            raise ValueError(f"{tokens} tokens in pages of {page_tokens} cannot be moved")
        self.tokens = tokens
        self._width = page_tokens
        self._recompute, self._copy = recompute, copy
        self._failures = failures
        self._groups = bytearray(-(-tokens // page_tokens))
        self._counts = [len(self._groups), 0, 0, 0, 0]  # groups by state
        self._low = 0  # every group below is here
        self._high = len(self._groups)  # no group from here on is wanted
        self._grown = len(self._groups)  # groups from here on grew during the move: copied, if at all possible
        self._blind = bytearray(len(self._groups))  # groups that the front has no inputs for

    # -- what is the case ----------------------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether all of it is here."""
        return self._counts[_State.RECOMPUTED] + self._counts[_State.COPIED] == len(self._groups)

    @property
    def stuck(self) -> bool:
        """Whether groups are wanted that no side can bring any more, now or later."""
        if not self._counts[_State.WANTED] or self._copy:
            return False
        self._close_in()
        first = self._low  # the first that is not here
        return not self._recompute or (self._groups[first] == _State.WANTED and self._blind[first] == 1)

    @property
    def recomputing(self) -> int:
        """Groups being recomputed: a step may be writing them."""
        return self._counts[_State.RECOMPUTING]

    @property
    def copying(self) -> int:
        """Groups asked for from the source."""
        return self._counts[_State.COPYING]

    @property
    def front_rests(self) -> bool:
        """Whether the front is neither at work nor could be given anything now: what is next must be copied."""
        if not self._recompute:
            return True
        self._close_in()
        first = self._first_not_brought()
        end = self._grown if self._copy else len(self._groups)
        return first >= end or (self._groups[first] == _State.WANTED and self._blind[first] == 1)

    @property
    def front_lacks(self) -> bool:
        """Whether what is next is nobody's yet: whatever else the front was given must wait for it."""
        self._close_in()
        first = self._first_not_brought()
        return first < len(self._groups) and self._groups[first] == _State.WANTED

    @property
    def gap(self) -> tuple[int, int]:
        """Tokens [lo, hi) between both ends: `lo` is the first that is not here, and from `hi` on all are here or given
        to somebody.
        """
        self._close_in()
        lo = min(self._low * self._width, self.tokens)
        return lo, max(lo, min(self._high * self._width, self.tokens))

    @property
    def recomputed_spans(self) -> Spans:
        """Tokens [lo, hi) that were recomputed, in order. Disjoint from those copied; together they are all tokens once
        it is done.
        """
        return self._spans(_State.RECOMPUTED)

    @property
    def copied_spans(self) -> Spans:
        """Tokens [lo, hi) that were copied, in order."""
        return self._spans(_State.COPIED)

    # -- the front -----------------------------------------------------------------------------------------------------

    def next_front(self, chunk_tokens: int, ahead: bool = False) -> range | None:
        """Give the front its next whole groups, as many as `chunk_tokens` hold and at least one; None while there are
        none for it: they are all given, it is at work, or what it would read, or start from, is still on its way.
        `ahead`: also while it is at work, those right behind."""
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
        """The front has inputs for these tokens, in order, and for no others. Without this it has them for all."""
        blind = bytearray(b"\x01") * len(self._groups)
        for lo, hi in spans:
            first = max(0, -(-lo // self._width))
            last = len(self._groups) if hi >= self.tokens else hi // self._width
            if first < last:
                blind[first:last] = bytes(last - first)
        self._blind = blind

    def recomputed(self, span: range) -> bool:
        """The front's groups are here. False, and nothing changes, if they are not the front's."""
        return self._settle(span, _State.RECOMPUTING, _State.RECOMPUTED)

    def recompute_failed(self, span: range) -> bool:
        """The front will not bring these; either side may be given them. False if they are not the front's."""
        return self._settle(span, _State.RECOMPUTING, _State.WANTED)

    def stop_recompute(self) -> None:
        """The front can do no more; what it works on is wanted again."""
        self._recompute = False
        self._withdraw(_State.RECOMPUTING)

    # -- the back ------------------------------------------------------------------------------------------------------

    def next_back(self, window_groups: int) -> range | None:
        """Give the back the last groups that are wanted, up to `window_groups` in a row, but first those that the front
        waits for and has no inputs for itself; None while there are none. It may be asked again before they have come.
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
        """Whether these are groups that the back was given: else what has come of them must not be written."""
        return self._are(span, _State.COPYING)

    def copied(self, span: range) -> bool:
        """The back's groups are here. False, and nothing changes, if they are not the back's."""
        return self._settle(span, _State.COPYING, _State.COPIED)

    def copy_failed(self, span: range) -> bool:
        """The back's groups did not come; either side may be given them. False if they are not the back's (any
        more).
        """
        if not self._settle(span, _State.COPYING, _State.WANTED):
            return False
        self._failures -= 1
        if self._failures <= 0:
            self.stop_copy()
        return True

    def stop_copy(self) -> None:
        """The source is gone: what has not come is the front's, to the end. Groups that are being written must be
        `copied` first.
        """
        self._copy = False
        self._withdraw(_State.COPYING)

    # -- the whole -----------------------------------------------------------------------------------------------------

    def extend(self, tokens: int) -> None:
        """The sequence has `tokens` tokens by now. What is new is copied, with all of the last group if that was
        partial; without copies it is recomputed. Raises ValueError for fewer tokens than before, or unless it is
        `done`."""
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
        """Move both ends over what is settled. Each moves a group at a time and one way only, but for failures and
        growth.
        """
        while self._low < len(self._groups) and self._groups[self._low] >= _State.RECOMPUTED:
            self._low += 1
        while self._high > self._low and self._groups[self._high - 1] != _State.WANTED:
            self._high -= 1

    def _gap_before_front(self) -> int | None:
        """The first wanted group that keeps the front from others behind it, for want of inputs."""
        first = self._first_not_brought()
        if first >= self._high or self._groups[first] != _State.WANTED or not self._blind[first] or not self._recompute:
            return None
        end = min(self._high, self._grown)
        sighted = any(self._groups[group] == _State.WANTED and not self._blind[group] for group in range(first, end))
        return first if sighted else None

    def _first_not_brought(self) -> int:
        """The first group that is neither here nor on its way from the source."""
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
        """Groups of tokens that are this move's; none for others."""
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
