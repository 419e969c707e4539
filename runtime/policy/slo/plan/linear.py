"""Build a mixed-integer linear program row by row, and solve it by HiGHS through scipy (extra `plan`).

`scipy.optimize.milp` carries its own HiGHS: `highspy` and `ortools` cannot be imported in one process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any

from runtime.policy.slo.plan.problem import Orders, Problem

Terms = Mapping[int, float]


@dataclass(slots=True)
class LinearProgram:
    """Variables by number, and rows `low <= terms <= high`."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    rows: list[tuple[Terms, float, float]] = field(default_factory=list)

    def binary(self) -> int:
        """Return the number of a new variable that is 0 or 1."""
        return self._variable(1.0, 1)

    def positive(self) -> int:
        """Return the number of a new variable of at least 0."""
        return self._variable(inf, 0)

    def at_most(self, terms: Terms, bound: float) -> None:
        self.rows.append((dict(terms), -inf, bound))

    def at_least(self, terms: Terms, bound: float) -> None:
        self.rows.append((dict(terms), bound, inf))

    def equal(self, terms: Terms, value: float) -> None:
        self.rows.append((dict(terms), value, value))

    def minimise(self, terms: Terms, seconds: float) -> tuple[list[float] | None, bool]:
        """Return the values of the variables, None where none were found, and whether that is final.

        Final: proven to be optimal, or proven to be infeasible.
        """
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        costs = np.zeros(len(self.lower))
        for variable, cost in terms.items():
            costs[variable] = cost
        starts, columns, values = [0], list[int](), list[float]()
        for row, _, _ in self.rows:
            columns += row.keys()
            values += row.values()
            starts.append(len(columns))
        matrix = csr_array((values, columns, starts), shape=(len(self.rows), len(self.lower)))
        low, high = [row[1] for row in self.rows], [row[2] for row in self.rows]
        found: Any = milp(
            costs,
            integrality=self.whole,
            bounds=Bounds(self.lower, self.upper),
            constraints=LinearConstraint(matrix, low, high),
            options={"time_limit": max(seconds, 0.01), "mip_rel_gap": 0.0},
        )
        return None if found.x is None else found.x.tolist(), found.status in (0, 2)

    def _variable(self, upper: float, whole: int) -> int:
        self.lower.append(0.0)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.lower) - 1


class Slots:
    """Variables of a program over slots: `x[g, i, j]` is 1 where group i is the j-th of queue g.

    Fields:
        count: Slots of each queue. Where there are many groups, more than twice an even share of them is never tried.
        there: The groups that may be in a slot (g, j).
    """

    def __init__(self, problem: Problem, program: LinearProgram) -> None:
        groups, self._queues = problem.groups, range(len(problem.queues))
        even = ceil(len(groups) / len(problem.queues))
        self.count = len(groups) if len(groups) <= 12 else min(len(groups), 2 * even)
        self.x = {
            (g, i, j): program.binary()
            for g in self._queues
            for i, group in enumerate(groups)
            for j in range(self.count)
            if problem.able(g, group)
        }
        self.there: dict[tuple[int, int], list[int]] = defaultdict(list)
        for g, i, j in self.x:
            self.there[g, j].append(i)

    def orders(self, values: Sequence[float]) -> Orders:
        """Return the order that values of the variables stand for."""
        made: list[list[int]] = [[] for _ in self._queues]
        for g, j in sorted(self.there):
            made[g] += [i for i in self.there[g, j] if values[self.x[g, i, j]] > 0.5]
        return tuple(map(tuple, made))
