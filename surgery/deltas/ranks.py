"""How many ranks each matrix gets out of a budget: pure arithmetic on the gains of their factors.

The gain of a rank is how much nearer it brings the predictions, as far as that can be told of each matrix alone.
`spread` pours the budget where an element gains most (water-filling); `even` gives each matrix the same rank, the
control.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Gains = npt.NDArray[np.float64]


def even(rank: int, gains: Sequence[Gains]) -> tuple[int, ...]:
    """The same rank for all, as far as each matrix has ranks to give."""
    return tuple(min(rank, len(each)) for each in gains)


def spread(budget: int, gains: Sequence[Gains], costs: Sequence[int]) -> tuple[int, ...]:
    """Ranks by greatest gain per element.

    Args:
        budget: elements (or bytes) that may be spent on all matrices together.
        gains: per matrix, the gain of its first rank, its second, …, never rising.
        costs: elements (or bytes) per rank of each matrix.

    Returns:
        One rank per matrix. A larger budget never gives any matrix fewer: the ranks of two budgets are prefixes of one
        order.
    """
    owner = np.concatenate([np.full(len(each), index) for index, each in enumerate(gains)])
    worth = np.concatenate([np.minimum.accumulate(each) / cost for each, cost in zip(gains, costs, strict=True)])
    order = np.argsort(-worth, kind="stable")
    spent = np.cumsum(np.asarray(costs)[owner[order]])
    taken = owner[order[: int(np.searchsorted(spent, budget, side="right"))]]
    return tuple(int(count) for count in np.bincount(taken, minlength=len(gains)))


def largest(fits: Callable[[int], bool], highest: int) -> int:
    """The largest rank in [1, highest] that fits a budget which lower ranks fit too, by bisection; 0 when none does."""
    low, high = 0, highest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def smallest(reaches: Callable[[int], bool], highest: int) -> int | None:
    """The smallest rank in [1, highest] that reaches a target which higher ranks keep, by doubling and bisection; None
    when none does.
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
