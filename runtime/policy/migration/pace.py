"""How fast the two ends of a move are, measured as it goes on, and what each is given so that it takes nothing the
other would do sooner.

Pure arithmetic over what whoever moves tells it; nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True)
class MigrationPace:
    """`front`, `back`: nanoseconds for a page group, the latest; None before the first. `front_since`, `back_since`:
    when each began what it is at (the back: the oldest that has not come)."""

    front: float | None = None
    back: float | None = None
    front_since: int = 0
    back_since: int = 0

    def ahead(self, groups: int, most: int) -> int:
        """Groups that the back may have under way while so many are left for both: never more than the front would
        leave to it.

        Until both are known one at a time: asked for too much, a slow link would hold up what the front could have done
        (BL-16).
        """
        if self.front is None or self.back is None:
            return 1
        share = self.front / max(self.front + self.back, 1.0)
        return max(1, min(most, int(groups * share / 2)))

    def chunk(self, tokens: int, most: int) -> int:
        """Tokens that the front may take at once of so many that are left: no more than it would do before the back
        comes.
        """
        if self.front is None or self.back is None:
            return most
        return min(most, int(tokens * self.back / max(self.front + self.back, 1.0)))


@dataclass(slots=True)
class SharedPace:
    """The same where what the front starts from comes over the link that the back's pages come over: nanoseconds for a
    page group that a row takes (`row`), and that the link takes for its inputs and its pages; the latest, None before
    the first.

    With m of P groups recomputed the row is at it for m * row, the link for m * inputs + (P - m) * pages: both are over
    at once where m = P * pages / (row + pages - inputs); and where a row is faster than its inputs come, each page that
    is copied only keeps it waiting.
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
        """It has come: the link was at it since it was asked for, or since what came before it."""
        took = (now - max(self._asked.pop((what, lo, hi), now), self._came)) / groups
        self._came = now
        if what == "inputs":
            self.inputs = took
        else:
            self.pages = took

    def record_row(self, groups: int, now: int) -> None:
        self.row = (now - self.row_since) / groups

    def chunk(self, tokens: int, behind: int, most: int) -> int:
        """Tokens that the front may be given of so many that are left, behind those that it has: its share of all of
        them, less these.
        """
        if self.row is None or self.inputs is None or self.pages is None:
            return most
        if self.row <= self.inputs:
            return min(tokens, most)
        share = (tokens + behind) * self.pages / max(self.row + self.pages - self.inputs, 1.0)
        return max(0, min(most, int(share) - behind))

    def supplied(self, groups: int, most: int, now: int) -> bool:
        """Whether rows of so many groups take as long as the link does for `most` of pages, behind which no inputs
        come.
        """
        return self.row is not None and groups * self.row >= most * self._page(now)

    def fetch(self, left: int, given: int, here: int, waiting: bool, most: int) -> int:
        """Page groups that may be under way, while so many are left for both and the front was given others, of `here`
        of which the inputs are here, behind the row that runs; `waiting`: for those of others."""
        if self.row is None or self.inputs is None or self.pages is None:
            return 1
        if (left + given) * max(self.row, self.inputs) <= self.pages:  # the front is through before they would come
            return 0
        if waiting:
            return min(most, int(here * self.row / max(self.pages, 1.0)))
        return max(1, min(most, int(left * self.row / max(self.row + self.pages, 1.0) / 2)))

    def _page(self, now: int) -> float:
        """What pages take; as long as none has come, at least as long as they have been awaited."""
        if self.pages is not None:
            return self.pages
        return max((now - since for (what, _, _), since in self._asked.items() if what == "pages"), default=0)
