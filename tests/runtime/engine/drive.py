"""The real agent over a real engine, step by step and without threads: what the server does, made repeatable."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from runtime.agent.local.agent import LocalAgent
from runtime.config import BatchingConfig
from runtime.types import Engine, Launched, SequenceRequest, StepResult, TokenEvent


@dataclass
class Drive:
    """What came out: events by sequence, and every step's result. `awaited`: rows that set out before their token was
    known.
    """

    events: dict[str, list[TokenEvent]] = field(default_factory=dict)
    steps: list[StepResult] = field(default_factory=list)
    preemptions: int = 0
    awaited: int = 0

    def tokens(self, seq: str) -> list[int]:
        return [event.token for event in self.events[seq] if event.token is not None]


def drive(
    engine: Engine, arrivals: Mapping[int, Iterable[SequenceRequest]], config: BatchingConfig | None = None
) -> Drive:
    """Run until all is done. `arrivals`: step number -> requests that arrive before it."""
    agent = LocalAgent(engine.models(), engine.page_capacity, config or BatchingConfig())
    out, step, last = Drive(), 0, max(arrivals)
    while agent.busy or step <= last:
        for request in arrivals.get(step, ()):
            _take(out, agent.add(request, step))
        plan = agent.next_step(step)
        if plan is not None:
            result = engine.execute(plan)
            out.steps.append(result)
            _take(out, agent.finish_step(result, step))
            agent.check()
        step += 1
    plan = agent.flush()
    if plan is not None:
        agent.finish_step(engine.execute(plan), step)
    out.preemptions = agent.state().counters.preemptions
    return out


def drive_ahead(
    engine: Engine, arrivals: Mapping[int, Iterable[SequenceRequest]], config: BatchingConfig | None = None
) -> Drive:
    """The same, each step launched before the result of the one before is asked for."""
    agent = LocalAgent(engine.models(), engine.page_capacity, config or BatchingConfig(), ahead=True)
    out, step, last = Drive(), 0, max(arrivals)
    launched: deque[Launched] = deque()
    while agent.busy or step <= last:
        for request in arrivals.get(step, ()):
            _take(out, agent.add(request, step))
        plan = agent.next_step(step)
        if plan is not None:
            out.awaited += sum(row.awaits for row in plan.rows)
            launched.append(engine.launch(plan))
        if launched and (plan is None or len(launched) == 2):
            result = launched.popleft().result()
            out.steps.append(result)
            _take(out, agent.finish_step(result, step))
        agent.check()
        step += 1
    plan = agent.flush()
    if plan is not None:
        agent.finish_step(engine.launch(plan).result(), step)
    out.preemptions = agent.state().counters.preemptions
    return out


def _take(out: Drive, events: Iterable[TokenEvent]) -> None:
    for event in events:
        out.events.setdefault(event.seq, []).append(event)
