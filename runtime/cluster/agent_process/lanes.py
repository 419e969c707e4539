"""Run an agent's steps: on the loop's thread one after the other, or in two lanes with a thread each (BL-25).

    OneLane     turn: next_step("all") -> run -> send what another device waits for -> finish_step; on the loop's thread
                If the engine looks ahead: plan 1, launch 1 | plan 2, launch 2, take 1 | plan 3, launch 3, take 2 | …
    TwoLanes    turn: finished steps -> finish_step(lane); idle lanes -> next_step(lane) -> their threads run it and
                wake the loop

`turn` is called by the loop's thread, and only that thread calls the agent. The lanes share the engine, which is made
for that (`StageEngine.second_lane`). A failed step loses its rows only; after `MAX_FAILURES` failed steps of a lane in
a row, or an EngineLost, `turn` raises EngineLost.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from runtime.agent.agent import Agent
from runtime.agent.steps.queue import Lane
from runtime.chains import Array, LaunchedStep, Launching, StageResult, StepRunner
from runtime.cluster.errors import MAX_FAILURES, public
from runtime.control.agent_io import AgentCommand, Send, StageStep
from runtime.types import EngineLost, LoanLost, LoansMixed, StepPlan

_log = logging.getLogger(__name__)

#: Longest time that `close` waits for a running step, in seconds.
_PATIENCE = 30.0


class Lanes(Protocol):
    """One or two lanes of steps."""

    def turn(self) -> list[AgentCommand] | None:
        """Do what can be done now; return the resulting commands, or None if there was nothing to do.

        Raises EngineLost.
        """
        ...

    def since(self) -> int | None:
        """Return when the oldest step on another thread began; None if there is none. From any thread."""
        ...

    def close(self) -> None:
        """End the lanes after their running steps."""
        ...


class _Outcomes:
    """Passes the results of one lane's steps to the agent, and counts failures in a row."""

    def __init__(self, agent: Agent, clock: Callable[[], int], lane: Lane) -> None:
        self._agent, self._clock, self._lane = agent, clock, lane
        self._failures = 0

    def finished(self, result: StageResult) -> list[AgentCommand]:
        commands = self._agent.finish_step(result, self._clock(), self._lane)
        self._failures = 0
        return commands

    def failed(self, error: Exception) -> list[AgentCommand]:
        """Report the oldest step as failed to the agent.

        If that step was finished already, the agent raises: a defect, which ends the loop. Where K and V on another
        device are lost, its sequences run again, and the engine has not failed.
        """
        if isinstance(error, LoanLost):
            intact = not isinstance(error, LoansMixed)
            return self._agent.fail_step(str(error), self._clock(), self._lane, retry=True, intact=intact)
        commands = self._agent.fail_step(f"the engine failed: {public(error)}", self._clock(), self._lane)
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise EngineLost(f"{self._failures} steps in a row failed, the last with {public(error)}") from error
        return commands


class OneLane:
    """All steps on the loop's thread, launched ahead if the engine can."""

    def __init__(
        self, runner: StepRunner, agent: Agent, clock: Callable[[], int], send: Callable[[Send], object]
    ) -> None:
        self._runner, self._agent, self._clock, self._send = runner, agent, clock, send
        self._outcomes = _Outcomes(agent, clock, "all")
        self._launch = runner.launch if isinstance(runner, Launching) and runner.ahead else None
        self._launched: deque[LaunchedStep] = deque()

    def turn(self) -> list[AgentCommand] | None:
        if self._launch is not None:
            return self._turn_ahead(self._launch)
        step = self._agent.next_step(self._clock())
        if step is None:
            return None
        try:
            return self._handle_result(self._runner.run(step.plan, step.inputs))
        except EngineLost:
            raise
        except Exception as error:
            _log.exception("step %d failed", step.plan.step)
            return self._outcomes.failed(error)

    def since(self) -> int | None:
        return None

    def close(self) -> None:
        """Nothing to end."""

    # -- inside --------------------------------------------------------------------------------------------------------

    def _turn_ahead(self, launch: Callable[[StepPlan, Mapping[str, Array]], LaunchedStep]) -> list[AgentCommand] | None:
        """Launch a step if there is one, then take the oldest result unless it is that step's."""
        step = self._agent.next_step(self._clock())
        if step is None and not self._launched:
            return None
        try:
            if step is not None:
                self._launched.append(launch(step.plan, step.inputs))
                if len(self._launched) == 1:
                    return []
        except EngineLost:
            raise
        except Exception as error:  # it fails after the steps launched before it are done
            _log.exception("a step could not be launched")
            before = self._collect_result() if self._launched else []
            return [*before, *self._outcomes.failed(error)]
        return self._collect_result()

    def _collect_result(self) -> list[AgentCommand]:
        """Handle the result of the oldest step. If it failed, the steps launched behind it have failed with it."""
        try:
            return self._handle_result(self._launched.popleft().result())
        except EngineLost:
            raise
        except Exception as error:
            _log.exception("a step failed")
            commands = self._outcomes.failed(error)
            while self._launched:
                _ended(self._launched.popleft())
                commands += self._agent.fail_step("the step before it failed", self._clock(), retry=True)
            return commands

    def _handle_result(self, result: StageResult) -> list[AgentCommand]:
        first = self._agent.first(result, self._clock())
        if first is not None:
            self._send(first)
        return self._outcomes.finished(result)


