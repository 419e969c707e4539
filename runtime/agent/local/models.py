"""The models of one device, as its agent knows them: which take requests, and how long a context each can have here.

Contract: a model is loaded, perhaps closed while it is about to go, and unloaded. It does not know whose sequences run.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.control.request_checks import capped
from runtime.types import ModelSpec
from zoo.errors import NotFound


class ModelTable:
    def __init__(self, page_capacity: int) -> None:
        self._page_capacity = page_capacity
        self._specs: dict[str, ModelSpec] = {}
        self._closed: set[str] = set()

    def __iter__(self) -> Iterator[ModelSpec]:
        """All models, in the order in which they were loaded."""
        return iter(self._specs.values())

    def __getitem__(self, name: str) -> ModelSpec:
        """Raises NotFound."""
        if name not in self._specs:
            raise NotFound(f"model {name!r} is not loaded")
        return self._specs[name]

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def serving(self, name: str) -> ModelSpec | None:
        """The model if it takes requests."""
        return None if name in self._closed else self._specs.get(name)

    def load(self, spec: ModelSpec) -> ModelSpec:
        """Add a model, its context capped to the device. Raises NotServable if the device is too small, ValueError if
        it is there.
        """
        if spec.name in self._specs:
            raise ValueError(f"model {spec.name} is loaded already")
        self._specs[spec.name] = capped(spec, self._page_capacity)
        return self._specs[spec.name]

    def close(self, name: str) -> None:
        """Take no more requests for it. Raises NotFound."""
        self._closed.add(self[name].name)

    def reopen(self, name: str) -> None:
        self._closed.discard(name)

    def unload(self, name: str) -> ModelSpec:
        """Raises NotFound."""
        spec = self[name]
        del self._specs[name]
        self._closed.discard(name)
        return spec
