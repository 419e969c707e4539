"""Learn how long a decode step takes by its number of rows: d(B) (QL-16); and how far that is off.

A mean of the latest steps is kept for each of a few sizes. Between two of them the time is interpolated, beyond the
largest it grows in proportion; below the smallest, half of its time is assumed not to depend on the rows. More rows are
never taken to be faster.

What a deadline has to keep in reserve for so many steps is the 99 % quantile of how much as many consecutive ones
exceeded their means: sums over windows of the latest steps, so that stalls count as often as they come, and neighbours
that are slow together count together. As in `policy.slo.bounds`, no distribution is assumed. Pure; times in ns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate

#: Sizes at which times are kept; a step counts for the largest size that it reaches.
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
#: Weight of the newest step of a size, once there are as many as its inverse.
_LATEST = 1 / 32
#: Times above this multiple of the mean count as this much: a stall says little of the next step.
_STALL = 3.0
#: Errors of steps that are kept, and the least number from which a quantile is taken.
_KEPT, _LEAST = 512, 32
#: Share of windows that exceed their means by no more than is kept in reserve.
_SURE = 0.99
#: Share of the steps' time that is kept in reserve until their errors are known.
_ASSUMED = 0.15
#: New errors after which quantiles are taken again: one costs O(errors kept).
_AGAIN = 16


class StepTimes:
    """Times of the decode steps of one device."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[int, float, float]] = {}  # by size: steps, mean rows, mean time
        self._curve: list[tuple[float, float]] = []
        self._errors: deque[float] = deque(maxlen=_KEPT)
        self._added = 0
        self._excess: dict[int, float] = {}

    @property
    def known(self) -> bool:
        """Whether there has been any step."""
        return bool(self._curve)

    def add(self, rows: int, elapsed: float) -> None:
        """Record a step of so many rows, at least 1."""
        if self._curve:
            self._errors.append(elapsed - self.at(rows))
            self._added += 1
            if self._added % _AGAIN == 0:
                self._excess.clear()
        size = _SIZES[bisect_left(_SIZES, rows + 1) - 1]
        steps, count, mean = self._means.get(size, (0, float(rows), elapsed))
        weight = max(1 / (steps + 1), _LATEST)
        elapsed = min(elapsed, _STALL * mean)
        self._means[size] = (steps + 1, count + (rows - count) * weight, mean + (elapsed - mean) * weight)
        longest, self._curve = 0.0, []
        for _, count, mean in sorted(self._means.values(), key=lambda each: each[1]):
            longest = max(longest, mean)
            self._curve.append((count, longest))

    def at(self, rows: float) -> float:
        """Return the time of a step of so many rows. Raises IndexError if there has been none."""
        curve = self._curve
        (least, shortest), (most, longest) = curve[0], curve[-1]
        if rows <= least:
            return shortest * (1 + rows / least) / 2
        if rows >= most:
            return longest * rows / most
        after = bisect_left(curve, (rows, 0.0))
        (low, begin), (high, end) = curve[after - 1], curve[after]
        return begin + (end - begin) * (rows - low) / (high - low)

    def excess(self, steps: int) -> float:
        """Return the time by which so many steps together exceed their means in one of a hundred cases; at least 0.

        Raises IndexError if there has been no step.
        """
        if len(self._errors) < _LEAST:
            return _ASSUMED * steps * self._curve[-1][1]
        # More steps than a quarter of what is kept leave too few windows: what exceeds grows in proportion at most.
        width = min(steps, len(self._errors) // 4)
        if width not in self._excess:
            sums = [0.0, *accumulate(self._errors)]
            windows = sorted(later - sooner for sooner, later in zip(sums, sums[width:], strict=False))
            self._excess[width] = max(windows[int(_SURE * (len(windows) - 1))], 0.0)
        return self._excess[width] * steps / width
