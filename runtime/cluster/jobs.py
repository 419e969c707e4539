"""Something to be done on another thread, and who waits for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from runtime.types import EngineLost, ModelSpec


@dataclass(frozen=True, slots=True)
class Job:
    """Loads or drops a model between two steps. Exactly one of `run` and `refuse` is called, once."""

    act: Callable[[], ModelSpec]
    _done: Future[ModelSpec] = field(default_factory=Future)

    def run(self) -> None:
        """Raises EngineLost if `act` did: that concerns more than who waits here."""
        try:
            self._done.set_result(self.act())
        except EngineLost as error:
            self._done.set_exception(error)
            raise
        except Exception as error:
            self._done.set_exception(error)

    def refuse(self, error: Exception) -> None:
        self._done.set_exception(error)

    def wait(self) -> ModelSpec:
        """Raises what `act` raised, or what it was refused with."""
        return self._done.result()
