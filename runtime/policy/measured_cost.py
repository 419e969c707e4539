"""Learn what an operation costs from its outcomes: a linear cost, fitted to the latest ones (BL-11, BL-21).

    seconds = c[0] * x[0] + c[1] * x[1] + …          for example x = (1, bytes): a fixed part and a rate

Weighted least squares of the relative error, so that short operations count as much as long ones. An outcome's weight
falls by a factor with each later one, hence the fit follows a machine with changing load. No coefficient is negative.
Assumed points, such as those of a stored profile, hold until there are outcomes. Then only their proportions do, as far
as outcomes leave them open: the assumed coefficients, times the mean ratio of measured to assumed times. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

#: Weight of an outcome after each later one.
_FADING = 0.95
#: Weight of the assumed proportions, as a share of that of the outcomes.
_PROPORTIONS = 1e-3
#: Times below this are not distinguished, in seconds.
_LEAST = 1e-7


class MeasuredCost:
    """A linear cost.

    Args:
        assumed: Points (x, seconds) that hold until there are outcomes; at least one, all with as many coordinates.
    """

    def __init__(self, assumed: Sequence[tuple[Sequence[float], float]]) -> None:
        if not assumed or len({len(x) for x, _ in assumed}) != 1:
            raise ValueError("a measured cost needs an assumed point, all with as many coordinates")
        size = len(assumed[0][0])
        points = _Equations(size)
        for x, seconds in assumed:
            points.add(x, max(seconds, _LEAST), max(seconds, _LEAST))
        self._assumed = self._fit = points.solve([0.0] * size, 1e-9)
        self._learned = _Equations(size)
        self._log_ratio = self._weight = 0.0
        #: Outcomes that were added.
        self.count = 0

    @classmethod
    def assuming(cls, coefficients: Sequence[float]) -> MeasuredCost:
        """Return a cost with these coefficients until there are outcomes."""
        made = cls([([1.0] * len(coefficients), 1.0)])
        made._assumed = made._fit = list(coefficients)
        return made

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per unit of each coordinate."""
        return tuple(self._fit)

    def at(self, x: Sequence[float]) -> float:
        """Return the seconds at `x`."""
        return _at(self._fit, x)

    def add(self, x: Sequence[float], seconds: float) -> None:
        """Add an outcome."""
        seconds = max(seconds, _LEAST)
        self.count += 1
        assumed = _at(self._assumed, x)
        if assumed > _LEAST:  # where nothing was assumed there is no ratio
            self._weight = _FADING * self._weight + 1
            self._log_ratio += (math.log(seconds / assumed) - self._log_ratio) / self._weight
        self._learned.fade(_FADING)
        # Errors relative to the fit: relative to the outcome they would pull the fit to the shortest outcomes. But a
        # single stall, far above the fit, should count little.
        self._learned.add(x, seconds, max(self.at(x), seconds))
        ratio = math.exp(self._log_ratio)
        self._fit = self._learned.solve([ratio * each for each in self._assumed], _PROPORTIONS)


def _at(fit: Sequence[float], x: Sequence[float]) -> float:
    return max(sum(each * by for each, by in zip(fit, x, strict=True)), _LEAST)


class _Equations:
    """The normal equations of weighted points."""

    def __init__(self, size: int) -> None:
        self.products = [[0.0] * size for _ in range(size)]
        self.sums = [0.0] * size

    def add(self, x: Sequence[float], seconds: float, scale: float) -> None:
        """Add a point with weight 1 / scale^2."""
        weight = 1.0 / (scale * scale)
        for i, one in enumerate(x):
            self.sums[i] += weight * one * seconds
            for j, other in enumerate(x):
                self.products[i][j] += weight * one * other

    def fade(self, by: float) -> None:
        """Multiply all weights."""
        self.products = [[by * each for each in row] for row in self.products]
        self.sums = [by * each for each in self.sums]

    def solve(self, toward: Sequence[float], pull: float) -> list[float]:
        """Return the best coefficients of at least 0, trying each choice of those that are not 0, first all.

        Args:
            toward: Coefficients that the solution is pulled to; it has those that no point tells.
            pull: Weight of that pull, as a share of the points' own.
        """
        size = len(self.sums)
        told = [at for at in range(size) if self.products[at][at] > 0]
        products, sums = [list(row) for row in self.products], list(self.sums)
        for at in told:
            sums[at] += pull * products[at][at] * toward[at]
            products[at][at] *= 1 + pull
        best, least = [0.0] * size, math.inf
        for some in (each for count in range(len(told), 0, -1) for each in combinations(told, count)):
            found = [0.0] * size
            solved = _solve([[products[i][j] for j in some] for i in some], [sums[i] for i in some])
            for at, value in zip(some, solved, strict=True):
                found[at] = value
            error = sum(found[i] * (sum(products[i][j] * found[j] for j in some) - 2 * sums[i]) for i in some)
            if min(solved) >= 0 and error < least:
                best, least = found, error
                if len(some) == len(told):  # nothing is better than the best without a bound
                    break
        return [best[at] if at in told else toward[at] for at in range(size)]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small symmetric system, scaled to a unit diagonal."""
    size = len(right)
    if size == 1:
        return [right[0] / matrix[0][0]]
    if size == 2:  # most costs have two coordinates, and are fitted often
        (a, b), (_, c) = matrix
        determinant = a * c - b * b
        return [(right[0] * c - right[1] * b) / determinant, (right[1] * a - right[0] * b) / determinant]
    scale = [matrix[i][i] ** 0.5 for i in range(size)]
    rows = [[matrix[i][j] / (scale[i] * scale[j]) for j in range(size)] + [right[i] / scale[i]] for i in range(size)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda row: abs(rows[row][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for row in range(size):
            if row != i:
                factor = rows[row][i] / rows[i][i]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] / scale[i] for i in range(size)]
