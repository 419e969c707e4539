"""An account of the weights of one device, kept beside the runtime's own and independent of it.

    Ledger(zoo, budget).attach(engine)      from then on every load, unload and step of the engine is checked

It counts the tensors of manifests and the growth of the engine's own count of its memory, where the runtime counts by
blocks what it expects the engine to hold. After each event the engine's count is compared with the budget.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from runtime.chains import Stage
from runtime.engine.models.versions import unpinned
from runtime.types import StepPlan
from zoo.api import Zoo


@dataclass
class Ledger:
    """What was loaded, and the most that was held.

    Fields:
        budget: Bytes of weights that the device may hold.
        private: Whether models share no tensors.
        missing: Sum, over all loads, of the bytes of the stage's tensors that no loaded stage had.
        grown: Sum, over all loads, of the bytes by which the engine's own count grew.
        read: Bytes of tensors read from the store.
        tensors: Most bytes of tensors of loaded stages, each once.
        engine: Most bytes by the engine's own count.
        checks: Number of events checked.
        rows: Most rows of a step.
        over: Events after which the engine's count was above the budget.
    """

    zoo: Zoo
    budget: int
    private: bool = False
    missing: int = 0
    grown: int = 0
    read: int = 0
    tensors: int = 0
    engine: int = 0
    loads: int = 0
    unloads: int = 0
    checks: int = 0
    rows: int = 0
    over: int = 0
    _users: Counter[str] = field(default_factory=Counter)
    _sizes: dict[str, int] = field(default_factory=dict)
    _weights: Callable[[], int] = int
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def attach(self, engine: Any) -> None:
        """Check every load, unload and step of an engine, and count what it reads."""
        self._weights = lambda: int(engine.memory().weights)
        engine.load = self._after(self._growing(engine.load), self._loaded)
        engine.unload = self._after(engine.unload, self._unloaded)
        for name in ("run", "launch"):
            setattr(engine, name, self._after(getattr(engine, name), self._count_rows))
        store = self.zoo.store
        open_tensor = store.open_tensor

        def noted(digest: str) -> Any:
            opened = open_tensor(digest)
            with self._lock:
                self.read += opened.tensor.nbytes
            return opened

        store.open_tensor = noted  # type: ignore[method-assign]

    def document(self) -> Mapping[str, int]:
        return {
            "budget": self.budget, "loads": self.loads, "unloads": self.unloads, "missing": self.missing,
            "grown": self.grown, "read": self.read, "most_tensors": self.tensors, "most_engine": self.engine,
            "checks": self.checks, "over": self.over, "rows": self.rows,
        }  # fmt: skip

    def _growing(self, load: Callable[[Stage], Any]) -> Callable[[Stage], Any]:
        def growing(stage: Stage) -> Any:
            before = self._weights()
            spec = load(stage)
            self.grown += self._weights() - before
            return spec

        return growing

    def _after(self, method: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        @wraps(method)
        def checked(*given: Any) -> Any:
            result = method(*given)
            note(*given)
            self._check()
            return result

        return checked

    def _loaded(self, stage: Stage) -> None:
        self.loads += 1
        for name in self._tensors(stage):
            if not self._users[name]:
                self.missing += self._sizes[name]
            self._users[name] += 1
        self.tensors = max(self.tensors, sum(self._sizes[name] for name, users in self._users.items() if users))

    def _unloaded(self, stage: Stage) -> None:
        self.unloads += 1
        self._users.subtract(self._tensors(stage))

    def _count_rows(self, plan: StepPlan, *_: Any) -> None:
        self.rows = max(self.rows, len(plan.rows))

    def _check(self) -> None:
        self.checks += 1
        held = self._weights()
        self.engine = max(self.engine, held)
        self.over += held > self.budget

    def _tensors(self, stage: Stage) -> set[str]:
        """Return the names of a stage's tensors; their sizes are known from then on."""
        name, _ = unpinned(stage.model)
        manifest = self.zoo.model(name).manifest
        found: set[str] = set()
        for placed in manifest.components[stage.lo : stage.hi]:
            found.update(digest for _, digest in placed.component.tensors)
            if placed.component.adapter is not None:
                found.update(digest for _, digest in placed.component.adapter.tensors)
        sizes = {tensor.digest: tensor.nbytes for tensor in manifest.tensors}
        named = {f"{digest}@{name}" if self.private else digest: sizes[digest] for digest in found}
        self._sizes.update(named)
        return set(named)
