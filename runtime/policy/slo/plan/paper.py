"""The paper's own formulation (QL-18), equations 6 to 13, as a mixed-integer linear program (extra `plan`, scipy).

Slots are padded with empty groups, so that (6) can hold. Empty groups take no time, inherit the model, and are left out
of the objective; they are at the front, where the model is the one that is loaded now, so the first group's transition
is counted against that (9). A transition costs the same for any two models, the largest load of the queue (S). The
chance constraint (12) is that of normal times: mean + z * sigma <= SLO, a cone, which is cut by tangents until it
holds. The objective (13) is the sum of penalties: completion less SLO. It is blind to SLOs but for (12), and where (12)
cannot hold there is no plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist

from runtime.policy.slo.plan.evaluation import Evaluator
from runtime.policy.slo.plan.linear import LinearProgram, Slots
from runtime.policy.slo.plan.pairs import PairCosts
from runtime.policy.slo.plan.problem import SAME_SPEED, GroupPlan, Orders, Problem, RejectedPlan, Spread

_US_PER_MS = 1000.0
#: Rounds of tangents.
_CUTS = 20
#: Slack of the chance constraint in ms.
_SLACK = 1e-3


def solve_as_paper(problem: Problem, seconds: float = 1.0) -> GroupPlan | RejectedPlan:
    """Return the plan with the least sum of penalties, or why there is none; within so many seconds for each round.

    Raises ImportError without scipy.
    """
    model, judge = _PaperModel(problem), Evaluator(problem)
    for _ in range(_CUTS):
        values, final = model.program.minimise(model.objective, seconds)
        if values is None:
            return RejectedPlan("no order meets all deadlines" if final else "no plan in time")
        orders = model.orders(values)
        if not model.cut(orders):
            return GroupPlan(judge.names(orders), judge.score(orders), "paper")
    return RejectedPlan("no plan in time")


def penalties(problem: Problem, orders: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
    """Return mean and standard deviation of each group's penalty in ms, queue by queue (equations 10 and 11)."""
    return [penalty for g, some in enumerate(orders) for penalty in _queue_penalties(problem, _swaps(problem), g, some)]


def _queue_penalties(
    problem: Problem, swaps: Sequence[float], g: int, some: Sequence[int]
) -> list[tuple[float, float]]:
    found, queue = [], problem.queues[g]
    mean, variance = queue.busy.mean / _US_PER_MS, (queue.busy.sigma / _US_PER_MS) ** 2
    model = _loaded(problem, g)
    for i in some:
        group = problem.groups[i]
        mean += swaps[g] if group.chain != model else 0.0
        model = group.chain
        (own, own_variance), (drain, drain_variance) = _completion(problem, g, i), _drain(problem, g, i)
        slo = (group.due - problem.now) / _US_PER_MS
        found.append((mean + own - slo, sqrt(variance + own_variance)))
        mean, variance = mean + drain, variance + drain_variance
    return found


def _loaded(problem: Problem, g: int) -> int | None:
    """Return the model that a queue has loaded: the paper has one at a time."""
    resident = problem.queues[g].resident
    return resident[-1] if resident else None


def _swaps(problem: Problem) -> list[float]:
    """Return the constant S of each queue in ms."""
    judge = Evaluator(problem)
    costs = PairCosts(judge)
    chains = sorted({group.chain for group in problem.groups})
    found = []
    for g in range(len(problem.queues)):
        able = [m for m in chains if problem.runs(g, m)]
        pairs = [costs.load(g, before, m) for m in able for before in able if m != before]
        alone = [sum(problem.sizes[b] for b in set(problem.chains[m])) * problem.rates[g].cold_us >> 20 for m in able]
        found.append(max([*pairs, *alone], default=0) / _US_PER_MS)
    return found


def _at_speed(factor: int, spread: Spread) -> tuple[float, float]:
    """Return mean in ms and variance in ms^2 on a queue that takes `factor` / 1024 times as long."""
    by = factor / SAME_SPEED / _US_PER_MS
    return spread.mean * by, (spread.sigma * by) ** 2


def _drain(problem: Problem, g: int, i: int) -> tuple[float, float]:
    group = problem.groups[i]
    return _at_speed(problem.rates[g].drain_factor(group.chain), group.drain)


def _completion(problem: Problem, g: int, i: int) -> tuple[float, float]:
    """Return the paper's C: the last member starts when the rest has drained, and runs then."""
    group = problem.groups[i]
    mean, variance = _drain(problem, g, i)
    share = (group.members - 1) / group.members
    own, own_variance = (
        (0.0, 0.0) if group.waits_only else _at_speed(problem.rates[g].slowness[group.chain], group.execution)
    )
    return share * mean + own, share * share * variance + own_variance


