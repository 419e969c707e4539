"""Set the width of forecasts' bounds by how far earlier forecasts were off, so that they hold as often as they say.

An error has a part of its own, from the lengths of the answers ahead, and a part in common with those of all requests
that wait meanwhile: the machine is slower than it was. `CommonError` learns how large it is, relative to the forecast.

Split conformal prediction: with the 95 % quantile of the latest scores |measured - forecast| / standard deviation as
the width, the next outcome lies within in 95 % of the cases, whatever the distribution, as long as outcomes are like
the latest ones. They are not where a machine changes. So the quantile that is taken follows the outcomes, too (adaptive
conformal inference; Gibbs and Candes, 2021): a higher one after each outcome that lay outside, a lower one after each
that lay within, in the proportion of 95 to 5. Slowly, because outcomes are known a wait later, and those of a wave of
requests all at once. A normal distribution's 1.96 is what holds until there are outcomes.

Outcomes of requests that waited at the same time have errors in common, and count like few: of two that ended a second
apart after a wait of 50, the later one tells a fiftieth of what one alone does (`independence`). The largest of 8
independent errors holds the next one in 8 of 9 cases, so 95 % take outcomes of many waits: more are kept, and followed
more slowly, where many end within one. Pure, deterministic.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

#: Standard deviations of a normal distribution within which 95 % lie.
_NORMAL = 1.96
#: Outcomes that are kept, more of them until they are worth so many independent ones, and most of them; the least
#: number from which a quantile is taken.
_KEPT, _ENOUGH, _MOST_KEPT, _LEAST = 4096, 64.0, 16_384, 64
#: Change of the quantile after an outcome outside, at most, and for a whole independent one; its limits.
_RATE, _INDEPENDENT_RATE = 0.0005, 0.05
_LOW, _HIGH = 0.8, 0.995
#: Weight of an error after each later one.
_FADING = 0.9995
#: Relative error in common that is assumed, with the weight of so many outcomes.
_ASSUMED, _PRIOR = 0.05, 64.0
#: Outcomes of which the own part is larger than this share of the forecast tell little of the part in common; and how
#: far one may be off to count in full.
_OWN, _MOST = 0.05, 0.25


class OutcomeBounds:
    """The width of bounds, in standard deviations. Adding an outcome costs O(outcomes kept)."""

    def __init__(self, share: float = 0.95) -> None:
        self._share = self._taken = share
        #: Scores, each with its independence, and the sum of these.
        self._latest: deque[tuple[float, float]] = deque()
        self._worth = 0.0
        self._sorted: list[float] = []

    @property
    def sigmas(self) -> float:
        """Standard deviations on either side within which this share of the next outcomes lie."""
        count = len(self._sorted)
        if count < _LEAST:
            return _NORMAL
        return self._sorted[min(math.ceil((count + 1) * self._taken), count) - 1]

    def add(self, score: float, within: bool, independence: float = 1.0) -> None:
        """Record how many standard deviations an outcome was off, and whether it lay within the bounds it was given.

        `independence`: share of its time since the outcome before it, from 0 to 1.
        """
        if len(self._sorted) >= _LEAST:
            rate = min(_RATE, _INDEPENDENT_RATE * independence)
            self._taken = min(max(self._taken + rate * (self._share - within), _LOW), _HIGH)
        self._latest.append((score, independence))
        self._worth += independence
        insort(self._sorted, score)
        while len(self._latest) > _KEPT and (self._worth > _ENOUGH or len(self._latest) > _MOST_KEPT):
            oldest, worth = self._latest.popleft()
            self._worth -= worth
            del self._sorted[bisect_left(self._sorted, oldest)]


def independence(since: float, took: float) -> float:
    """Return what share of an outcome is its own: it took `took`, and ended `since` after the one before it."""
    return min(1.0, since / max(took, 1.0))


class CommonError:
    """The relative standard deviation of the part of errors that many requests have in common."""

    def __init__(self) -> None:
        self._squares, self._weight = 0.0, 0.0

    @property
    def relative(self) -> float:
        return math.sqrt(max(self._squares + _PRIOR * _ASSUMED**2, 0.0) / (self._weight + _PRIOR))

    def add(self, told: float, sigma: float, took: float) -> None:
        """Record an outcome. `sigma`: standard deviation of the error's own part."""
        told = max(told, 1.0)
        weight = 1 / (1 + (sigma / (_OWN * told)) ** 2) ** 2
        # Negative ones count, too: errors smaller than their own part say that there is nothing in common.
        square = ((took - told) ** 2 - sigma**2) / told**2
        self._squares = _FADING * self._squares + weight * min(max(square, -(_MOST**2)), _MOST**2)
        self._weight = _FADING * self._weight + weight
