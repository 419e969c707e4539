"""Solve plans beside the scheduler: in a process, and until that is ready or where it is not, on a thread.

    solve -> thread: the process, once its kernel is compiled
                     else the plain kernel here, with few rounds
          -> answer

A process that dies is not started again: plans are then made here.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from runtime.cluster.driver.plan_process import PlanProcess
from runtime.control.scheduler_io import PlanSolved, SolvePlan
from runtime.policy.slo.plan.compiled import PLAIN
from runtime.scheduler.order.plan_solver import PLAIN_ROUNDS, Solution, solution_of

_log = logging.getLogger(__name__)


class PlanThread:
    """Solves plans one after the other. `answer` gets each outcome, on this thread."""

    def __init__(self, answer: Callable[[PlanSolved], None]) -> None:
        self._answer = answer
        self._process: PlanProcess | None = None
        self._stopping = False
        self._commands: queue.SimpleQueue[SolvePlan | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="zoo-plans", daemon=True)

    @property
    def process(self) -> PlanProcess | None:
        """The process that solves, None while and where there is none."""
        return self._process

    def start(self) -> None:
        try:
            self._process = PlanProcess()
        except OSError:
            _log.warning("no process for plans could be started; they are made by plain Python", exc_info=True)
        self._thread.start()

    def solve(self, command: SolvePlan) -> None:
        """Queue a problem."""
        self._commands.put(command)

    def stop(self) -> None:
        """End at once; what is being solved has no answer any more."""
        self._stopping = True
        self._commands.put(None)
        if self._process is not None:
            self._process.stop()

    def _run(self) -> None:
        while (command := self._commands.get()) is not None and not self._stopping:
            begun = time.monotonic_ns()
            try:
                found = self._solve(command)
            except Exception as error:
                _log.exception("a plan could not be solved")
                found = Solution(None, f"the planner failed: {type(error).__name__}")
            if self._stopping:
                return
            self._answer(PlanSolved(command.number, found.plan, found.why, time.monotonic_ns() - begun))

    def _solve(self, command: SolvePlan) -> Solution:
        if self._process is not None and self._process.ready:
            found = self._process.solve(command)
            if found is not None:
                return found
            if not self._stopping:
                _log.warning("the process for plans has died; they are made by plain Python")
                self._process = None
        return solution_of(command, PLAIN, min(command.problem.rounds, PLAIN_ROUNDS))