class _PaperModel:
    def __init__(self, problem: Problem) -> None:
        self._problem, self.program = problem, LinearProgram()
        self._swaps, self._z = _swaps(problem), NormalDist().inv_cdf(problem.alpha)
        slots = Slots(problem, self.program)
        self._x, self._there, self._slots, self.orders = slots.x, slots.there, slots.count, slots.orders
        self._turns = {(g, j): self.program.binary() for g in range(len(problem.queues)) for j in range(slots.count)}
        self._assign()
        self._transitions()
        self.objective = self._objective()
        for g, j in self._turns:
            self._bound(g, j, {})

    def cut(self, orders: Orders) -> bool:
        """Add tangents of the cone where an order breaks it; return whether there were any (equation 12)."""
        added = False
        for g, some in enumerate(orders):
            empty = self._slots - len(some)
            found = _queue_penalties(self._problem, self._swaps, g, some)
            for j, (mean, sigma) in enumerate(found):
                if mean + self._z * sigma <= _SLACK or not sigma:
                    continue
                added = True
                variances = self._variances(g, empty + j)
                slope = self._z / sigma
                # The norm is convex and is its tangent at this order: sigma_k^2 / norm for each group on the way.
                self._bound(g, empty + j, {each: slope * variance for each, variance in variances.items()})
        return added

    def _assign(self) -> None:
        for i in range(len(self._problem.groups)):
            self.program.equal({each: 1.0 for (_, k, _), each in self._x.items() if k == i}, 1.0)  # (6)
        for (g, j), some in self._there.items():
            here = {self._x[g, i, j]: 1.0 for i in some}
            self.program.at_most(here, 1.0)  # (6): one group, or an empty one
            if j:
                self.program.at_least(here | {self._x[g, i, j - 1]: -1.0 for i in some}, 0.0)

    def _transitions(self) -> None:
        """Rows of t = 1 where the model changes (equations 7 and 9)."""
        groups = self._problem.groups
        for (g, j), some in self._there.items():
            loaded = _loaded(self._problem, g)
            for m in {groups[i].chain for i in some}:
                row = {self._turns[g, j]: 1.0}
                row |= {self._x[g, i, j]: -1.0 for i in some if groups[i].chain == m}
                ahead = {self._x[g, i, j - 1]: 1.0 for i in some if groups[i].chain == m} if j else {}
                if m == loaded:
                    # An empty slot has the loaded model: one less what is not of it.
                    ahead = {self._x[g, i, j - 1]: -1.0 for i in some if groups[i].chain != m} if j else {}
                self.program.at_least(row | ahead, -1.0 if m == loaded else 0.0)

    def _objective(self) -> dict[int, float]:
        """Return (13): a group's own completion, and its drain and swap once for each group behind it."""
        terms: dict[int, float] = {}
        for (g, i, j), each in self._x.items():
            behind = self._slots - 1 - j
            terms[each] = _completion(self._problem, g, i)[0] + behind * _drain(self._problem, g, i)[0]
            terms[each] += self._problem.queues[g].busy.mean / _US_PER_MS
        for (g, j), each in self._turns.items():
            terms[each] = self._swaps[g] * (self._slots - j)
        return terms

    def _bound(self, g: int, j: int, cone: dict[int, float]) -> None:
        """Add p + cone <= 0 for a slot that is not empty (equations 8, 10, 11 and 12)."""
        problem = self._problem
        never = (
            4.0
            * sum(
                max(_drain(problem, g, i)[0] + _completion(problem, g, i)[0] + self._swaps[g], 0.0)
                for i in range(len(problem.groups))
            )
            + sum(cone.values())
            + problem.queues[g].busy.mean / _US_PER_MS
        )
        row: dict[int, float] = defaultdict(float)
        for each, weight in cone.items():
            row[each] += weight
        for k in range(j + 1):
            row[self._turns[g, k]] += self._swaps[g]
            for i in self._there[g, k]:
                row[self._x[g, i, k]] += _drain(problem, g, i)[0] if k < j else _completion(problem, g, i)[0]
        for i in self._there[g, j]:
            row[self._x[g, i, j]] += never - (problem.groups[i].due - problem.now) / _US_PER_MS
        self.program.at_most(row, never - problem.queues[g].busy.mean / _US_PER_MS)

    def _variances(self, g: int, j: int) -> dict[int, float]:
        """Return the variance in ms^2 that each x adds to the completion of a slot."""
        found = {}
        for k in range(j + 1):
            for i in self._there[g, k]:
                spread = _drain(self._problem, g, i) if k < j else _completion(self._problem, g, i)
                found[self._x[g, i, k]] = spread[1]
        return found
