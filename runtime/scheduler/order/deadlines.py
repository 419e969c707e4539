"""Order waiting sequences, and predict when they end (QL-04, QL-14 to QL-16).

    off    by priority, then arrival; a sequence that does not fit holds back its chain and its devices
    fcfs   the same order, and a sequence that does not fit holds back all that follow and need its devices
    edf    by priority, then deadline; with `strict` as fcfs holds back
    qlm    as edf; sequences that cannot be on time any more go behind those that can, and running sequences give way
           to urgent ones (`scheduler.order.evictions`)

A deadline is the arrival plus the request's `slo_ms`, or until its first token its `ttft_slo_ms`; one without gets a
soft deadline, so that it is not overtaken for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from runtime.config import OrderConfig
from runtime.control.sequence import Rank
from runtime.policy.slo.lengths import AnswerLengths
from runtime.policy.slo.service_times import ServiceTimes
from runtime.scheduler.admission.waiting_queue import WaitingQueue
from runtime.scheduler.order.forecasts import Forecasts, answers_of, objective_for
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.types import FinishReason, SequenceRequest

#: Share of its expected time in which a sequence may still end: what might be on time is tried.
_LUCK = 0.75
#: Weight of the latest sample in the mean number of running sequences.
_LATEST = 0.05
#: New deadline of a sequence that cannot be on time, as a multiple of its objective.
_LATER = 10


class _Mean:
    """A mean over the latest samples."""

    def __init__(self, first: float) -> None:
        self._value = first

    def add(self, value: float) -> float:
        self._value += (value - self._value) * _LATEST
        return self._value


class DeadlineOrder:
    """Ranks, deadlines and predicted times of the sequences of one scheduler. Times in ns.

    `places`, `outcome`: as of `forecasts`.
    """

    def __init__(self, config: OrderConfig, places: int, outcome: Callable[[int, float, float], None]) -> None:
        self._soft = config.soft_deadline_ms * 1_000_000
        self._times, self.lengths = ServiceTimes(config.speeds), AnswerLengths()
        self.forecasts = Forecasts(self._times, self.lengths, self._soft, places, outcome, config.slo_classes)
        self._batch = _Mean(places)
        self._size = config.group_batches
        self.forecasts.groups.size = max(1, self._size * places)
        self.plan = config.plan
        #: By device: the least time of a decode step there, with its urgent rows alone; where steps are capped.
        self.quickest: dict[str, float] = {}
        #: Time of the latest sample.
        self.now = 0

    def due(self, request: SequenceRequest) -> int:
        """Return a request's deadline when it arrives."""
        return self.forecasts.due(request, bool(request.output))

    def due_of(self, sequence: ScheduledSequence) -> int:
        """Return the deadline of what a sequence still has to be in time for."""
        return self.forecasts.due(sequence.request, bool(sequence.output))

    def rank(self, sequence: ScheduledSequence) -> tuple[int, ...]:
        """Return where a sequence stands among all."""
        return self.forecasts.rank(sequence)

    def follow(self, orders: Mapping[str, Sequence[int]]) -> None:
        """Let waiting groups run in planned orders, by cell: the interface of a plan (QL-04).

        The groups that can be planned are `forecasts.groups`, with their `id`, key, number of waiting members, `due`
        and `started`; `forecasts.work(group)` is the work that each member is. Priorities come before a plan. Groups
        that it does not name, and later ones, are put among the planned ones by deadline; numbers of groups that have
        ended are left out, and an empty plan gives back the order by deadline. Sequences of planned groups are not put
        last when late. The plan takes effect with the next admission; set `ClusterState.changed` for that. O(groups).
        Raises ValueError if a group is named twice.
        """
        self.forecasts.queues.follow(orders)

    def put_late_ones_last(self, waiting: WaitingQueue, now: int) -> None:
        """Move the first sequences of each chain that cannot be on time any more behind those that can."""
        for head in waiting.heads():
            first: ScheduledSequence | None = head
            cell = waiting.cell(head)
            while first is not None and (rank := self._late_rank(first, now)) is not None:
                waiting.rerank(first, rank)
                first = waiting.after(first, cell)

    def part_late_ones(self, waiting: WaitingQueue, sequences: Mapping[str, ScheduledSequence], now: int) -> None:
        """Take the first members of planned groups that cannot be on time any more out of them.

        A group's deadline is its first member's: with one that is late anyway, a plan would give up all of them.
        """
        for group in tuple(self.forecasts.groups.waiting()):
            while group.planned and len(group):
                first = sequences[next(iter(group)).seq]
                if (rank := self._late_rank(first, now, planned=True)) is None:
                    break
                waiting.rerank(first, rank)

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def record_start(self, sequence: ScheduledSequence, now: int) -> None:
        """Record that a sequence starts on its devices."""
        self._times.start(sequence.seq, sequence.tokens - sequence.computed, now, self.forecasts.cell(sequence))
        self.forecasts.record_start(sequence, now)

    def record_first_token(self, sequence: ScheduledSequence, now: int) -> None:
        """Record the first token of a sequence since its latest start.

        Where that was what it had to be in time for, it goes on without a deadline of its own.
        """
        if sequence.request.ttft_slo_ms is not None:
            sequence.rank = sequence.rank._replace(order=self.due_of(sequence))
        self._times.first_token(sequence.seq, sequence.chain.model, len(sequence.output), now)

    def record_leave(self, sequence: ScheduledSequence, now: int) -> None:
        """Record that a sequence leaves its devices."""
        self._times.end(sequence.seq, sequence.chain.model, len(sequence.output), now)
        self.forecasts.record_leave(sequence)

    def record_end(self, sequence: ScheduledSequence, reason: FinishReason, now: int) -> None:
        """Record the length of an answer, and what became of its forecast."""
        completed = reason in ("stop", "length")
        if completed:
            self.lengths.add(answers_of(sequence), len(sequence.output), sequence.seq)
        else:
            self.lengths.drop_running(answers_of(sequence), sequence.seq)
        self.forecasts.record_end(sequence, completed, now)

    def sample(self, running: Iterable[ScheduledSequence], now: int) -> None:
        """Record the progress of running sequences: their tokens' time, and that they are longer than so far."""
        self.now = now
        count = 0
        for count, sequence in enumerate(running, 1):  # noqa: B007
            self._times.sample(sequence.seq, sequence.chain.model, len(sequence.output), now)
            self.lengths.sample(answers_of(sequence), sequence.seq, len(sequence.output))
        if count:
            self.forecasts.groups.size = max(1, round(self._size * self._batch.add(count)))

    # -- predictions ---------------------------------------------------------------------------------------------------

    def service(self, sequence: ScheduledSequence) -> int:
        """Return the expected time from the next start of a sequence to its end."""
        return int(self.forecasts.anew(sequence).mean)

    def shortest(self, sequence: ScheduledSequence) -> int:
        """Return a time in which it may be done, if all goes well, and rows that can wait are left out of its steps.

        It is done with what it has to be in time for: its answer, or its first token.
        """
        if self._waits_only(sequence):
            return int(_LUCK * self.context(sequence, sequence.tokens))
        service, token = self.forecasts.anew(sequence).mean, self.forecasts.token(sequence)
        gain = token - min(self.quickest.values()) if self.quickest else 0.0
        return int(_LUCK * (service - max(gain, 0.0) * self._expected(sequence)))

    def longest(self, sequence: ScheduledSequence) -> int:
        """Return an upper bound of the time from its next start until it is done, for 95 % of the answers."""
        if self._waits_only(sequence):
            return self.context(sequence, sequence.tokens)
        return self.forecasts.longest(sequence, anew=True)

    def rest(self, sequence: ScheduledSequence) -> int:
        """Return the expected time that a running sequence still takes."""
        return int(self.forecasts.rest(sequence).mean)

    def soonest(self, sequence: ScheduledSequence) -> int:
        """Return a time in which a running sequence may be done, if all goes well."""
        return int(_LUCK * self.forecasts.rest(sequence).mean)

    def ends(self, sequence: ScheduledSequence) -> int:
        """Return an upper bound of the time that a running sequence still takes, for 95 % of the answers."""
        return self.forecasts.longest(sequence, anew=False)

    def context(self, sequence: ScheduledSequence, tokens: int) -> int:
        """Return the time to compute so many tokens of a sequence before its next one."""
        return self.forecasts.context(sequence, tokens)

    def settled(self, sequence: ScheduledSequence, now: int) -> bool:
        """Return whether a running sequence has run as long as its next start would take, and made a token since."""
        ran = self._times.since(sequence.seq, now)
        return sequence.phase == "decode" and ran >= self.context(sequence, sequence.tokens)

    def _late_rank(self, sequence: ScheduledSequence, now: int, planned: bool = False) -> Rank | None:
        """Return the rank of a waiting sequence that cannot be on time any more; None for one that still can.

        It goes on with a later deadline, behind those that can be on time, and before those without an objective.
        """
        group, objective = self.forecasts.groups.group_of(sequence.seq), objective_for(sequence)
        if (
            (group is not None and group.planned and not planned)
            or sequence.rank.order != self.due_of(sequence)
            or now + self.shortest(sequence) <= sequence.rank.order
        ):
            return None
        later = self._soft if objective is None else min(self._soft, _LATER * objective.ms * 1_000_000)
        return sequence.rank._replace(order=max(now, sequence.rank.order) + later)

    @staticmethod
    def _waits_only(sequence: ScheduledSequence) -> bool:
        objective = objective_for(sequence)
        return objective is not None and objective.first_token

    def _expected(self, sequence: ScheduledSequence) -> float:
        return self.lengths.expected(answers_of(sequence), len(sequence.output), sequence.request.sampling.max_tokens)
