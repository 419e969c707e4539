"""Forecast when requests end, and compare the forecasts with what happens (QL-05, QL-14 to QL-16).

    arrival: `promise` -> the forecast is kept -> end: `record_end` -> `outcomes`, and the estimates of the trace

What waits is counted by groups (`policy.slo.groups`), and summed in their order (`policy.slo.queued_work`), so that a
forecast costs O(log groups + running sequences).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from runtime.policy.slo.bounds import CommonError, OutcomeBounds, independence
from runtime.policy.slo.forecast import NOTHING, Forecast, Occupancy, Queued, forecast
from runtime.policy.slo.groups import Group, GroupKey, Member, Rank
from runtime.policy.slo.lengths import AnswerClass, AnswerLengths, class_of
from runtime.policy.slo.objectives import TimeObjective, objective_of
from runtime.policy.slo.objectives import class_of as class_of_objective
from runtime.policy.slo.queued_work import QueuedWork
from runtime.policy.slo.queues import VirtualQueues
from runtime.policy.slo.service_times import ServiceTimes
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.types import SequenceRequest

#: Forecasts with their outcomes that are kept.
_KEPT = 1 << 14


@dataclass(frozen=True, slots=True)
class ForecastOutcome:
    """A forecast made at a request's arrival, and the time that it took to its end, in ns.

    Fields:
        arrived: When it came, in ns of the driver's clock.
        waited: Time from the arrival to the first start.
        tokens: Of its answer.
    """

    seq: str
    arrived: int
    tokens: int
    forecast: Forecast
    waited: int
    took: int


@dataclass(frozen=True, slots=True)
class GroupForecast:
    """A waiting group.

    Fields:
        id: Its number.
        cell: Name of the cell that it waits for; empty where there are none.
        waiting: Number of its members.
        due: Deadline of its first member, in ns of the driver's clock.
        first, last: Forecasts of the ends of its first and last member, or of their first tokens if the deadlines are
            for these, in ns of the driver's clock.
    """

    id: int
    key: GroupKey
    cell: str
    waiting: int
    due: int
    first: int
    last: int


@dataclass(slots=True)
class _Promise:
    """A forecast that was made. `learned`: from answers of its class, so that its error tells those to come."""

    arrived: int
    forecast: Forecast
    learned: bool
    started: int | None = None


def answers_of(sequence: ScheduledSequence) -> AnswerClass:
    """Return the class of a sequence's answer."""
    request = sequence.request
    return class_of(request.model, len(request.prompt), request.sampling.max_tokens)


def objective_for(sequence: ScheduledSequence) -> TimeObjective | None:
    """Return what a sequence still has to be in time for."""
    request = sequence.request
    return objective_of(request.slo_ms, request.ttft_slo_ms, bool(sequence.output))


