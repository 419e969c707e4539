"""Set the width of forecasts' bounds by how far earlier forecasts were off, so that they hold as often as they say.

Split conformal prediction: with the 95 % quantile of the latest scores |measured - forecast| / standard deviation as
the width, the next outcome lies within in 95 % of the cases, whatever the distribution, as long as outcomes are like
the latest ones. A normal distribution's 1.96 is what holds until there are outcomes. Pure, deterministic.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

#: Standard deviations of a normal distribution within which 95 % lie.
_NORMAL = 1.96
#: Outcomes that are kept, and the least number from which a quantile is taken.
_KEPT, _LEAST = 512, 64


class OutcomeBounds:
    """The width of bounds, in standard deviations. Adding an outcome costs O(outcomes kept)."""

    def __init__(self, share: float = 0.95) -> None:
        self._share = share
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []

    @property
    def sigmas(self) -> float:
        """Standard deviations on either side within which this share of the latest outcomes lie."""
        count = len(self._sorted)
        if count < _LEAST:
            return _NORMAL
        return self._sorted[min(math.ceil((count + 1) * self._share), count) - 1]

    def add(self, score: float) -> None:
        """Record how many standard deviations an outcome was off."""
        self._latest.append(score)
        insort(self._sorted, score)
        if len(self._latest) > _KEPT:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]
