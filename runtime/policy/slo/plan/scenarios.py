"""Draw the times of a problem's scenarios, and the moves of its search, as integers from PCG64.

Raw 64-bit draws are the same on every machine and in every release of numpy. Times are stratified: each of the
scenarios has another quantile of the normal distribution, in an order drawn for each group.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.random import PCG64
from numpy.typing import NDArray

#: Denominator of normal scores.
SCORE = 1024

#: Separates the draws of what times have in common from those of each.
_COMMON = 0x2545F4914F6CDD1D

Integers = NDArray[np.int64]


def normal_scores(count: int) -> Integers:
    """Return the middles of `count` equally likely parts of the normal distribution, in 1/1024 of its sigma."""
    normal = NormalDist()
    return np.array([round(SCORE * normal.inv_cdf((at + 0.5) / count)) for at in range(count)], dtype=np.int64)


def shuffled_scores(rows: int, count: int, seed: int) -> Integers:
    """Return rows of the scores, each in an order of its own."""
    raw = PCG64(seed).random_raw(rows * count).reshape(rows, count)
    return normal_scores(count)[np.argsort(raw, axis=1, kind="stable")]


def draws(count: int, seed: int) -> Integers:
    """Return so many numbers from 0 up to 2^63."""
    return (PCG64(seed ^ 0x5DEECE66D).random_raw(count) >> np.uint64(1)).astype(np.int64)


def common_factors(sigma: int, count: int, seed: int) -> Integers:
    """Return by scenario the factor of all its times, in 1/1024. `sigma`: its standard deviation, likewise."""
    scores: Integers = shuffled_scores(1, count, seed ^ _COMMON)[0]
    return np.asarray(np.maximum(SCORE + sigma * scores // SCORE, SCORE // 8), dtype=np.int64)


def samples(means: Integers, sigmas: Integers, scores: Integers) -> Integers:
    """Return the times by row and scenario: at least an eighth of the mean, so that none is negative."""
    drawn = means[:, None] + (sigmas[:, None] * scores) // SCORE
    return np.maximum(drawn, means[:, None] // 8)
