"""What the server needs of whoever runs sequences, and of whoever knows models. Drivers live in `runtime.cluster`; the
zoo is wired in by the command line. Nothing here is implemented.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Protocol

from runtime.control.counters import AgentState
from runtime.frontend.served_models import ServedModel
from runtime.types import EngineMemory, ModelSpec, SequenceRequest, TokenEvent


class EventStream(Protocol):
    """All events of some sequences, in lists. Closing aborts what is unfinished."""

    def __aiter__(self) -> AsyncIterator[list[TokenEvent]]: ...

    async def aclose(self) -> None: ...


class Driver(Protocol):
    """Runs sequences. `open_stream` and `abort` are quick and called on the event loop; `load`, `unload` and `drain`
    wait.
    """

    @property
    def alive(self) -> bool: ...

    @property
    def death(self) -> str | None: ...

    @property
    def device(self) -> str: ...

    def health(self) -> Mapping[str, Any]:
        """What `/health` says while the driver lives: at least `status`."""
        ...

    def open_stream(self, requests: Sequence[SequenceRequest]) -> EventStream:
        """Raises zoo.errors.Unavailable."""
        ...

    def abort(self, seqs: Iterable[str]) -> None: ...

    def pause(self, request: str, expected: int | None = None) -> int:
        """Sequences of a request that get no tokens until `resume`, 0 for none of that name; `expected`: for so many
        ns. Waits.
        """
        ...

    def resume(self, request: str) -> int: ...

    def models(self) -> tuple[ModelSpec, ...]: ...

    def load(self, name: str) -> ModelSpec: ...

    def unload(self, name: str) -> None: ...

    def state(self) -> AgentState: ...

    def memory(self) -> EngineMemory: ...

    def snapshot(self) -> Mapping[str, Any] | None:
        """The devices behind it, their block instances, chains and moves; None for one device alone."""
        ...

    def drain(self, timeout: float) -> bool: ...


class ModelSource(Protocol):
    """The catalogue, as far as the server looks into it. Methods may read disks: call them from worker threads."""

    def resolve(self, name: str) -> str:
        """The full name. Raises NotFound or AmbiguousName."""
        ...

    def listing(self) -> list[Mapping[str, Any]]:
        """Every model of the store: at least `name`, `kind`, `base`, `family`."""
        ...

    def served(self, spec: ModelSpec) -> ServedModel:
        """Tokenizer and defaults beside a loaded model's spec."""
        ...
