"""Buckets of lengths of answers, and how well predictions of them are: accuracy beside the most frequent one (TI-10).

    finest width 20, limit 320    edges 0, 20, …, 320    an answer of 320 tokens was cut off: the last bucket has no end

Wider granularities are sums of finest buckets, so that one head serves all of them. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from zoo.errors import InputError

#: Buckets of the finest default granularity.
_BUCKETS = 16


@dataclass(frozen=True, slots=True)
class LengthScore:
    """How well buckets of one width were predicted.

    Fields:
        accuracy: Share of the answers in the predicted bucket.
        majority: Share in the bucket that is most frequent among the answers of the training.
        confusion: Answers by true bucket and predicted bucket.
    """

    accuracy: float
    majority: float
    confusion: tuple[tuple[int, ...], ...]


def granularities_of(given: Sequence[int], limit: int) -> tuple[int, ...]:
    """Return the widths of buckets, growing: those given, or a sixteenth, an eighth and a quarter of the limit.

    Raises InputError for widths that are no multiples of the least one, or not below the limit.
    """
    finest = max(limit // _BUCKETS, 1)
    widths = tuple(sorted(set(given))) or tuple(times * finest for times in (1, 2, 4) if times * finest < limit)
    if widths[0] < 1 or widths[-1] >= limit:
        raise InputError(f"a granularity is at least 1 and below the longest answer, {limit} tokens")
    if gcd(*widths) != widths[0]:
        raise InputError(f"granularities must be multiples of the least one, {widths[0]}")
    return widths


def edges_of(width: int, limit: int) -> tuple[int, ...]:
    """Return the least length of each bucket; the last one has the answers that reach the limit."""
    return tuple(range(0, limit + 1, width))


def coarser(mass: Sequence[float], times: int) -> list[float]:
    """Return the mass of buckets so many times as wide."""
    return [sum(mass[at : at + times]) for at in range(0, len(mass), times)]


def after(edges: Sequence[int], mass: Sequence[float], made: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return edges and mass of the whole lengths of an answer of `made` tokens, given those of what is still to come.

    At least one token is; so many and fewer than it has are a bucket without mass.
    """
    begins = [max(edge, 1) for edge in edges]
    ends = [*begins[1:], math.inf]
    some = [(made + low, each) for low, high, each in zip(begins, ends, mass, strict=True) if low < high]
    return (0, *(low for low, _ in some)), (0.0, *(each for _, each in some))


def survived(edges: Sequence[int], mass: Sequence[float], made: int, into: Sequence[int]) -> list[float]:
    """Return the mass of the buckets `into` of the whole lengths of an answer that has `made` tokens and goes on.

    Args:
        edges, mass: What was forecast. Within a bucket all lengths are equally likely; the last one has no end.
        into: Least length of each bucket to return; those in the last one are as long as its least length.
    """
    found, limit = [0.0] * len(into), into[-1]
    for low, high, each in zip(edges, [*edges[1:], math.inf], mass, strict=True):
        low = max(low, 1)
        if not each or high <= max(low, made + 1):
            continue
        if high == math.inf or low >= limit:
            found[-1] += each
            continue
        for length in range(max(low, made + 1), int(high)):
            found[bisect_right(into, length) - 1] += each / (high - low)
    total = sum(found)
    if not total:  # it outlives all that was forecast: it is in the bucket where it is
        found[bisect_right(into, made + 1) - 1] = total = 1.0
    return [each / total for each in found]


def score(
    masses: Sequence[Sequence[float]], lengths: Sequence[int], trained: Sequence[int], finest: int, width: int
) -> LengthScore:
    """Score predictions at one width.

    Args:
        masses: Predicted probability of each finest bucket, for each answer.
        lengths: Tokens of each answer.
        trained: Tokens of the answers of the training.
        finest, width: Tokens of a bucket of the masses, and of those that are scored.
    """
    count = -(-len(masses[0]) // (width // finest))
    confusion = [[0] * count for _ in range(count)]
    for mass, length in zip(masses, lengths, strict=True):
        wide = coarser(mass, width // finest)
        confusion[min(length // width, count - 1)][wide.index(max(wide))] += 1
    frequent = Counter(min(length // width, count - 1) for length in trained).most_common(1)[0][0]
    right = sum(confusion[at][at] for at in range(count))
    return LengthScore(
        right / len(lengths), sum(confusion[frequent]) / len(lengths), tuple(tuple(row) for row in confusion)
    )
