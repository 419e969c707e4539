"""From a name in the store to a loaded model: its chain as units, its adapter parts attached, its spec for the control plane."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from runtime.config import EngineConfig
from runtime.engine.attaching import attach, detach
from runtime.engine.attention import register
from runtime.engine.loaded import LoadedModel, PageTables, kv_indices
from runtime.engine.units import Unit, UnitStore
from runtime.kv.pool import Geometry, PagePool
from runtime.types import ModelSpec
from surgery.families import family_of
from surgery.prompts import virtual_tokens
from surgery.settings import config_of, context_length, eos_ids, side_json
from surgery.skeleton import Skeleton
from surgery.tensors import TORCH_DTYPES
from zoo.errors import NotServable
from zoo.manifest import ChainBlock, ModelManifest, digest_of
from zoo.store import Store


def check_servable(config: Mapping[str, Any], name: str) -> None:
    """Raises NotServable when no executor runs this model exactly, with the reason."""
    family = family_of(config)
    if family.unserved is not None:
        raise NotServable(f"{name} ({family.name}): {family.unserved}")
    if config.get("quantization_config"):
        raise NotServable(f"{name}: quantized weights are stored and exported, not served")


def geometry_of(config: Mapping[str, Any], manifest: ModelManifest, dtype: torch.dtype | None) -> Geometry:
    """KV geometry of a model: heads and width from its config, dtype from its attention weights unless overridden."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    full = CONFIG_MAPPING[manifest.family].from_dict(dict(config))
    heads = full.num_attention_heads
    head_dim = getattr(full, "head_dim", None) or full.hidden_size // heads
    return Geometry(getattr(full, "num_key_value_heads", None) or heads, head_dim, dtype or stored_dtype(manifest))


def stored_dtype(manifest: ModelManifest) -> torch.dtype:
    """Dtype of the largest tensor of the first attention component. Raises NotServable when it is no float."""
    metas = {tensor.digest: tensor for tensor in manifest.tensors}
    first = next(p.component for p in manifest.components if p.component.kind in ("attention", "layer"))
    largest = max((metas[digest] for _, digest in first.tensors), key=lambda meta: meta.elements)
    dtype = TORCH_DTYPES[largest.dtype]
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotServable(f"{manifest.name}: weights of dtype {largest.dtype} are not served")
    return dtype


def load_model(
    store: Store,
    manifest: ModelManifest,
    chain: tuple[ChainBlock, ...],
    units: UnitStore,
    pool: PagePool,
    config: EngineConfig,
    dtype: torch.dtype | None,
) -> LoadedModel:
    """Load one model onto the device; all or nothing.

    Raises:
        NotServable: no executor runs it exactly.
        DamagedObject: a stored tensor does not match its digest.
    """
    settings = config_of(store, manifest)
    check_servable(settings, manifest.name)
    geometry = geometry_of(settings, manifest, dtype)
    page_tokens = pool.page_tokens(geometry)  # refuses what does not fit before anything is loaded
    held = _acquire(manifest, units, functools.cache(lambda: Skeleton(settings, register())))
    indices = kv_indices(held)
    layers = sum(index is not None for index in indices)
    spec = _spec(store, manifest, chain, settings, config, kv_layers=layers, page_tokens=page_tokens, dtype=geometry.dtype)
    adapted = any(placed.component.adapter is not None for placed in manifest.components)
    tables = PageTables(spec.kv_layers, pool.padding, units.device)
    return LoadedModel(manifest, spec, tuple(held), indices, geometry, manifest.name if adapted else None, tables)


def _acquire(manifest: ModelManifest, units: UnitStore, skeleton: Callable[[], Skeleton]) -> list[Unit]:
    """The chain's units with the model's adapter parts on them; none stays when one fails."""
    held: list[Unit] = []
    try:
        for placed in manifest.components:
            held.append(units.acquire(placed, skeleton))
            if placed.component.adapter is not None:
                attach(held[-1], placed.component.adapter, manifest.name, units.pool)
    except BaseException:
        release_units(units, held, manifest.name)
        raise
    return held


def _spec(
    store: Store,
    manifest: ModelManifest,
    chain: tuple[ChainBlock, ...],
    settings: Mapping[str, Any],
    config: EngineConfig,
    *,
    kv_layers: int,
    page_tokens: int,
    dtype: torch.dtype,
) -> ModelSpec:
    """What the control plane is told of the model."""
    virtual = virtual_tokens(manifest.components)
    limit = context_length(settings) - virtual
    if limit < 1:
        raise NotServable(f"{manifest.name}: its {virtual} virtual tokens leave no room in a context of {limit + virtual}")
    return ModelSpec(
        name=manifest.name,
        kv_layers=kv_layers,
        page_tokens=page_tokens,
        max_model_len=min(limit, config.max_model_len or limit),
        vocab_size=int(settings["vocab_size"]),
        eos_token_ids=eos_ids(settings, side_json(store, manifest, "generation_config.json")),
        blocks=tuple(block.digest for block in chain),
        domain=digest_of(["kv", [p.component.digest for p in manifest.components], str(dtype)]),
        kind=manifest.kind,
        base=manifest.base,
        virtual_tokens=virtual,
    )


def release_units(units: UnitStore, held: list[Unit] | tuple[Unit, ...], adapter: str) -> None:
    """Take a model's adapter parts off its units and count the units down."""
    for unit in held:
        detach(unit, adapter)
        units.release(unit)
