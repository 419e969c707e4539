"""Engines that load whole stored models by name, for tests that drive them (`tests.runtime.engine.driven`)."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.chains import Chain, Stage
from runtime.config import EngineConfig
from runtime.engine.catalog.describe import DescribedChain, describe_chain
from runtime.engine.dense.executor import DenseEngine
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.models.registry import half_page
from runtime.engine.models.servable import Executor
from runtime.types import ModelSpec
from tests.runtime.engine.driven import Drive, Driven, Limits, drive
from zoo.store import Store

__all__ = ["DenseDevice", "Drive", "Driven", "Limits", "PagedDevice", "drive"]
_WHOLE = 1 << 62


class Whole:
    """Mixin for an engine: whole models are loaded and unloaded by name, as one stage each."""

    executor: Executor = "paged"

    def begin(self, store: Store, config: EngineConfig, half: int, names: Sequence[str]) -> None:
        self._of = store, config, half
        self.described: list[DescribedChain] = []
        for name in names:
            self.load(name)

    def models(self) -> tuple[ModelSpec, ...]:
        return tuple(each.chain.spec for each in self.described)

    def stage(self, model: str) -> str:
        """Return the stage ID of a whole model, as step plans name it."""
        return _stage(next(each.chain for each in self.described if each.chain.model == model)).id

    def load(self, what: str | Stage) -> ModelSpec:
        if isinstance(what, Stage):
            return super().load(what)  # type: ignore[misc, no-any-return]
        store, config, half = self._of
        found = describe_chain(store, what, config, half, _WHOLE, None, self.executor)
        super().load(_stage(found.chain))  # type: ignore[misc]
        if found.chain.spec not in self.models():
            self.described.append(found)
        return found.chain.spec

    def unload(self, what: str | Stage) -> None:
        if isinstance(what, Stage):
            super().unload(what)  # type: ignore[misc]
            return
        found = next(each for each in self.described if each.chain.model == what)
        self.described.remove(found)
        super().unload(_stage(found.chain))  # type: ignore[misc]


def _stage(chain: Chain) -> Stage:
    return chain.stage(0, chain.length)


class PagedDevice(Whole, StagedEngine):
    """The paged executor with whole models loaded."""

    def __init__(self, store: Store, config: EngineConfig, names: Sequence[str]) -> None:
        half = half_page(store, config, names)
        super().__init__(store, config, half)
        self.begin(store, config, half, names)


class DenseDevice(Whole, DenseEngine):
    """The dense executor with whole models loaded."""

    executor = "dense"

    def __init__(self, store: Store, config: EngineConfig, names: Sequence[str]) -> None:
        half = half_page(store, config, names, "dense")
        super().__init__(store, config, half)
        self.begin(store, config, half, names)
