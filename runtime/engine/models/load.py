"""Load a model by its name in the store: chain as units, adapter parts attached, spec for the control plane.

`ModelRegistry` calls `load_model`, and `release_units` to drop a model again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from runtime.chains import Stage
from runtime.config import EngineConfig
from runtime.engine.adapters.attach import attach, detach
from runtime.engine.attention.interface import register
from runtime.engine.models.components import ComponentPool, SharedComponent
from runtime.engine.models.loaded import LoadedModel, PageTables, adapter_keys, kv_indices, part_of
from runtime.engine.models.servable import Executor, Servable, servable
from runtime.kv.pool import Pages
from runtime.types import ModelSpec
from surgery.adapters.prompts import virtual_tokens
from surgery.chains.plan import ChainLink, ChainPlan
from surgery.families.settings import context_length, eos_ids, side_json
from surgery.modules.skeleton_pool import Skeletons
from zoo.errors import NotServable
from zoo.manifest import ChainBlock, Component, ModelManifest, digest_of
from zoo.store import Store


def load_model(
    store: Store,
    manifest: ModelManifest,
    chain: tuple[ChainBlock, ...],
    units: ComponentPool,
    pool: Pages,
    config: EngineConfig,
    dtype: torch.dtype | None,
    executor: Executor = "paged",
    part: Stage | None = None,
) -> LoadedModel:
    """Load one model, or one stage of it, onto the device for an executor. Loads everything or nothing.

    For a stage (`part`) only the units of its components are loaded.

    Raises:
        NotServable: the executor cannot run the model exactly.
        MalformedCheckpoint: its config does not describe its components.
        DamagedObject: a stored tensor does not match its digest.
    """
    found = servable(store, manifest, dtype, executor)
    page_tokens = found.page_tokens(pool)  # raises before anything is loaded if a token does not fit into a page
    own, links, widths = manifest, found.plan.links, found.widths
    if part is not None:
        own = part_of(manifest, part)
        links, widths = links[part.lo : part.hi], widths[part.lo : part.hi]
    keys = adapter_keys(own)
    held = _acquire(own, ChainPlan(found.plan.sources, links), keys, units, executor, "" if part is None else part.id)
    try:
        indices = kv_indices(held)
        layers = sum(index is not None for index in indices)
        spec = spec_of(store, manifest, chain, found, config, kv_layers=layers, page_tokens=page_tokens)
    except BaseException:
        release_units(units, held, keys)
        raise
    tables = PageTables(layers, pool.padding, units.device)
    own_spec, widened = replace(spec, name=own.name), units.widens(found.dtype)
    return LoadedModel(own, own_spec, tuple(held), indices, keys, tables, widths, found.dtype, widened)


def prepare_stage(
    store: Store,
    manifest: ModelManifest,
    units: ComponentPool,
    dtype: torch.dtype | None,
    executor: Executor,
    part: Stage,
) -> None:
    """Build the units of a stage that are not there yet, so that `load_model` adopts them. Raises as `load_model`."""
    for component, link, skeletons in _parts(store, manifest, units, dtype, executor, part):
        units.prepare(part.id, component, link, skeletons)


def read_stage(
    store: Store,
    manifest: ModelManifest,
    units: ComponentPool,
    dtype: torch.dtype | None,
    executor: Executor,
    part: Stage,
    stop: Callable[[], bool],
) -> bool:
    """Build the units of a stage that are not there yet, as far as host memory has room and until `stop`.

    Returns whether all are there. Raises as `load_model`.
    """
    return all(
        not stop() and units.read_ahead(component, link, skeletons)
        for component, link, skeletons in _parts(store, manifest, units, dtype, executor, part)
    )


def _parts(
    store: Store,
    manifest: ModelManifest,
    units: ComponentPool,
    dtype: torch.dtype | None,
    executor: Executor,
    part: Stage,
) -> Iterator[tuple[Component, ChainLink, Skeletons]]:
    """Yield what building each component of a stage takes. Raises as `load_model`."""
    found = servable(store, manifest, dtype, executor)
    plan = ChainPlan(found.plan.sources, found.plan.links[part.lo : part.hi])
    skeletons = _skeletons(plan, units, executor)
    for placed, link in zip(part_of(manifest, part).components, plan.links, strict=True):
        yield placed.component, link, skeletons


def _skeletons(plan: ChainPlan, units: ComponentPool, executor: Executor) -> Skeletons:
    return Skeletons(plan.sources, lambda _: register(), masked=executor == "dense", parts=units.fused)


def _acquire(
    manifest: ModelManifest,
    plan: ChainPlan,
    keys: Sequence[str | None],
    units: ComponentPool,
    executor: Executor,
    stage: str,
) -> list[SharedComponent]:
    """Acquire the chain's units and attach the model's adapter parts; release all of them if one fails."""
    skeletons = _skeletons(plan, units, executor)
    held: list[SharedComponent] = []
    try:
        for placed, link, key in zip(manifest.components, plan.links, keys, strict=True):
            held.append(units.acquire(placed.component, link, skeletons, stage))
            if placed.component.adapter is not None and key is not None:
                with units.lock:
                    attach(held[-1], placed.component.adapter, key, units.pool)
    except BaseException:
        release_units(units, held, keys)
        raise
    return held


def spec_of(
    store: Store,
    manifest: ModelManifest,
    chain: tuple[ChainBlock, ...],
    found: Servable,
    config: EngineConfig,
    *,
    kv_layers: int,
    page_tokens: int,
) -> ModelSpec:
    """Return the model's spec for the control plane. Raises NotServable if virtual tokens fill its whole context."""
    settings = found.settings
    virtual = virtual_tokens(manifest.components)
    limit = context_length(settings) - virtual
    if limit < 1:
        raise NotServable(
            f"{manifest.name}: its {virtual} virtual tokens leave no room in a context of {limit + virtual}"
        )
    return ModelSpec(
        name=manifest.name,
        kv_layers=kv_layers,
        page_tokens=page_tokens,
        max_model_len=min(limit, config.max_model_len or limit),
        vocab_size=found.vocab_size,
        eos_token_ids=eos_ids(settings, side_json(store, manifest, "generation_config.json")),
        blocks=tuple(block.digest for block in chain),
        domain=digest_of(["kv", [p.component.digest for p in manifest.components], str(found.dtype)]),
        kind=manifest.kind,
        base=manifest.base,
        virtual_tokens=virtual,
        windowed=bool(settings.get("sliding_window")) and settings.get("use_sliding_window") is not False,
    )


def release_units(units: ComponentPool, held: Sequence[SharedComponent], keys: Sequence[str | None]) -> None:
    """Detach a model's adapter parts, by their keys, from its units and release the units."""
    for unit, key in zip(held, keys, strict=False):
        if key is not None:
            detach(unit, key)
        units.release(unit)
