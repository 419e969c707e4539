"""The agent: the state machine of one device. It takes requests, says what the next step is, and tells who got
which token.

Contract: a driver calls, from one thread at a time,

    add(request)           whenever one arrives           abort(seq)          in any phase, as often as it likes
    next_step()            a plan, or None when idle      finish_step(result) or fail_step(error), once per plan, oldest first

with `now` in nanoseconds of its own clock. Every sequence gets each of its tokens once, in order, and exactly one
event with `finish` set, its last, whatever happens: a refusal, an abort, a preemption, a fault. Pages of a sequence
that ends while its step runs stay taken until that step is over, for the engine may still be writing them. What is
no longer of use to the engine is named in the next plan's `released`.

Looking `ahead`, it makes the next plan while one is under way: rows stand on tokens that only the engine has
(`Row.awaits`). Whoever ends by their number gets no row too many; whoever ends by what a token is has one, whose
token is dropped. What cannot be planned
like that waits for the step under way: whoever is to be preempted must be at rest.

It decides nothing about batches (`policy.batching.continuous` does), runs nothing, and knows no tensors, clocks,
threads or text.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.agent.local.models import ModelTable
from runtime.agent.local.planned import PlannedSequence, UnderWay
from runtime.agent.local.planner import Planner
from runtime.agent.local.roster import Roster
from runtime.agent.steps.check_result import sampled_by_seq
from runtime.config import BatchingConfig
from runtime.control.counters import AgentState, Counters, block_loads, model_loads
from runtime.control.request_checks import refusal
from runtime.control.sequence import Rank
from runtime.control.token_events import end_event, refusal_event, token_event
from runtime.control.trace_events import TraceEvents
from runtime.kv.pages import PageBook
from runtime.policy.batching.continuous import decide
from runtime.tracing.sink import TraceSink
from runtime.types import (
    FinishReason,
    ModelSpec,
    Opened,
    Row,
    Sampled,
    SequenceRequest,
    StepPlan,
    StepResult,
    TokenEvent,
)
from zoo.errors import InUse


class LocalAgent:
    def __init__(
        self,
        models: Iterable[ModelSpec],
        page_capacity: int,
        config: BatchingConfig,
        trace: TraceSink | None = None,
        device: str = "0",
        now: int = 0,
        ahead: bool = False,
    ) -> None:
        """`ahead`: whether plans are made while a step is under way. Raises NotServable for a model with no room for
        one token.
        """
        self._config = config
        self._tell = TraceEvents(trace, device)
        self._tally = Counters()
        self._book = PageBook(page_capacity)
        self.models = ModelTable(page_capacity)
        self._roster = Roster()
        self._planner = Planner(config, self._book, self._roster, self._tell)
        self._failed = False
        self._released: list[str] = []
        self._under_way = UnderWay(2 if ahead else 1)
        self._steps = 0
        self._arrivals = 0
        for spec in models:
            self.load_model(spec, now)

    @property
    def busy(self) -> bool:
        """Whether a step is under way or there is work for one."""
        return len(self._under_way) > 0 or len(self._roster) > 0

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: SequenceRequest, now: int) -> list[TokenEvent]:
        """Take a sequence. One that can never be served gets its only event, an error, at once.

        Raises ValueError if a sequence of that name is still alive: names are the caller's affair.
        """
        if self._roster.holds(request.seq):
            raise ValueError(f"sequence {request.seq} exists already")
        self._tell.arrive(now, request)
        spec = self.models.serving(request.model)
        why = f"model {request.model!r} is not loaded" if spec is None else refusal(request, spec)
        if spec is None or why is not None:
            return [self._refuse(request, why or "", now)]
        self._arrivals += 1
        self._roster.enter(PlannedSequence(request, spec, Rank(request.priority, request.arrival, self._arrivals)))
        return []

    def abort(self, seq: str, now: int) -> list[TokenEvent]:
        """End a sequence wherever it is. One that has ended already, or never was, is nothing to do."""
        live = self._roster.get(seq)
        return [] if live is None else [self._end(live, "abort", now)]

    # -- steps ---------------------------------------------------------------------------------------------------------

    def next_step(self, now: int) -> StepPlan | None:
        """The next iteration over all running sequences; None when there are none, or when what is under way must be
        over first.

        Raises RuntimeError while as many are under way as may be.
        """
        self._under_way.require_room()
        if not len(self._roster) or (self._failed and len(self._under_way)):
            return (
                None  # what lies behind a failed step may not run: its sequences are only known again when it is back
            )
        self._failed = False
        decision = decide(self._planner.snapshot(), self._config)
        if len(self._under_way) and (decision.preempted or not decision.shares):
            return None
        if not decision.shares:
            raise RuntimeError("no sequence can advance, though each was checked to fit the device")
        for seq in decision.preempted:
            self._preempt(self._roster[seq], now)
        opened = tuple(self._planner.admit(self._roster[seq], now) for seq in decision.admitted)
        return self._issue(tuple(self._planner.row(share, self._steps + 1, now) for share in decision.shares), opened)

    def flush(self) -> StepPlan | None:
        """A plan without rows that lets the engine forget what has ended; None if it has. For when a model is about to
        go.
        """
        return self._issue((), ()) if self._released else None

    def finish_step(self, result: StepResult, now: int) -> list[TokenEvent]:
        """Take what the engine made of the oldest plan; a token each for the rows that sampled, and what has ended.

        Raises ValueError, and changes nothing, if the result does not answer the plan: then the step is to be failed.
        """
        plan = self._under_way.oldest
        sampled = sampled_by_seq(plan, result)
        self._under_way.take()
        self._tally.step(plan, result)
        self._tell.segments(now, plan.step, result.segments)
        self._keep_prompt_logprobs(result)
        events = []
        deferred = frozenset(result.deferred)
        for row in plan.rows:
            live = self._back(row, now)
            if (
                live is not None
                and row.seq not in deferred
                and (event := self._advance(live, row, sampled.get(row.seq), now)) is not None
            ):
                events.append(event)
        return events

    def fail_step(self, error: str, now: int) -> list[TokenEvent]:
        """The engine failed on the oldest plan: its sequences end with `error`, all others go on.

        How far the engine got is unknown, so the next plan releases this one's sequences, and what it released, once
        more.
        """
        plan = self._under_way.take()
        self._failed = True
        self._tally.failed_steps += 1
        self._tell.fault(now, plan.step, error)
        self._released.extend(self._under_way.unopened(plan.released))
        lives = (self._back(row, now) for row in plan.rows)
        return [self._end(live, "error", now, error) for live in lives if live is not None]

    def skip_step(self, now: int) -> None:
        """The engine did not begin the oldest plan, because one before it failed: who is left of its sequences is run
        again.
        """
        plan = self._under_way.take()
        self._released.extend(self._under_way.unopened(plan.released))
        for row in plan.rows:
            live = self._back(row, now)
            if live is not None:
                self._send_back(live, now)

    def end_all(self, error: str, now: int) -> list[TokenEvent]:
        """The engine is gone: every sequence ends with `error`, every page is free, a step under way will never end."""
        self._tell.fault(now, self._steps, error)
        self._under_way.clear()
        for live in self._roster.settle_all():
            self._let_go(live, now)
        for live in self._roster:
            live.alone()
        events = [self._end(live, "error", now, error) for live in self._roster]
        self._released.clear()
        self._failed = False
        return events

    # -- models --------------------------------------------------------------------------------------------------------

    def load_model(self, spec: ModelSpec, now: int) -> ModelSpec:
        """Take requests for a model; returns it capped to this device. Raises NotServable, ValueError if it is there
        already.
        """
        loaded = self.models.load(spec)
        self._tell.model(now, "model.load", spec)
        return loaded

    def in_use(self, name: str) -> bool:
        """Whether sequences of a model are alive here, or its pages still in a step."""
        return self._roster.uses(name)

    def unload_model(self, name: str, now: int) -> None:
        """Forget a model. Raises NotFound, and InUse while sequences of it are alive."""
        if self.in_use(name):
            raise InUse(f"sequences of {name} are still running")
        self._tell.model(now, "model.unload", self.models.unload(name))

    # -- looking in ----------------------------------------------------------------------------------------------------

    def state(self) -> AgentState:
        running, waiting = self._roster.running, self._roster.waiting
        models = model_loads(self.models, (live.spec.name for live in running), (live.spec.name for live in waiting))
        instances = block_loads(self.models, models, self._config.max_num_seqs)
        return AgentState(len(running), len(waiting), self._book.counts(), models, instances, self._tally.snapshot())

    def check(self) -> None:
        """Verify that pages, queues and sequences agree. Raises PageBookDamaged or RuntimeError. For tests, after every
        event.
        """
        self._book.check()
        self._roster.check(self._book)

    # -- inside: making a plan -----------------------------------------------------------------------------------------

    def _preempt(self, live: PlannedSequence, now: int) -> None:
        self._tally.preemptions += 1
        self._tell.preempted(now, live.request, len(live.output))
        self._send_back(live, now)

    def _send_back(self, live: PlannedSequence, now: int) -> None:
        """Its K and V are lost: it waits, and is run again from its prompt and output."""
        self._let_go(live, now)
        live.restart()
        self._roster.send_back(live)

    def _issue(self, rows: tuple[Row, ...], opened: tuple[Opened, ...]) -> StepPlan:
        self._steps += 1
        plan = self._under_way.add(StepPlan(self._steps, rows, opened, tuple(self._released)))
        self._released.clear()
        return plan

    # -- inside: taking a result ---------------------------------------------------------------------------------------

    def _back(self, row: Row, now: int) -> PlannedSequence | None:
        """A row's step is over. Its sequence, if that lives; one that has ended gives its pages back with the last of
        its rows.
        """
        live = self._roster.get(row.seq)
        if live is None:
            leaving = self._roster.leaving(row.seq)
            leaving.back(row)
            if not leaving.rows:
                self._let_go(self._roster.settle(row.seq), now)
        else:
            live.back(row)
        return live

    def _keep_prompt_logprobs(self, result: StepResult) -> None:
        for chunk in result.prompt_logprobs:
            live = self._roster.get(chunk.seq)
            if live is not None and not live.output:  # with output they were told before a preemption
                live.prompt_logprobs.append(chunk)

    def _advance(self, live: PlannedSequence, row: Row, sampled: Sampled | None, now: int) -> TokenEvent | None:
        """K and V of a row are written; its token, if one was sampled, joins the output."""
        count = len(row.tokens)
        self._book.fill(live.seq, count)
        live.computed += count
        self._tally.resumed_tokens += count if live.phase == "resume" else 0
        if live.computed < live.tokens:
            return None
        self._tally.prompt_tokens += 0 if live.output else len(live.request.prompt)
        if sampled is None:
            return self._end(live, "length", now)
        return self._append(live, sampled, now)

    def _append(self, live: PlannedSequence, sampled: Sampled, now: int) -> TokenEvent:
        live.phase = "decode"
        live.output.append(sampled.token)
        self._tally.generated_tokens += 1
        self._tell.token(now, live.request, len(live.output) - 1, sampled.token)
        scores = tuple(live.prompt_logprobs)
        live.prompt_logprobs.clear()
        reason = live.finish()
        if reason is not None:
            self._leave(live, reason, now)
        return token_event(live, sampled, scores, reason)

    # -- inside: ends --------------------------------------------------------------------------------------------------

    def _refuse(self, request: SequenceRequest, why: str, now: int) -> TokenEvent:
        self._tally.finished["error"] += 1
        self._tell.ended(now, request, "error", 0)
        return refusal_event(request, why)

    def _end(self, live: PlannedSequence, reason: FinishReason, now: int, error: str | None = None) -> TokenEvent:
        """End a sequence without a token."""
        self._leave(live, reason, now)
        return end_event(live, reason, error)

    def _leave(self, live: PlannedSequence, reason: FinishReason, now: int) -> None:
        """A sequence has ended: out of its queue, its pages free unless a step may still be writing them."""
        self._tally.finished[reason] += 1
        was_running = live in self._roster.running
        mid_step = live.rows > 0
        self._roster.end(live, mid_step=mid_step)
        if was_running:
            self._tell.removed(now, live.request, reason, len(live.output))
        if was_running and not mid_step:
            self._let_go(live, now)
        self._tell.ended(now, live.request, reason, len(live.output))

    def _let_go(self, live: PlannedSequence, now: int) -> None:
        """Give back the pages of a sequence that the engine knows; the next plan tells it."""
        pages = self._book.release(live.seq)
        self._released.append(live.seq)
        self._tell.freed(now, live.request, pages, self._book.free)
