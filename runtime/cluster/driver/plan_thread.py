"""Solve plans on a thread of their own, off the scheduler's.

The kernel is compiled there first, which takes some seconds; plans that are asked for meanwhile are solved by the plain
one, with few rounds. Compiled code runs beside the interpreter.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from runtime.control.scheduler_io import PlanSolved, SolvePlan
from runtime.policy.slo.plan.compiled import PLAIN, PlanKernel, compile_kernel
from runtime.scheduler.order.plan_solver import PLAIN_ROUNDS, Solution, solution_of

_log = logging.getLogger(__name__)


class PlanThread:
    """Solves plans one after the other. `answer` gets each outcome, on this thread."""

    def __init__(self, answer: Callable[[PlanSolved], None]) -> None:
        self._answer = answer
        self._kernel: PlanKernel | None = None
        self._commands: queue.SimpleQueue[SolvePlan | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name="zoo-plans", daemon=True),
            threading.Thread(target=self._compile, name="zoo-plans-compile", daemon=True),
        ]

    def start(self) -> None:
        for each in self._threads:
            each.start()

    def solve(self, command: SolvePlan) -> None:
        """Queue a problem."""
        self._commands.put(command)

    def stop(self) -> None:
        """End after the problem that is being solved."""
        self._commands.put(None)

    def _compile(self) -> None:
        try:
            self._kernel = compile_kernel()
        except Exception:
            _log.warning("the planner's kernel could not be compiled; plans are made by plain Python", exc_info=True)

    def _run(self) -> None:
        while (command := self._commands.get()) is not None:
            begun = time.monotonic_ns()
            try:
                found = self._solve(command)
            except Exception as error:
                _log.exception("a plan could not be solved")
                found = Solution(None, f"the planner failed: {type(error).__name__}")
            self._answer(PlanSolved(command.number, found.plan, found.why, time.monotonic_ns() - begun))

    def _solve(self, command: SolvePlan) -> Solution:
        if self._kernel is None:
            return solution_of(command, PLAIN, min(command.problem.rounds, PLAIN_ROUNDS))
        return solution_of(command, self._kernel)
