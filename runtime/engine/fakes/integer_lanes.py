"""The two lanes of the integer engine (BL-25): its computation is serialized, the pacing of steps is not.

Contract: steps begin in the order of their numbers, which both lanes share, whichever lane's thread calls first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from runtime.chains import Array, StageResult
from runtime.engine.fakes.faults import require
from runtime.types import StepPlan

if TYPE_CHECKING:
    from runtime.engine.fakes.integer_engine import IntegerEngine

#: Seconds that a step waits for the preceding ones.
_PATIENCE = 10.0


class IntegerLanes:
    """All lanes of one engine. `pace`: called with a step's nanoseconds, to spend them."""

    def __init__(self, engine: IntegerEngine, pace: Callable[[int], None] | None) -> None:
        self._engine, self._pace = engine, pace
        self._turn = threading.Condition()
        self._last = 0
        self.several = False

    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        """Run a step on the calling thread."""
        with self._turn:
            if self.several:
                self._turn.wait_for(lambda: self._last >= plan.step - 1, _PATIENCE)
            require(plan.step > self._last, f"step {plan.step} comes after step {self._last}")
            self._last = plan.step
            self._turn.notify_all()
            busy = self._engine.begin(plan, inputs)
        if self._pace is not None:
            self._pace(busy)
        with self._turn:
            return self._engine.end(plan, inputs, busy)
