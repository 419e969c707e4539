"""Measure how fast the two ends of a migration are, and divide the work so that both finish together.

Pure arithmetic on what the caller records; times in nanoseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

#: What is left of the pace of a front that has rested, after a migration.
_STALE_FRONT = 0.98
#: What is left of the time of a turn while the front rests, after each turn while it works.
_STALE_TURN = 0.97


@dataclass(slots=True)
class MigrationPace:
    """Track the pace of both ends: the front recomputes, the back copies.

    Fields:
        front, back: Latest time per page set in ns; None before the first.
        front_since, back_since: When each began its current work (the back: its oldest outstanding fetch).
        turn: Time in ns from a request of the back to its pages while the front rests, averaged; None before the first.
    """

    front: float | None = None
    back: float | None = None
    front_since: int = 0
    back_since: int = 0
    turn: float | None = None

    def add_turn(self, took: int, held_up: bool) -> None:
        """Add the time of a turn of the back; `held_up`: a row of the front ran meanwhile.

        A single stall counts little. While the front works, what is known of turns without it counts a little less
        after each, so that they are tried again.
        """
        if held_up:
            self.turn = None if self.turn is None else _STALE_TURN * self.turn
        else:
            self.turn = float(took) if self.turn is None else 0.75 * self.turn + 0.25 * min(took, 2 * self.turn)

    def front_rests(self, left: int, most: int) -> bool:
        """Return whether the back alone is faster, where pages that arrive wait for the end of a row of the front.

        A row takes `front` and brings a page set and those under way; meanwhile the back alone would have brought
        front / turn times those under way. Before a turn of the back alone is known the front rests, too.

        Args:
            left: Page sets that are not here yet.
            most: Page sets that the back has under way at once.
        """
        if self.turn is None or self.front is None:
            return self.turn is None
        return self.front * min(left, most) > self.turn * min(left, most + 1)

    def ahead(self, groups: int, most: int) -> int:
        """Return the page sets that the back may have under way, with `groups` left for both ends.

        Never more than the front would leave to it. Until both paces are known, one at a time: with too many requests,
        a slow link would delay what the front could have done (BL-16).
        """
        if self.front is None or self.back is None:
            return 1
        share = self.front / max(self.front + self.back, 1.0)
        return max(1, min(most, int(groups * share / 2)))

    def chunk(self, tokens: int, most: int) -> int:
        """Return the tokens that the front may take at once out of `tokens` left.

        No more than it recomputes before the back would have copied the rest.
        """
        if self.front is None or self.back is None:
            return most
        return min(most, int(tokens * self.back / max(self.front + self.back, 1.0)))


@lru_cache(maxsize=4096)
def copy_turns(groups: int, most: int, alone: bool = False) -> int:
    """Return how many answers the back waits for, one after another, until `groups` page sets are copied.

    As in `MigrationPace.ahead` it has half of what is left for it under way at once, at most `most` page sets; `alone`,
    while the front rests, as many as it may.
    """
    if alone:
        return -(-groups // most)
    turns = 0
    while groups > 0:
        groups -= max(1, min(most, groups // 2))
        turns += 1
    return turns


class PaceMemory:
    """Paces of earlier migrations, by stage and source: another one begins as the last of its kind ended."""

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._paces: OrderedDict[tuple[str, str], MigrationPace] = OrderedDict()

    def begin(self, stage: str, source: str) -> MigrationPace:
        """Return the pace that a migration begins with."""
        known = self._paces.get((stage, source))
        return MigrationPace() if known is None else MigrationPace(known.front, known.back, turn=known.turn)

    def end(self, stage: str, source: str, pace: MigrationPace) -> None:
        """Keep the pace that a migration has ended with.

        That of a front that has rested all the time counts a little less after each, so that it is tried again.
        """
        front, rested = pace.front, pace.turn is not None and not pace.front_since
        if front is not None and rested:
            front *= _STALE_FRONT
        self._paces[stage, source] = MigrationPace(front, pace.back, turn=pace.turn)
        self._paces.move_to_end((stage, source))
        if len(self._paces) > self._most:
            self._paces.popitem(last=False)


@dataclass(slots=True)
class SharedPace:
    """Track the pace when the inputs of recomputed rows travel over the same link as the copied pages.

    Fields:
        row: Latest time in ns that a row takes per page set; None before the first.
        inputs: The same for the link to bring a page set's inputs.
        pages: The same for the link to bring a page set's pages.

    With m of P page sets recomputed, rows take m * row and the link m * inputs + (P - m) * pages. Both finish together
    for m = P * pages / (row + pages - inputs). If a row is faster than its inputs arrive, each copied page only delays
    it.
    """

    row: float | None = None
    inputs: float | None = None
    pages: float | None = None
    row_since: int = 0
    _came: int = 0
    _asked: dict[tuple[str, int, int], int] = field(default_factory=dict)

    def asks(self, what: Literal["inputs", "pages"], lo: int, hi: int, now: int) -> None:
        self._asked[what, lo, hi] = now

    def record_arrival(self, what: Literal["inputs", "pages"], lo: int, hi: int, groups: int, now: int) -> None:
        """Record an arrival. The link worked on it since its request, or since the previous arrival."""
        took = (now - max(self._asked.pop((what, lo, hi), now), self._came)) / groups
        self._came = now
        if what == "inputs":
            self.inputs = took
        else:
            self.pages = took

    def record_row(self, groups: int, now: int) -> None:
        self.row = (now - self.row_since) / groups

    def chunk(self, tokens: int, behind: int, most: int) -> int:
        """Return the tokens to give the front out of `tokens` left.

        That is its share of all tokens, less the `behind` tokens that it has already.
        """
        if self.row is None or self.inputs is None or self.pages is None:
            return most
        if self.row <= self.inputs:
            return min(tokens, most)
        share = (tokens + behind) * self.pages / max(self.row + self.pages - self.inputs, 1.0)
        return max(0, min(most, int(share) - behind))

    def supplied(self, groups: int, most: int, now: int) -> bool:
        """Return whether rows of `groups` page sets keep the front busy while the link brings `most` page sets.

        If so, no further inputs need to be requested yet.
        """
        return self.row is not None and groups * self.row >= most * self._page(now)

    def fetch(self, left: int, given: int, here: int, waiting: bool, most: int) -> int:
        """Return the page sets that may be under way.

        Args:
            left: Page sets left for both ends.
            given: Page sets given to the front.
            here: Those of them with inputs that have arrived, behind the row that runs.
            waiting: The front waits for inputs of further ones.
            most: Upper limit.
        """
        if self.row is None or self.inputs is None or self.pages is None:
            return 1
        if (left + given) * max(self.row, self.inputs) <= self.pages:  # the front finishes before they would arrive
            return 0
        if waiting:
            return min(most, int(here * self.row / max(self.pages, 1.0)))
        return max(1, min(most, int(left * self.row / max(self.row + self.pages, 1.0) / 2)))

    def _page(self, now: int) -> float:
        """Return the time of a page set; before the first arrival, the time that the oldest has been awaited."""
        if self.pages is not None:
            return self.pages
        return max((now - since for (what, _, _), since in self._asked.items() if what == "pages"), default=0)
