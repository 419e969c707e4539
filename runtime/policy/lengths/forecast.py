"""A forecast of one answer's length: a probability for each bucket of lengths (TI-10, UN-11).

    edges 0, 200, 400    mass .7, .2, .1        bucket 0: 1 to 199 tokens, 1: 200 to 399, 2: 400 to the answer's limit

All questions are conditional on the tokens made so far: an answer that has 250 tokens is in bucket 1 or 2. Within a
bucket all lengths are equally likely. An answer that outlives all buckets with mass is in the one where it is (TI-22).
What is forecast to be longer than the answer's limit is as long as the limit. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class _Part(NamedTuple):
    """Lengths from `low` to `high`, both included, with their probability."""

    low: int
    high: int
    mass: float


@dataclass(frozen=True, slots=True)
class LengthForecast:
    """A distribution of lengths.

    Fields:
        edges: Least length of each bucket, in tokens, growing from 0; the last bucket has no end. A length of 0 counts
            as 1.
        mass: Probability of each bucket; need not sum to 1.

    Raises ValueError for edges or masses that are none.
    """

    edges: tuple[int, ...]
    mass: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.edges or self.edges[0] != 0 or any(low >= high for low, high in pairwise(self.edges)):
            raise ValueError("edges grow from 0")
        if len(self.mass) != len(self.edges) or not all(0 <= each < math.inf for each in self.mass):
            raise ValueError("there is one mass for each bucket, at least 0")
        if not sum(self.mass) > 0:
            raise ValueError("some bucket has mass")

    @property
    def bucket(self) -> int:
        """The most likely bucket, the shorter one of two that are equally likely."""
        return max(range(len(self.mass)), key=lambda at: self.mass[at])

    def lower(self, made: int, limit: int) -> int:
        """Return the least length of the bucket that is most likely after `made` tokens; above `made`, at most `limit`.

        The paper's choice for its reservation rules, clamped: the lower end of bucket 0 is 0 there.
        """
        best = max(self._remaining(made, limit), key=lambda part: part.mass)
        return min(best.low, max(limit, made + 1))

    def mean(self, made: int, limit: int) -> float:
        """Return the mean length after `made` tokens."""
        parts = self._parts(made, limit)
        return sum(part.mass * (part.low + part.high) / 2 for part in parts) / sum(part.mass for part in parts)

    def quantile(self, share: float, made: int, limit: int) -> int:
        """Return the length that is not exceeded with this probability, after `made` tokens."""
        parts = self._parts(made, limit)
        left = share * sum(part.mass for part in parts)
        for low, high, mass in parts:
            if left <= mass:
                return low + min(int(left / mass * (high - low + 1)), high - low)
            left -= mass
        return parts[-1].high

    def _parts(self, made: int, limit: int) -> list[_Part]:
        """Return what is left of the buckets with mass above `made`, longer lengths as `limit`; never nothing."""
        return [piece for part in self._remaining(made, limit) for piece in _capped(part, max(limit, made + 1))]

    def _remaining(self, made: int, limit: int) -> list[_Part]:
        """Return what is left of the buckets with mass above `made`; never nothing."""
        limit = max(limit, made + 1)
        found = [_cut(part, made + 1) for part in self._buckets(limit) if part.mass and part.high > made]
        if not found:
            at = bisect_right(self.edges, made + 1) - 1
            end = self.edges[at + 1] - 1 if at + 1 < len(self.edges) else limit
            return [_Part(min(made + 1, limit), max(min(end, limit), made + 1), 1.0)]
        return found

    def _buckets(self, limit: int) -> Iterator[_Part]:
        for at, (low, mass) in enumerate(zip(self.edges, self.mass, strict=True)):
            high = self.edges[at + 1] - 1 if at + 1 < len(self.edges) else max(limit, low)
            yield _Part(max(low, 1), max(high, 1), mass)


def _cut(part: _Part, first: int) -> _Part:
    """Return the part of a bucket from `first` on, with its share of the mass."""
    low = max(part.low, first)
    return _Part(low, part.high, part.mass * (part.high - low + 1) / (part.high - part.low + 1))


def _capped(part: _Part, last: int) -> Iterator[_Part]:
    """Yield a part up to `last`, and what is longer as that long."""
    each = part.mass / (part.high - part.low + 1)
    if part.low <= last:
        yield _Part(part.low, min(part.high, last), each * (min(part.high, last) - part.low + 1))
    if part.high > last:
        yield _Part(last, last, each * (part.high - max(part.low - 1, last)))
