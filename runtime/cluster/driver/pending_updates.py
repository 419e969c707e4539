"""Who waits for what becomes of a ServeModel or WithdrawModel: the scheduler answers those of one model in the order in
which they came.

Contract: called on the scheduler's thread; futures are waited for on others. Decides nothing.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

from runtime.control.scheduler_io import ModelUpdated, ServeModel, WithdrawModel


class PendingUpdates:
    def __init__(self) -> None:
        self._waiting: dict[str, deque[Future[ModelUpdated]]] = {}

    def add_update(self, event: ServeModel | WithdrawModel, answer: Future[ModelUpdated]) -> None:
        """An event is about to be told to the scheduler."""
        model = event.chain.model if isinstance(event, ServeModel) else event.model
        self._waiting.setdefault(model, deque()).append(answer)

    def answered(self, updated: ModelUpdated) -> None:
        waiting = self._waiting.get(updated.model)
        if waiting:
            waiting.popleft().set_result(updated)
        if not waiting:
            self._waiting.pop(updated.model, None)
