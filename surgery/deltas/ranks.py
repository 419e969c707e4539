"""Allocate a budget of ranks to matrices: pure arithmetic on the gains of their factors.

The gain of a rank is its estimated effect on the predictions, measured for each matrix alone. `spread` allocates by
greatest gain per element (water-filling); `even` gives each matrix the same rank, as the control.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Gains = npt.NDArray[np.float64]


def even(rank: int, gains: Sequence[Gains]) -> tuple[int, ...]:
    """Return the same rank for all matrices, limited by each matrix's number of ranks."""
    return tuple(min(rank, len(each)) for each in gains)


def spread(budget: int, gains: Sequence[Gains], costs: Sequence[int]) -> tuple[int, ...]:
    """Return ranks by greatest gain per element.

    Args:
        budget: Elements (or bytes) to spend on all matrices together.
        gains: Per matrix, the gain of its first rank, its second, …, not increasing.
        costs: Elements (or bytes) per rank of each matrix.

    Returns:
        One rank per matrix. A larger budget never gives a matrix fewer: the ranks of two budgets are prefixes of one
            order.
    """
    owner = np.concatenate([np.full(len(each), index) for index, each in enumerate(gains)])
    worth = np.concatenate([np.minimum.accumulate(each) / cost for each, cost in zip(gains, costs, strict=True)])
    order = np.argsort(-worth, kind="stable")
    spent = np.cumsum(np.asarray(costs)[owner[order]])
    taken = owner[order[: int(np.searchsorted(spent, budget, side="right"))]]
    return tuple(int(count) for count in np.bincount(taken, minlength=len(gains)))


def largest(fits: Callable[[int], bool], highest: int) -> int:
    """Return the largest rank in [1, highest] for which `fits` holds, by bisection; 0 if none.

    `fits` must hold for all lower ranks of one that fits.
    """
    low, high = 0, highest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def smallest(reaches: Callable[[int], bool], highest: int) -> int | None:
    """Return the smallest rank in [1, highest] for which `reaches` holds, by doubling and bisection; None if none.

    `reaches` must hold for all higher ranks of one that reaches.
    """
    if highest < 1:
        return None
    low, high = 0, 1
    while not reaches(high):
        if high == highest:
            return None
        low, high = high, min(2 * high, highest)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high