class Forecasts:
    """Forecasts of one scheduler.

    Args:
        soft: Time in ns in which a request without an objective is to end.
        places: Sequences that may run in a cell at a time; fewer do where pages are short, which `limit` tells.
        outcome: Receives (now, forecast in seconds, measured seconds) of each request that ends.
        by_class: Whether requests of nearly the same objective may be in one group.
    """

    def __init__(
        self,
        times: ServiceTimes,
        lengths: AnswerLengths,
        soft: int,
        places: int,
        outcome: Callable[[int, float, float], None],
        by_class: bool = True,
    ) -> None:
        self._times, self._lengths, self._outcome = times, lengths, outcome
        self._most, self._places = places, dict[str, int]()
        self._running: dict[str, ScheduledSequence] = {}
        self._soft, self._by_class = soft, by_class
        self._common, self._bounds, self._learned = CommonError(), OutcomeBounds(), 0
        self._promises: dict[str, _Promise] = {}
        self.queues = VirtualQueues()
        self.groups = self.queues.groups
        self._queued = QueuedWork(self.groups, self.work, lambda: (times.version, lengths.version))
        #: The latest forecasts with their outcomes.
        self.outcomes: deque[ForecastOutcome] = deque(maxlen=_KEPT)

    # -- what happens --------------------------------------------------------------------------------------------------

    def add_waiting(self, sequence: ScheduledSequence) -> None:
        """Count a sequence that waits."""
        rank, most = sequence.rank, sequence.request.sampling.max_tokens
        member = Member(sequence.seq, sequence.tokens, len(sequence.output), most)
        self.groups.add(self._key(sequence), (rank.order, rank.ordinal), member)

    def remove_waiting(self, sequence: ScheduledSequence) -> None:
        """Count it no more."""
        self.groups.remove(sequence.seq)

    def places(self, cell: str) -> int:
        """Return how many sequences run in a cell at a time."""
        return self._places.get(cell, self._most)

    def limit(self, sequence: ScheduledSequence) -> None:
        """Record that a waiting sequence finds no room beside those that run in its cell."""
        cell = self.cell(sequence)
        self._places[cell] = max(self.running(cell), 1)

    def promise(self, sequence: ScheduledSequence, now: int) -> Forecast | None:
        """Forecast the end of a request that has arrived, and is the last of its group; None for a paused one."""
        own = self.groups.group_of(sequence.seq)
        if own is None:
            return None
        waiting = self._queued.before(own, (own.key.priority, own.place, sequence.rank.order + own.later), now)
        rests = [self.rest(each) for each in self._here(own.cell)]
        error, sigmas = math.hypot(self._common.relative, self._lengths.doubt(own.key.answers)), self._bounds.sigmas
        made = forecast(rests, waiting, self.rest(sequence), self.places(own.cell), error, sigmas)
        self._promises[sequence.seq] = _Promise(now, made, self._lengths.known(own.key.answers))
        return made

    def record_start(self, sequence: ScheduledSequence, now: int) -> None:
        self.groups.start(sequence.seq)
        self._running[sequence.seq] = sequence
        promise = self._promises.get(sequence.seq)
        if promise is not None and promise.started is None:
            promise.started = now

    def record_leave(self, sequence: ScheduledSequence) -> None:
        """Record that a sequence leaves its devices."""
        self._running.pop(sequence.seq, None)

    def record_end(self, sequence: ScheduledSequence, completed: bool, now: int) -> None:
        """Compare a request's forecast with what it took; `completed`: it ended by itself or at its limit."""
        self.groups.end_member(sequence.seq)
        promise = self._promises.pop(sequence.seq, None)
        if promise is not None and completed and promise.started is not None:
            took = now - promise.arrived
            waited, tokens = promise.started - promise.arrived, len(sequence.output)
            outcome = ForecastOutcome(sequence.seq, promise.arrived, tokens, promise.forecast, waited, took)
            self.outcomes.append(outcome)
            self._outcome(now, promise.forecast.end / 1e9, took / 1e9)
            if promise.learned:
                self._learn(promise.forecast, took, now)

    # -- order ---------------------------------------------------------------------------------------------------------

    def due(self, request: SequenceRequest, begun: bool) -> int:
        """Return a request's deadline. `begun`: its first token is there."""
        objective = objective_of(request.slo_ms, request.ttft_slo_ms, begun)
        return request.arrival + (self._soft if objective is None else objective.ms * 1_000_000)

    def rank(self, sequence: ScheduledSequence) -> tuple[int, ...]:
        """Return where a sequence stands among all: by priority, place of its group, deadline, arrival."""
        group, rank = self.groups.group_of(sequence.seq), sequence.rank
        if group is None:
            return (rank.priority, 0, rank.order, rank.ordinal)
        return (rank.priority, group.place, rank.order + group.later, rank.ordinal)

    # -- forecasts -----------------------------------------------------------------------------------------------------

    def rest(self, sequence: ScheduledSequence) -> Occupancy:
        """Return the work that a waiting or running sequence still is."""
        return self._work_from(sequence, sequence.tokens - sequence.computed)

    def anew(self, sequence: ScheduledSequence) -> Occupancy:
        """Return the work that it is from its next start, what it has to compute again included."""
        return self._work_from(sequence, sequence.tokens)

    def longest(self, sequence: ScheduledSequence, anew: bool) -> int:
        """Return an upper bound of the time that `anew` or `rest` predicts, for 95 % of the answers."""
        context = sequence.tokens - (0 if anew else sequence.computed)
        begin = self.context(sequence, context) if context > 1 else 0
        return begin + self._times.tokens(sequence.chain.model, self.most_tokens(sequence), self.cell(sequence))

    def context(self, sequence: ScheduledSequence, tokens: int) -> int:
        """Return the time to compute so many tokens of a sequence before its next one, in its cell."""
        return self._times.context(sequence.chain.model, tokens, self.cell(sequence))

    def token(self, sequence: ScheduledSequence) -> int:
        """Return the time of a token of a sequence's answer, in its cell."""
        return self._times.tokens(sequence.chain.model, 1, self.cell(sequence))

    def most_tokens(self, sequence: ScheduledSequence) -> int:
        """Return an upper bound of the tokens that a sequence still gets, for 95 % of the answers; at least 1."""
        return self._lengths.at_most(answers_of(sequence), len(sequence.output), sequence.request.sampling.max_tokens)

    def running(self, cell: str) -> int:
        """Return how many sequences run in a cell."""
        return len(self._here(cell))

    def busy(self, cell: str) -> float:
        """Return the time that what runs in a cell still takes, summed."""
        return sum(self.rest(each).mean for each in self._here(cell))

    @property
    def common_error(self) -> float:
        """Relative standard deviation of the error that forecasts have in common, as far as it has been learned."""
        return self._common.relative

    def length(self, group: Group) -> float:
        """Return the tokens that the mean waiting member of a group still gets, with a mark-up for long ones."""
        _, made, most = group.mean
        return self._lengths.inflated(group.key.answers, made, most)

    def backlog(self, cell: str) -> float:
        """Return the time in which a cell has served all that runs and waits there."""
        work = self.busy(cell)
        work += sum(len(group) * self.work(group).mean for group in self.groups.waiting() if group.cell == cell)
        return work / self.places(cell)

    def ahead(self, cell: str, rank: Rank, yields: bool) -> float:
        """Return the time in which a cell has served what waits before a place in the order, and what runs.

        0 where there is a place at once. `yields`: what runs and is behind that place gives way.
        """
        here = [each for each in self._here(cell) if not yields or self.rank(each)[:3] <= rank]
        before = [group for group in self.groups.waiting() if group.cell == cell and group.rank <= rank]
        if len(here) + sum(map(len, before)) < self.places(cell):
            return 0.0
        work = sum(self.rest(each).mean for each in here) + sum(len(each) * self.work(each).mean for each in before)
        return work / self.places(cell)

    def by_group(self, now: int) -> list[GroupForecast]:
        """Return the waiting groups in their order, with forecasts."""
        rests: dict[str, list[Occupancy]] = {}
        ahead: dict[str, Queued] = {}
        found = []
        for group in self.groups:
            if group.cell not in rests:
                rests[group.cell] = [self.rest(each) for each in self._here(group.cell)]
            here, before = rests[group.cell], ahead.get(group.cell, NOTHING)
            count, own, places = len(group), self.work(group), self.places(group.cell)
            until = self.promised(group)
            first = forecast(here, before, until, places)
            last = forecast(here, before.plus(Queued.work_of(count - 1, own)), until, places) if count > 1 else first
            found.append(
                GroupForecast(group.id, group.key, group.cell, count, group.due, now + first.end, now + last.end)
            )
            ahead[group.cell] = before.plus(Queued.work_of(count, own))
        return found

    def cell(self, sequence: ScheduledSequence) -> str:
        """Return the cell that the group of a live sequence is assigned to; empty for none."""
        group = self.groups.group_of(sequence.seq)
        return "" if group is None else group.cell

    def _here(self, cell: str) -> list[ScheduledSequence]:
        return [each for each in self._running.values() if self.cell(each) == cell]

    def _learn(self, told: Forecast, took: int, now: int) -> None:
        own = independence(now - self._learned, took)
        self._learned = now
        self._bounds.add(abs(took - told.end) / max(told.unit, 1), told.least <= took <= told.most, own)
        self._common.add(told.end, told.sigma, took)

    def _key(self, sequence: ScheduledSequence) -> GroupKey:
        request, objective = sequence.request, objective_for(sequence)
        late = sequence.rank.order != self.due(request, bool(sequence.output))
        kept = class_of_objective(objective) if self._by_class else objective
        return GroupKey(request.priority, kept, answers_of(sequence), sequence.chain.version, late)

    def work(self, group: Group) -> Occupancy:
        """Return the work that the mean waiting member of a group is in its cell.

        It is kept, since few groups change at a time.
        """
        version = self._times.version, self._lengths.version, group.changes, group.cell
        if group.work is None or group.work[0] != version:
            group.work = version, self.work_in(group, group.cell)
        return group.work[1]

    def work_in(self, group: Group, cell: str | None) -> Occupancy:
        """Return what `work` is in a cell; None: in one of a mean pace (QL-22)."""
        context, made, most = group.mean
        return self._work_of(group.key.answers.model, cell, group.key.answers, context, made, most)

    def promised(self, group: Group) -> Occupancy:
        """Return the part of `work` until what a group's deadlines are for: its first token, or its whole answer."""
        objective = group.key.objective
        if objective is None or not objective.first_token:
            return self.work(group)
        return Occupancy(self._times.context(group.key.answers.model, round(group.mean[0]), group.cell))

    def _work_from(self, sequence: ScheduledSequence, context: int) -> Occupancy:
        made, most = len(sequence.output), sequence.request.sampling.max_tokens
        begin = context if context > 1 else 0
        return self._work_of(sequence.chain.model, self.cell(sequence), answers_of(sequence), begin, made, most)

    def _work_of(
        self, model: str, cell: str | None, answers: AnswerClass, context: float, made: int, most: int
    ) -> Occupancy:
        rest, token = self._lengths.rest(answers, made, most), self._times.tokens(model, 1, cell)
        if not context:
            return Occupancy(rest.mean * token, rest.variance * token * token)
        begin = self._times.context(model, round(context), cell)  # with it comes the first token
        return Occupancy(begin + (rest.mean - 1) * token, rest.variance * token * token)
