"""Predict how many tokens an answer still gets, from the lengths of earlier answers of its class (QL-16, UN-11).

A class is what is seen of a request beforehand: its model, and the magnitudes of its prompt and of its limit. Of each
class a histogram of lengths is kept, in bins that grow with the length. The prediction is conditional on the tokens
made so far: an answer of 100 tokens is not one of those that ended after 10.

Of the answers that began at one time the short ones end first, so that those that have ended are too short on average.
Answers that still run therefore count, too, as longer than what they have so far: the product-limit estimator (Kaplan
and Meier, 1958). Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

#: Weight of a length after each later one of its class.
_FADING = 0.999
#: Most classes; the least recently used one is forgotten.
_CLASSES = 4096
#: Answers of a class from which its predictions count as learned.
_ENOUGH = 16
#: Share of the longest answers that count twice in `AnswerLengths.inflated`.
_TAIL = 0.1
#: Growth of a bin's upper bound over that of the bin before.
_GROWTH = 1.1


def _edges() -> tuple[int, ...]:
    edges = [1]
    while edges[-1] < 1 << 24:
        edges.append(max(edges[-1] + 1, int(edges[-1] * _GROWTH)))
    return tuple(edges)


#: Longest length of each bin.
_EDGES = _edges()


class AnswerClass(NamedTuple):
    """A class of requests. `prompt` and `most` are bit lengths of the prompt's tokens and of `max_tokens`."""

    model: str
    prompt: int
    most: int


def class_of(model: str, prompt: int, most: int) -> AnswerClass:
    """Return the class of a request with so many prompt tokens and at most so many of its answer."""
    return AnswerClass(model, prompt.bit_length(), most.bit_length())


class Rest(NamedTuple):
    """Tokens that are still to come: mean and variance."""

    mean: float
    variance: float


@dataclass(slots=True)
class _Histogram:
    """Weights of lengths by bin.

    Fields:
        weights: Of the answers that have ended, times `scale`.
        squares: Sum of the squares of these weights.
        running: Tokens so far of each answer that has not ended.
        count: Answers that have ended.
        ends: For each bin with answers, in order: the bin, and the sums of probability, probability x length,
            probability x length^2 over it and all longer ones; None while they have to be computed again.
    """

    weights: dict[int, float] = field(default_factory=dict)
    squares: float = 0.0
    scale: float = 1.0
    running: dict[str, int] = field(default_factory=dict)
    ends: list[tuple[int, float, float, float]] | None = None
    count: int = 0

    def add(self, length: int) -> None:
        self.count += 1
        # Later lengths weigh more, instead of all earlier ones less.
        self.scale /= _FADING
        at = bisect_left(_EDGES, length)
        self.weights[at] = self.weights.get(at, 0.0) + self.scale
        self.squares += self.scale * self.scale
        self.ends = None
        if self.scale > 1e100:
            self.weights = {each: weight / self.scale for each, weight in self.weights.items()}
            self.squares /= self.scale * self.scale
            self.scale = 1.0

    def above(self, made: int) -> tuple[float, float, float]:
        """Return the sums over all lengths above `made`."""
        if self.ends is None:
            self.ends = []
            whole = first = second = 0.0
            for at, share in reversed(self._shares()):
                length = _middle(at)
                whole, first, second = whole + share, first + share * length, second + share * length * length
                self.ends.append((at, whole, first, second))
            self.ends.reverse()
        # The first bin that ends above `made`.
        index = bisect_left(self.ends, bisect_right(_EDGES, made), key=lambda end: end[0])
        return self.ends[index][1:] if index < len(self.ends) else (0.0, 0.0, 0.0)

    def rest(self, made: int, most: int) -> list[tuple[float, int]]:
        """Return (probability, length) of the lengths above `made`, none above `most`."""
        return [(share, min(max(_middle(at), made + 1), most)) for at, share in self._shares() if _EDGES[at] > made]

    def _shares(self) -> list[tuple[int, float]]:
        """Return (bin, probability) in order, by the product-limit estimator. O(bins + running answers)."""
        made = sorted(self.running.values())
        ended, passed = sum(self.weights.values()) / self.scale, 0
        left, found = 1.0, []
        for at in sorted(self.weights):
            weight, middle = self.weights[at] / self.scale, _middle(at)
            while passed < len(made) and made[passed] < middle:
                passed += 1
            risk = ended + len(made) - passed
            share = left * weight / risk
            found.append((at, share))
            left, ended = left - share, ended - weight
        if passed < len(made):  # longer than all that have ended: assumed to get twice as long as they are
            at = bisect_left(_EDGES, round(2 * sum(made[passed:]) / (len(made) - passed)))
            found.append((at, left))
        return found


