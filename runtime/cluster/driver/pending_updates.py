"""Futures of ServeModel and WithdrawModel events; the scheduler answers those of one model in order.

Used on the scheduler's thread; other threads wait for the futures.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

from runtime.control.scheduler_io import ModelUpdated, ServeModel, WithdrawModel


class PendingUpdates:
    """The unanswered model updates, by model."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Future[ModelUpdated]]] = {}

    def add_update(self, event: ServeModel | WithdrawModel, answer: Future[ModelUpdated]) -> None:
        """Register the future of an event that is about to be passed to the scheduler."""
        model = event.chain.model if isinstance(event, ServeModel) else event.model
        self._waiting.setdefault(model, deque()).append(answer)

    def answered(self, updated: ModelUpdated) -> None:
        """Resolve the oldest future of the model."""
        waiting = self._waiting.get(updated.model)
        if waiting:
            waiting.popleft().set_result(updated)
        if not waiting:
            self._waiting.pop(updated.model, None)
