"""Interfaces of what the server uses: a driver that runs sequences, and a source of models.

The drivers are in `runtime.cluster.driver`; the command line connects the zoo's catalogue as `ModelSource`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Protocol

from runtime.control.counters import AgentState
from runtime.frontend.served_models import ServedModel
from runtime.types import EngineMemory, ModelSpec, SequenceRequest, TokenEvent


class EventStream(Protocol):
    """Async iterator of token events of some sequences, one list per step. `aclose` aborts unfinished sequences."""

    def __aiter__(self) -> AsyncIterator[list[TokenEvent]]: ...

    async def aclose(self) -> None: ...


class Driver(Protocol):
    """Runs sequences.

    `alive`, `death`, `device`, `health`, `expect_request`, `open_stream` and `abort` do not block and are called on the
    event loop. The other methods may block: call them on worker threads.
    """

    @property
    def alive(self) -> bool: ...

    @property
    def death(self) -> str | None: ...

    @property
    def device(self) -> str: ...

    def health(self) -> Mapping[str, Any]:
        """Return the body of `/health` while the driver lives: at least `status`."""
        ...

    def open_stream(self, requests: Sequence[SequenceRequest]) -> EventStream:
        """Queue sequences and return the stream of their events. Raises zoo.errors.Unavailable."""
        ...

    def expect_request(self, request: str, comes: bool = True) -> None:
        """Announce the id of a request that is being prepared; not `comes`: that it is refused."""
        ...

    def abort(self, seqs: Iterable[str]) -> None: ...

    def pause(self, request: str, expected: int | None = None) -> int:
        """Stop generating tokens for a request until `resume`.

        Return how many sequences it has, 0 for an unknown request. `expected` is the expected length of the pause in
        ns. Blocks.
        """
        ...

    def resume(self, request: str) -> int: ...

    def set_roles(self, roles: Mapping[str, str]) -> str | None:
        """Change what agents run, by their names; return why that cannot be, with nothing changed, or None.

        It waits for nothing but a lock, so that event loops may call it.
        """
        ...

    def models(self) -> tuple[ModelSpec, ...]: ...

    def load(self, name: str) -> ModelSpec: ...

    def unload(self, name: str) -> None: ...

    def state(self) -> AgentState: ...

    def memory(self) -> EngineMemory: ...

    def snapshot(self) -> Mapping[str, Any] | None:
        """Return devices, block instances, chains and migrations of a cluster; None for a driver of one device."""
        ...

    def drain(self, timeout: float) -> bool: ...


class ModelSource(Protocol):
    """The part of the catalogue that the server uses. Methods may read from disk: call them on worker threads."""

    def resolve(self, name: str) -> str:
        """Return a model's full name. Raises NotFound or AmbiguousName."""
        ...

    def listing(self) -> list[Mapping[str, Any]]:
        """Return every model of the store: at least `name`, `kind`, `base`, `family`."""
        ...

    def served(self, spec: ModelSpec) -> ServedModel:
        """Return a loaded model's spec with its tokenizer and sampling defaults."""
        ...