def _middle(at: int) -> int:
    return _EDGES[at] if at == 0 else (_EDGES[at - 1] + 1 + _EDGES[at]) // 2


class AnswerLengths:
    """Lengths of answers by class.

    Until there are answers of a class, its answers are assumed to reach their limit. One that is longer than all of its
    class so far is assumed to get twice as long as it is.
    """

    def __init__(self) -> None:
        self._classes: OrderedDict[AnswerClass, _Histogram] = OrderedDict()
        #: Number of answers so far: predictions stay while it does.
        self.version = 0

    def sample(self, key: AnswerClass, seq: str, made: int) -> None:
        """Record how many tokens a running answer has; `add` or `drop_running` ends that."""
        histogram = self._classes.get(key)
        if histogram is not None and made > 0 and histogram.running.get(seq) != made:
            histogram.running[seq], histogram.ends = made, None
            self.version += 1

    def drop_running(self, key: AnswerClass, seq: str) -> None:
        """Record that an answer was given up, so that its length stays unknown."""
        histogram = self._classes.get(key)
        if histogram is not None and histogram.running.pop(seq, None) is not None:
            histogram.ends = None
            self.version += 1

    def add(self, key: AnswerClass, length: int, seq: str = "") -> None:
        """Record the length of an answer that ended by itself or at its limit, in tokens."""
        histogram = self._classes.setdefault(key, _Histogram())
        self._classes.move_to_end(key)
        histogram.running.pop(seq, None)
        histogram.add(max(length, 1))
        self.version += 1
        if len(self._classes) > _CLASSES:
            self._classes.popitem(last=False)

    def known(self, key: AnswerClass) -> bool:
        """Return whether there have been enough answers of a class to predict more of them by."""
        histogram = self._classes.get(key)
        return histogram is not None and histogram.count >= _ENOUGH

    def rest(self, key: AnswerClass, made: int, most: int) -> Rest:
        """Return what is still to come after `made` tokens, of at most `most` in all. O(log bins)."""
        histogram, limit = self._classes.get(key), max(most - made, 1)
        weight, first, second = (0.0, 0.0, 0.0) if histogram is None else histogram.above(made)
        if not weight:
            return Rest(float(limit if histogram is None else min(limit, max(made, 1))), 0.0)
        mean = first / weight
        return Rest(min(max(mean - made, 1.0), limit), max(second / weight - mean * mean, 0.0))

    def doubt(self, key: AnswerClass) -> float:
        """Return the relative standard deviation of a class's mean length, as far as its answers tell it."""
        histogram = self._classes.get(key)
        weight, first, second = (0.0, 0.0, 0.0) if histogram is None else histogram.above(0)
        if histogram is None or not weight:
            return 1.0
        total = sum(histogram.weights.values())
        return math.sqrt(max(second * weight / first**2 - 1, 0.0) * histogram.squares) / total

    def expected(self, key: AnswerClass, made: int, most: int) -> float:
        """Return the mean of the tokens that are still to come after `made`, of at most `most` in all; at least 1."""
        return self.rest(key, made, most).mean

    def inflated(self, key: AnswerClass, made: int, most: int) -> float:
        """Return the mean of the tokens that are still to come, the longest answers of the class counted twice."""
        histogram = self._classes.get(key)
        found = [] if histogram is None else histogram.rest(made, most)
        whole = sum(share for share, _ in found)
        if not whole:
            return self.rest(key, made, most).mean
        total, left = 0.0, _TAIL * whole
        for share, length in reversed(found):
            total += (length - made) * (share + min(share, left))
            left = max(left - share, 0.0)
        return total / whole

    def at_most(self, key: AnswerClass, made: int, most: int, share: float = 0.95) -> int:
        """Return how many tokens are still to come in this share of the cases; at least 1."""
        histogram = self._classes.get(key)
        found = [] if histogram is None else histogram.rest(made, most)
        if not found:
            return round(self.rest(key, made, most).mean)
        left = share * sum(weight for weight, _ in found)
        for weight, length in found:
            left -= weight
            if left <= 0:
                return max(length - made, 1)
        return max(most - made, 1)
