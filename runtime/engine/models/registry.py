"""The models of one device: load them from the store, each distinct weight once, and drop them again.

All executors use this registry. It is independent of steps and of how K and V are held.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence

import torch

from runtime.chains import Stage
from runtime.config import EngineConfig
from runtime.engine.attention.varlen import device_page_tokens
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.build import Build, NoKernels
from runtime.engine.models.components import ComponentPool
from runtime.engine.models.length_probes import stage_probe
from runtime.engine.models.load import load_model, prepare_stage, read_stage, release_units
from runtime.engine.models.loaded import LoadedModel, part_of
from runtime.engine.models.openmp import give_back, use_one_thread
from runtime.engine.models.private_copy import manifest_for
from runtime.engine.models.servable import Executor, servable, stored_dtype
from runtime.engine.models.swapped import read_model
from runtime.engine.models.versions import check_version, unpinned
from runtime.engine.sampling.constraints import Constraints
from runtime.kv.pool import Pages, PageSizes
from runtime.types import ModelSpec
from surgery.families.settings import context_length
from surgery.tensors.pool import TensorPool
from zoo.catalog import Reader
from zoo.errors import InputError, NotFound
from zoo.manifest import ChainBlock, ModelManifest
from zoo.store import Store

_PAGE_ALIGNMENT = 64
#: So many manifests are kept between what prepares a stage and its load.
_COMING = 16
#: A model as it is to be loaded, and its chain.
_Stored = tuple[ModelManifest, tuple[ChainBlock, ...]]


class ModelRegistry:
    """The loaded models and stages of a device, by name or stage id, and the units that they share.

    Args:
        store: the store that holds the weights.
        config: device, dtype, layers.
        executor: the executor that the models are loaded for.
    """

    def __init__(self, store: Store, config: EngineConfig, executor: Executor) -> None:
        self._store = store
        self._config = config
        self._executor = executor
        self._dtype = None if config.dtype is None else dtype_named(config.dtype)
        pool = TensorPool(store, config.device, self._dtype)
        self.units = ComponentPool(
            pool,
            torch.device(config.device),
            config.layers == "fused",
            config.weights,
            kernels_for(config),
            mixed=executor == "paged",
            quantized=config.quantized,
            idle_bytes=config.host_memory_bytes,
        )
        self.models: dict[str, LoadedModel] = {}
        self._constraints = Constraints(store)
        self._alone: dict[str, int] = {}  # bytes of each model's tensors
        self._coming: dict[str, _Stored] = {}  # stages that are about to be loaded

    def specs(self) -> tuple[ModelSpec, ...]:
        return tuple(model.spec for model in self.models.values())

    def load(self, name: str, pages: Pages, part: Stage | None = None) -> LoadedModel:
        """Load a model or a stage of it; return at once if it is loaded already.

        Stages are registered by id. A stage's model name may be pinned to a version (`engine.models.versions`), and
        may be one of `engine.models.swapped`.

        Raises NotServable, NotFound (also if the store holds another version), AmbiguousName, DamagedObject.
        """
        name, version = (name, "") if part is None else unpinned(name)
        with self._store.keeping():  # no collection between reading the manifest and mapping its objects
            with self._store.catalog.reading() as catalog:
                known = catalog.resolve(name) if part is None else part.id
                if known in self.models:
                    self.units.end_preparation(known)
                    return self.models[known]
                found = self._coming.pop(known, None)
                manifest, chain = self._stored(catalog, name) if found is None else found
            try:
                if version:
                    check_version(manifest, self._dtype or stored_dtype(manifest), version)
                model = load_model(
                    self._store, manifest, chain, self.units, pages, self._config, self._dtype, self._executor, part
                )
            finally:
                if part is not None:
                    self.units.end_preparation(part.id)
        if self._config.length_probes and part is not None:
            model.probe = stage_probe(self._store, name, part, model.widths, self.units.device)
        model.constraints = self._constraints
        self.models[known] = model
        self._alone[known] = sum(tensor.nbytes for tensor in model.manifest.tensors)
        give_back()
        return model

    def prepare(self, stage: Stage) -> None:
        """Read, verify and pack the weights of a stage, so that loading it takes little time; once more is harmless.

        Call it on a thread of its own, beside steps and other loads. Raises as `load`.
        """
        use_one_thread()
        with self._store.keeping():
            prepare_stage(self._store, self._coming_model(stage), self.units, self._dtype, self._executor, stage)

    def expect(self, stage: Stage) -> None:
        """Keep the idle units of a stage until it is loaded, or another one is expected. Raises as `load`."""
        if not self.units.idle.held:
            return
        parts = part_of(self._coming_model(stage), stage).components
        self.units.expect(stage.id, [each.component.base_digest for each in parts])

    def read_ahead(self, stages: Sequence[Stage], stop: Callable[[], bool]) -> Iterator[tuple[Stage, tuple[str, ...]]]:
        """Read, verify and pack the weights of stages that will be needed, in this order, as far as there is room.

        Yields each stage that is there in full, with its units' digests; ends early once `stop` returns True. Call it
        on a thread of its own. Raises as `load`.
        """
        use_one_thread()
        digests = {
            stage: tuple(each.component.base_digest for each in part_of(self._coming_model(stage), stage).components)
            for stage in stages
        }
        self.units.prefer([digest for some in digests.values() for digest in some])
        with self._store.keeping():
            for stage, units in digests.items():
                model = self._coming_model(stage)
                if not read_stage(self._store, model, self.units, self._dtype, self._executor, stage, stop):
                    return
                yield stage, units

    def unload(self, name: str) -> None:
        """Drop a model by name, or a stage by id, and free what no other one uses. Raises NotFound."""
        model = self.models.pop(name, None)
        if model is None:
            raise NotFound(f"{name} is not loaded")
        del self._alone[name]
        release_units(self.units, model.units, model.adapters)

    def _coming_model(self, stage: Stage) -> ModelManifest:
        """Return the model of a stage that is about to be loaded; it is kept for the load, for a few stages."""
        found = self._coming.get(stage.id)
        if found is None:
            with self._store.catalog.reading() as catalog:
                found = self._stored(catalog, unpinned(stage.model)[0])
            # Loads take from it on another thread, so that its keys are copied before they are gone through.
            for known in list(self._coming)[: max(len(self._coming) + 1 - _COMING, 0)]:
                self._coming.pop(known, None)
            self._coming[stage.id] = found
        return found[0]

    def _stored(self, catalog: Reader, name: str) -> _Stored:
        stored, chain = read_model(catalog, name)
        return manifest_for(stored, self._config.weight_sharing), chain

    def bytes_alone(self) -> int:
        """Return the bytes that the models would take without sharing."""
        return sum(self._alone.values())

    def half_page(self, names: Sequence[str]) -> int:
        """Return the bytes of K in a page for these models; see the function `half_page`."""
        return half_page(self._store, self._config, names, self._executor)


def half_page(store: Store, config: EngineConfig, names: Sequence[str], executor: Executor = "paged") -> int:
    """Return the bytes of K in a page: enough tokens of the model with the largest K per token and layer.

    These are `config.page_tokens`, or what the device's attention kernel needs for models of that dtype.

    Raises as loading does.
    """
    largest, dtype = 1, None if config.dtype is None else dtype_named(config.dtype)
    with store.catalog.reading() as catalog:
        for name in names:
            found = servable(store, catalog.model(catalog.resolve(name)), dtype, executor)
            largest = max(largest, tokens_per_page(config, found.dtype, executor) * found.token_bytes)
    # Memory goes back to the system in whole pages of its own.
    alignment = mmap.PAGESIZE if config.device_memory_bytes else _PAGE_ALIGNMENT
    return -(-largest // alignment) * alignment


def longest_sequence(store: Store, config: EngineConfig, names: Sequence[str], half_page: int) -> int:
    """Return the most bytes of pages that one sequence of any of these models takes, at the end of its context.

    Raises as loading does.
    """
    pages, longest = PageSizes(2 * half_page, half_page), 0
    dtype = None if config.dtype is None else dtype_named(config.dtype)
    with store.catalog.reading() as catalog:
        for name in names:
            manifest = catalog.model(catalog.resolve(name))
            found = servable(store, manifest, dtype)
            layers = sum(placed.component.kind in ("attention", "layer") for placed in manifest.components)
            context = context_length(found.settings)
            tokens = min(context, config.max_model_len or context)
            longest = max(longest, -(-tokens // found.page_tokens(pages)) * layers)
    return longest * 2 * half_page


def tokens_per_page(config: EngineConfig, dtype: torch.dtype, executor: Executor = "paged") -> int:
    """Return the tokens of a page for models of this dtype, unless another model's tokens are wider."""
    device = torch.device(config.device if executor == "paged" else "cpu")  # the dense executor reads no pages
    return config.page_tokens or device_page_tokens(device, dtype)


def kernels_for(config: EngineConfig) -> Kernels | None:
    """Return the native kernels if the device is a CPU and the config allows them, else None.

    If they cannot be built, or the processor lacks the path of products, raises InputError where the config requires
    them and returns None elsewhere.
    """
    if config.kernels == "stock" or torch.device(config.device).type != "cpu":
        return None
    try:
        return Kernels(build=Build(config.bf16_products))
    except NoKernels as why:
        if config.kernels == "native" or config.bf16_products != "auto":
            raise InputError(f"the kernels cannot be had: {why}") from None
        return None


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype of a setting. Raises ValueError for a dtype that is not served."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ValueError(f"dtype must be one of {', '.join(known)}, not {name!r}")
    return known[name]
