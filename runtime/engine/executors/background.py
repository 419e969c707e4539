"""Steps on a thread of their own, for a device whose steps take the thread that runs them: a CPU's.

Whoever launches a step goes on at once. Steps run one after the other, in the order of launches. Behind one that fails,
what was launched before that was heard of is skipped. Knows nothing of what a step is.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from runtime.types import Launched, StepPlan, StepResult, StepSkipped


class Background:
    """See the top of the file. The thread comes with the first step and goes with this object."""

    def __init__(self, execute: Callable[[StepPlan], StepResult]) -> None:
        self._execute = execute
        self._thread = ThreadPoolExecutor(1, "zoo-steps")
        self._failed = 0  # written by the steps' thread
        self._heard = 0  # written by whoever launches: of how many failures it has been told

    def launch(self, plan: StepPlan) -> Launched:
        return _Launched(self, self._thread.submit(self._run, plan, self._heard))

    def heard(self) -> None:
        """A failure has been told."""
        self._heard += 1

    def _run(self, plan: StepPlan, heard: int) -> StepResult:
        if self._failed != heard:
            raise StepSkipped(f"step {plan.step} was launched behind one that failed")
        try:
            return self._execute(plan)
        except BaseException:
            self._failed += 1
            raise


@dataclass(frozen=True, slots=True)
class _Launched:
    background: Background
    future: Future[StepResult]

    def result(self) -> StepResult:
        try:
            return self.future.result()
        except StepSkipped:
            raise
        except BaseException:
            self.background.heard()
            raise
