"""The turns of one engine: which step is launched next, and when the result of an earlier one is taken.

    engine that looks ahead    plan 1, launch 1, plan 2, launch 2, take 1, plan 3, launch 3, take 2, …     the device always has a step
    any other                  plan 1, launch 1, take 1, plan 2, …

Contract: called from the engine's thread only. The agent is called under the lock, which is never held while the
engine works. A failing step ends its own sequences; after `MAX_FAILURES` in a row, EngineLost. It knows no streams,
no requests and no thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from runtime.agent.local.agent import LocalAgent
from runtime.cluster.errors import MAX_FAILURES, public
from runtime.types import Engine, EngineLost, Launched, StepPlan, StepSkipped, TokenEvent

_log = logging.getLogger(__name__)


class Stepping:
    """See the top of the file.

    Args:
        deliver: takes the events of a step; called with the lock held.
    """

    def __init__(
        self,
        engine: Engine,
        agent: LocalAgent,
        lock: threading.Condition,
        clock: Callable[[], int],
        deliver: Callable[[list[TokenEvent]], None],
    ) -> None:
        self._engine = engine
        self._agent = agent
        self._lock = lock
        self._clock = clock
        self._deliver = deliver
        self._most = 2 if engine.ahead else 1
        self._launched: deque[Launched] = deque()
        self._failures = 0

    def turn(self) -> None:
        """Launch a step if there is one, and take the oldest that was, unless the device would be without one. Raises
        EngineLost.
        """
        with self._lock:
            plan = self._agent.next_step(self._clock())
        if plan is not None:
            self.launch(plan)
        if plan is None or len(self._launched) >= self._most:
            self._take()

    def launch(self, plan: StepPlan) -> None:
        """Give the engine a step. One that it does not take has failed, as soon as those before it are over."""
        try:
            self._launched.append(self._engine.launch(plan))
        except EngineLost:
            raise
        except Exception as error:
            _log.exception("step %d failed", plan.step)
            self.settle()
            self._fail(error)

    def settle(self) -> None:
        """Take all that were launched. Raises EngineLost."""
        while self._launched:
            self._take()

    def _take(self) -> None:
        """Take the oldest, if there is one. If the agent has taken it already when something fails, it raises, and that
        is the end.
        """
        if not self._launched:
            return
        launched = self._launched.popleft()
        try:
            result = launched.result()
            with self._lock:
                self._deliver(self._agent.finish_step(result, self._clock()))
            self._failures = 0
        except EngineLost:
            raise
        except StepSkipped:
            with self._lock:
                self._agent.skip_step(self._clock())
                self._deliver([])  # whoever waits for an end may have it now
        except Exception as error:
            _log.exception("a step failed")
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End the sequences of the oldest step."""
        with self._lock:
            self._deliver(self._agent.fail_step(f"the engine failed: {public(error)}", self._clock()))
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise EngineLost(f"{self._failures} steps in a row failed, the last with {public(error)}") from error