def _ended(step: LaunchedStep) -> None:
    """Wait until the device has finished a step without using its result."""
    with contextlib.suppress(Exception):
        step.result()


@dataclass(frozen=True, slots=True)
class _Over:
    """A finished step of a lane's thread."""

    lane: Lane
    step: int
    outcome: StageResult | Exception


class _Thread:
    """One lane's thread. `since`: when its running step began; None while it has none."""

    def __init__(self, lane: Lane, runner: StepRunner, over: Callable[[_Over], None]) -> None:
        self._lane: Lane = lane
        self._runner, self._over = runner, over
        self._todo: queue.SimpleQueue[StageStep | None] = queue.SimpleQueue()
        self.since: int | None = None
        self._thread = threading.Thread(target=self._run, name=f"zoo-lane-{lane}", daemon=True)
        self._thread.start()

    def begin(self, step: StageStep, now: int) -> None:
        self.since = now
        self._todo.put(step)

    def close(self) -> None:
        self._todo.put(None)
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        while (step := self._todo.get()) is not None:
            self._over(_Over(self._lane, step.plan.step, self._run_step(step)))

    def _run_step(self, step: StageStep) -> StageResult | Exception:
        try:
            return self._runner.run(step.plan, step.inputs)
        except Exception as error:
            return error


class TwoLanes:
    """Two lanes with a thread each, one for real rows and one for stand-ins.

    Args:
        runners: By lane.
        wake: Ends the loop's wait for messages; called from the lanes' threads.
    """

    def __init__(
        self, runners: Mapping[Lane, StepRunner], agent: Agent, clock: Callable[[], int], wake: Callable[[], None]
    ) -> None:
        self._agent, self._clock, self._wake = agent, clock, wake
        self._back: queue.SimpleQueue[_Over] = queue.SimpleQueue()
        self._outcomes = {lane: _Outcomes(agent, clock, lane) for lane in runners}
        self._threads = {lane: _Thread(lane, runner, self._queue_result) for lane, runner in runners.items()}

    def turn(self) -> list[AgentCommand] | None:
        """Handle finished steps first: their commands must be carried out before any lane starts another step."""
        back: list[_Over] = []
        while not self._back.empty():
            back.append(self._back.get())
        if back:
            return [command for over in back for command in self._handle_result(over)]
        begun = [lane for lane, thread in self._threads.items() if thread.since is None and self._begin(lane, thread)]
        return [] if begun else None

    def since(self) -> int | None:
        return min((since for thread in self._threads.values() if (since := thread.since) is not None), default=None)

    def close(self) -> None:
        for thread in self._threads.values():
            thread.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _queue_result(self, over: _Over) -> None:
        self._back.put(over)
        self._wake()

    def _begin(self, lane: Lane, thread: _Thread) -> bool:
        now = self._clock()
        step = self._agent.next_step(now, lane)
        if step is not None:
            thread.begin(step, now)
        return step is not None

    def _handle_result(self, over: _Over) -> list[AgentCommand]:
        self._threads[over.lane].since = None
        if isinstance(over.outcome, EngineLost):
            raise over.outcome
        if isinstance(over.outcome, Exception):
            _log.error("step %d failed", over.step, exc_info=over.outcome)
            return self._outcomes[over.lane].failed(over.outcome)
        try:
            return self._outcomes[over.lane].finished(over.outcome)
        except Exception as error:  # the engine's result does not match the plan
            _log.exception("step %d failed", over.step)
            return self._outcomes[over.lane].failed(error)


def lanes_for(
    engine: StepRunner,
    beside: StepRunner | None,
    agent: Agent,
    clock: Callable[[], int],
    wake: Callable[[], None],
    send: Callable[[Send], object],
) -> Lanes:
    """Return one lane, or two if `beside` is given: a runner for stand-ins."""
    if beside is None:
        return OneLane(engine, agent, clock, send)
    return TwoLanes({"real": engine, "ahead": beside}, agent, clock, wake)
