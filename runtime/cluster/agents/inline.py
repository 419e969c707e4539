"""Run the only agent on the scheduler's thread, without processes, threads or serialized messages.

    send -> InlineLink -> AgentLoop.turn: Agent.handle, a step of the engine -> InlineLink -> scheduler

`InlineAgent` is an `AgentPool`, like `RemoteAgents`. Stages load and steps run in `receive`, where no lock is held. An
engine that is lost or cannot be made is not made again: another one in the same process would most likely fail too
(phase `failed` of `AgentLifecycles`).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace

from runtime.agent.agent import Agent
from runtime.chains import StageEngine, looks_ahead
from runtime.cluster.agent_process.loop import AgentLoop, AgentSettings
from runtime.cluster.agents.lifecycle import AgentLifecycles
from runtime.cluster.agents.pool import AgentWork, Told
from runtime.cluster.errors import public
from runtime.cluster.version import own_version
from runtime.config import AgentConfig
from runtime.control.counters import Counters
from runtime.control.scheduler_io import AgentDown
from runtime.control.trace_events import TraceEvents
from runtime.messages import AgentHello, AgentStats, Message, PeerList, StageReady
from runtime.tracing.sink import TraceSink
from runtime.transport.link import InlineLink
from runtime.types import SegmentRun, StepPlan, StepResult

_log = logging.getLogger(__name__)

#: The suffix of a stage id behind the model's name: version and components.
_STAGE = re.compile(r"(#[0-9a-f]{16})?\[[0-9]+:[0-9]+\]$")


class InlineAgent:
    """The only agent of a cluster, on the scheduler's thread. All methods except `wake` are called on that thread.

    Args:
        make: Makes the engine; called on the thread that will run it.
        device: Its name in paths.
        trace: Receives the segments that ran; the scheduler traces everything else.
    """

    def __init__(
        self,
        make: Callable[[], StageEngine],
        agent: AgentConfig | None = None,
        settings: AgentSettings | None = None,
        device: str = "agent-0",
        clock: Callable[[], int] = time.monotonic_ns,
        trace: TraceSink | None = None,
    ) -> None:
        """`batch_wait_us` is set to 0: rows due back from the scheduler always arrive before the next step."""
        self._make, self._settings, self._clock = make, settings or AgentSettings(), clock
        self._agent = replace(agent or AgentConfig(), batch_wait_us=0)
        self._counters, self._trace_events = Counters(), TraceEvents(trace, device)
        self.device = device
        self.lifecycles = AgentLifecycles([device])
        self.reports: dict[str, AgentStats] = {}
        self.page_bytes = 0
        self._link = InlineLink()
        self._loop: AgentLoop | None = None
        self._incarnation = 0
        self._again = False

    def wake(self) -> None:
        """End a `receive` that waits. From any thread."""
        self._link.wake()

    def receive(self, timeout: float) -> list[Told]:
        """Run one turn of the agent's loop and return its messages.

        Waits up to `timeout` seconds if there is nothing to do.
        """
        if self._again:
            return self._end("it was restarted", planned=True)
        if self._loop is None:
            for _, incarnation in self.lifecycles.due(self._clock()):
                return self._begin(incarnation)
            time.sleep(min(timeout, 0.001))  # the agent has failed; `SchedulerLoop` is about to notice
            return []
        ended = self._loop.turn(timeout)
        told: list[Told] = [*map(self._handle_message, self._link.drain_messages())]
        return told if ended is None else [*told, *self._end(ended.reason)]

    def look(self) -> list[Told]:
        """Return nothing: an agent on this thread can neither hang unnoticed nor miss heartbeats."""
        return []

    def send(self, device: str, message: Message) -> None:
        if self._loop is not None and device == self.device:
            self._link.deliver(message)

    def restart(self, device: str) -> None:
        """Replace the engine by a new one after the running step."""
        self._again = True

    def work(self) -> AgentWork:
        counters = self._counters
        return AgentWork(counters.steps, counters.busy, counters.segments, counters.idle_tokens)

    def close(self, patience: float) -> None:
        """Release the engine."""
        self._close_loop()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _begin(self, incarnation: int) -> list[Told]:
        self._incarnation = incarnation
        try:
            engine = self._make()
        except Exception as error:
            _log.error("the engine cannot be made", exc_info=True)
            return self._end(f"the engine cannot be made: {public(error)}")
        ahead = looks_ahead(engine) and not self._settings.own_lane
        agent = Agent(
            self.device,
            engine.page_capacity,
            self._agent,
            engine.alike,
            self._record_step,
            engine.lacks,
            looks_ahead=ahead,
            page_bytes=engine.page_bytes,
        )
        self._loop = AgentLoop(engine, agent, self._link, self._settings, own_version(), self._clock)
        self._link.deliver(PeerList(((self.device, incarnation, self._link.address),)))
        return self.receive(0.0)

    def _close_loop(self) -> None:
        if self._loop is not None:
            self._loop.close()
        self._loop = None

    def _record_step(self, plan: StepPlan, result: StepResult, now: int) -> None:
        self._counters.step(plan, result)
        if result.segments:
            self._trace_events.segments(now, plan.step, tuple(map(by_models, result.segments)))

    def _handle_message(self, message: Message) -> Message:
        if isinstance(message, AgentHello):
            self.page_bytes = message.page_bytes
            self.lifecycles.ready(self.device, self._incarnation, self._clock())
        elif isinstance(message, StageReady):
            self._trace_events.model(self._clock(), "model.load", message.spec)
        elif isinstance(message, AgentStats):
            self.reports[self.device] = message
        return message

    def _end(self, reason: str, *, planned: bool = False) -> list[Told]:
        was_up = self.lifecycles.up(self.device, self._incarnation)
        self.lifecycles.died(self.device, self._incarnation, reason, self._clock(), final=not planned, planned=planned)
        self._close_loop()
        self._again = False
        self._link.receive(0.0)
        self.reports.clear()
        return [AgentDown(self.device, reason, planned=planned)] if was_up else []


def by_models(run: SegmentRun) -> SegmentRun:
    """Replace stage ids by model names, which users know."""
    return replace(run, models=tuple(dict.fromkeys(_STAGE.sub("", model) for model in run.models)))
