"""Plan the order of waiting groups, beside the scheduler: ask for a plan, and follow it once it is there.

    review (on ticks) -> SolvePlan -> a thread, or a simulated one -> PlanSolved -> solved -> DeadlineOrder.follow

- A plan is asked for where late requests are foreseen, or loads that another order spares, and only once for the same
  groups: an episode (QL-17). One is under way at a time, and solving takes at most `plan_duty` of the time.
- Until it is there, and for groups that come later, greedy insertion gives the order where that is better.
- A plan that comes late is repaired: groups have ended, begun or come. One worse than the present order is rejected.
- Where late requests remain, more devices are wanted (QL-23), and `overload` says what becomes of requests (QL-19).

All decisions are functions of the events, so that a log replays them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.control.scheduler_io import PlanMethod, PlanSolved, SolvePlan
from runtime.policy.slo.plan.annealing import solve_quickly
from runtime.policy.slo.plan.evaluation import Evaluator
from runtime.policy.slo.plan.problem import GroupPlan, PlanScore, RejectedPlan
from runtime.policy.slo.plan.repair import repaired
from runtime.scheduler.order.deadlines import DeadlineOrder
from runtime.scheduler.order.plan_problem import Planning, planning_of
from runtime.scheduler.state import ClusterState

#: Least time in ns between two reviews, and per group: building and judging a problem takes far less.
_REVIEW, _REVIEW_GROUP = 200_000_000, 10_000_000
#: A quick order replaces the present one if a term gets less by this share.
_GAIN = 0.02
#: Why no order is followed with `overload = "edf"`.
_BY_DEADLINE = "late requests remain: by deadline"
#: After so long, in ns, a plan that is asked for counts as failed.
_PATIENCE = 60_000_000_000


@dataclass(frozen=True, slots=True)
class PlanState:
    """What is planned, for `/zoo/state`.

    Fields:
        solver: What found the order that is followed; empty while deadlines order.
        why: What it was made for, or why there is none.
        late: Waiting requests that will most likely be late.
        lateness_s: Mean lateness, summed over requests.
        completion_s: Mean completion, summed over requests.
        under_way: Whether a plan is being solved.
        scale_up_wanted: Whether late requests remain in the best order known.
    """

    solver: str
    why: str
    late: int
    lateness_s: float
    completion_s: float
    under_way: bool
    scale_up_wanted: bool


class Plans:
    """Plans of one scheduler."""

    def __init__(self, state: ClusterState, order: DeadlineOrder) -> None:
        self._state, self._order, self._config = state, order, state.config.order
        self._number = 0
        self._since: int | None = None
        self._planned: frozenset[int] = frozenset()
        #: The cells of the problem that is being solved, and those of the order that is followed.
        self._asked_of: tuple[str, ...] = ()
        self._followed_in: tuple[str, ...] = ()
        self._covered: frozenset[int] = frozenset()
        self._next = self._allowed = 0
        self._plan: GroupPlan | None = None
        self._why = "no late requests foreseen"
        self._remain, self._hopeless = False, 0

    # -- events --------------------------------------------------------------------------------------------------------

    def review(self, now: int) -> None:
        """Judge the present order; follow a better one, and ask for a plan where that may pay."""
        if now < self._next:
            return
        self._order.part_late_ones(self._state.waiting, self._state.sequences, now)
        made = planning_of(self._state, self._order, self._config.plan_rounds, now)
        if made is None:
            self._next, self._remain, self._hopeless = now + _REVIEW, False, 0
            if self._plan is not None:
                self._covered = frozenset()
            self._drop_plan("all waiting models fit together")
            return
        groups = frozenset(group.id for group in made.problem.groups)
        self._next = now + _REVIEW + _REVIEW_GROUP * len(groups)
        judge = Evaluator(made.problem)
        present = judge.score(made.present)
        best = present
        if self._config.plan == "qlm":
            best = self._follow_quick(made, judge, present, groups)
        self._hopeless = judge.hopeless
        if best.late == 0:
            self._remain = False
        if self._due(groups, present, best, now):
            self._ask_for_plan(made, groups, present, now)

    def solved(self, event: PlanSolved, now: int) -> None:
        """Follow a plan that is there, if it is still better than the present order."""
        if event.number != self._number or self._since is None:
            return
        self._since = None
        self._allowed = now + int(event.took_ns / self._config.plan_duty)
        counters = self._state.counters
        counters.plan_ns += event.took_ns
        made = planning_of(self._state, self._order, self._config.plan_rounds, now)
        if event.plan is None or made is None:
            counters.plans_failed += event.plan is None
            counters.plans_rejected += event.plan is not None
            self._remain |= event.plan is None
            self._why = event.why or "all waiting models fit together"
            self._trace_plan(now, "plan.failed", self._why)
            return
        present = made.present if self._config.plan == "qlm" else None
        other = made.cells != self._asked_of
        found = RejectedPlan("other cells") if other else repaired(event.plan, made.problem, present)
        if isinstance(found, RejectedPlan):
            counters.plans_rejected += 1
            self._trace_plan(now, "plan.reject", found.why)
            return
        counters.plans_used += 1
        self._remain = found.score.late > 0
        self._trace_plan(now, "plan.use", found.solver)
        if self._remain and self._config.overload == "edf":
            self._drop_plan(_BY_DEADLINE)
            return
        self._follow(made, found, self._why)

    # -- views ---------------------------------------------------------------------------------------------------------

    @property
    def scale_up_wanted(self) -> bool:
        """Whether late requests remain in the best order known (QL-23)."""
        return self._remain or self._hopeless > 0

    def picture(self) -> PlanState:
        plan = self._plan
        score = PlanScore((), 0) if plan is None else plan.score
        return PlanState(
            "" if plan is None else plan.solver,
            self._why,
            score.late + self._hopeless,
            score.lateness / 1e6,
            score.completion / 1e6,
            self._since is not None,
            self.scale_up_wanted,
        )

    # -- internals -----------------------------------------------------------------------------------------------------

    def _follow_quick(self, made: Planning, judge: Evaluator, present: PlanScore, groups: frozenset[int]) -> PlanScore:
        """Follow what insertion finds, or the last plan with what is new inserted, if that is clearly better."""
        found = solve_quickly(judge, made.present, present)
        if self._plan is not None and groups - self._planned and made.cells == self._followed_in:
            mended = repaired(self._plan, made.problem, judge=judge)
            if isinstance(mended, GroupPlan) and mended.score <= found.score:
                found = mended
        if found.score.late and self._config.overload == "edf":
            self._drop_plan(_BY_DEADLINE)
            return present
        if found.solver == "present" or not _clearly_less(found.score, present):
            return present
        why = "late requests foreseen" if present.late else "another order spares loads"
        self._follow(made, found, why)
        return found.score

    def _due(self, groups: frozenset[int], present: PlanScore, best: PlanScore, now: int) -> bool:
        """Return whether a plan is to be asked for: once an episode, and not too often."""
        if self._since is not None:
            if now - self._since < _PATIENCE:
                return False
            self._state.counters.plans_failed += 1
            self._since = None
        if now < self._allowed or all(group in self._covered or self._is_late(group) for group in groups):
            return False
        return bool(present.late or present.lateness) or (self._config.plan == "qlm" and best < present)

    def _is_late(self, number: int) -> bool:
        """Return whether a group is one of requests that cannot be on time any more: no plan is for these."""
        group = self._order.forecasts.groups.get(number)
        return group is not None and group.key.late

    def _ask_for_plan(self, made: Planning, groups: frozenset[int], present: PlanScore, now: int) -> None:
        self._number += 1
        self._since, self._covered, self._asked_of = now, groups, made.cells
        self._why = "late requests foreseen" if present.late or present.lateness else "another order spares loads"
        self._state.counters.violations_foreseen += bool(present.late or present.lateness)
        method: PlanMethod = "paper" if self._config.plan == "paper" else "search"
        self._state.out.solve(SolvePlan(self._number, made.problem, method))
        self._trace_plan(now, "plan.ask", self._why)

    def _follow(self, made: Planning, plan: GroupPlan, why: str) -> None:
        self._plan, self._why, self._followed_in = plan, why, made.cells
        self._planned = frozenset(group for some in plan.orders for group in some)
        self._order.follow(dict(zip(made.cells, plan.orders, strict=True)))
        self._state.changed = True

    def _drop_plan(self, why: str) -> None:
        """Let deadlines order again."""
        self._why = why
        if self._plan is not None:
            self._plan, self._planned = None, frozenset()
            self._order.follow({})
            self._state.changed = True

    def _trace_plan(self, now: int, what: str, why: str) -> None:
        self._state.tell.control(now, what, "QL-17", "", why=why)


def _clearly_less(score: PlanScore, other: PlanScore) -> bool:
    """Return whether a score is less by a share of the first term that differs."""
    for term, was in zip(_terms(score), _terms(other), strict=True):
        if term != was:
            return term < was - int(_GAIN * was)
    return False


def _terms(score: PlanScore) -> Sequence[int]:
    return [*(term for pair in score.classes for term in pair), score.completion]
