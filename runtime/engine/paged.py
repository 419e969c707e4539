"""The paged executor: one device, one page pool, any number of models; a step runs all their rows together (design, section 7).

Implements `runtime.types.Engine`. It decides nothing: which rows run, and on which pages, is in the plan.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from runtime.config import EngineConfig
from runtime.engine.loaded import LoadedModel
from runtime.engine.loading import load_model, release_units
from runtime.engine.servable import servable
from runtime.engine.step import StepRun
from runtime.engine.units import UnitStore
from runtime.kv.pool import PagePool
from runtime.types import EngineMemory, ModelSpec, StepPlan, StepResult
from surgery.tensors import TensorPool
from zoo.errors import NotFound
from zoo.store import Store

_PAGE_ALIGNMENT = 64


class PagedEngine:
    """See the top of the file.

    Args:
        store: where the weights are.
        config: device, pool size, page size, dtype.
        names: models to load now; the one with the largest KV per token fixes the bytes of a page.

    Raises:
        NotServable, NotFound, AmbiguousName, DamagedObject: as loading does.
    """

    def __init__(self, store: Store, config: EngineConfig, names: Sequence[str]) -> None:
        self._store = store
        self._config = config
        self._dtype = None if config.dtype is None else dtype_named(config.dtype)
        device = torch.device(config.device)
        self._units = UnitStore(TensorPool(store, config.device, self._dtype), device, config.layers == "fused")
        self._pool = PagePool(config.kv_bytes, self._half_page(names), config.device)
        self._models: dict[str, LoadedModel] = {}
        for name in names:
            self.load(name)

    @property
    def device(self) -> str:
        return self._config.device

    @property
    def page_capacity(self) -> int:
        return self._pool.pages

    def models(self) -> tuple[ModelSpec, ...]:
        return tuple(model.spec for model in self._models.values())

    def load(self, name: str) -> ModelSpec:
        """Make a model ready; one that is loaded already costs nothing. Raises as the constructor."""
        with self._store.keeping():  # no collection between reading the manifest and mapping its objects
            with self._store.catalog.reading() as catalog:
                name = catalog.resolve(name)
                if name in self._models:
                    return self._models[name].spec
                manifest, chain = catalog.model(name), tuple(catalog.chain(name))
            model = load_model(self._store, manifest, chain, self._units, self._pool, self._config, self._dtype)
        self._models[name] = model
        return model.spec

    def unload(self, name: str) -> None:
        """Drop a model; what no other model uses is freed. Raises NotFound."""
        model = self._models.pop(name, None)
        if model is None:
            raise NotFound(f"{name} is not loaded")
        release_units(self._units, model.units, model.adapters)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter_ns()
        for seq in plan.released:
            for model in self._models.values():
                if seq in model.sequences:
                    model.close(seq)
        for opened in plan.opened:
            self._models[opened.request.model].open(opened.request, opened.output)
        run = StepRun(self._models, self._units, self._pool, plan, self._config.trace_segments)
        outcome = run.execute()
        return StepResult(plan.step, outcome.sampled, outcome.prompts, tuple(run.segments), time.perf_counter_ns() - begin)

    def memory(self) -> EngineMemory:
        alone = sum(sum(tensor.nbytes for tensor in model.manifest.tensors) for model in self._models.values())
        return EngineMemory(self._units.nbytes, alone, self._pool.nbytes)

    def _half_page(self, names: Sequence[str]) -> int:
        """Bytes of K in a page: `page_tokens` tokens of the model with the largest K per token in a layer."""
        widest = 1
        with self._store.catalog.reading() as catalog:
            for name in names:
                manifest = catalog.model(catalog.resolve(name))
                widest = max(widest, servable(self._store, manifest, self._dtype).token_bytes)
        return -(-self._config.page_tokens * widest // _PAGE_ALIGNMENT) * _PAGE_ALIGNMENT


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a setting. Raises ValueError for one that is not served."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ValueError(f"dtype must be one of {', '.join(known)}, not {name!r}")
    return known[name]
