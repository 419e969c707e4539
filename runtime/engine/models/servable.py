"""Whether a stored model can run, and what its layers' K and V look like: decided from manifest and configs, before
anything is loaded.

A model's components may come from several configs (`surgery.chains.plan`); each attention layer then has the KV
geometry of its own. All components must have one dtype, unless the engine casts them: no checkpoint, and no stack
outside the engine, defines what hidden states of one dtype are to a layer of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from runtime.kv.pool import Geometry, Pages
from surgery.chains.plan import STITCH, ChainLink, ChainPlan, plan_of, stitch_spec
from surgery.families.plain import plain_settings
from surgery.families.settings import config_of
from surgery.families.table import DENSE_ONLY, family_of
from surgery.tensors.pool import TORCH_DTYPES
from zoo.errors import MalformedCheckpoint, NotServable
from zoo.manifest import Component, ModelManifest, Placed
from zoo.store import Store

#: Ways of running models on a device: attention through page tables, or Baton's left-padded batches.
Executor = Literal["paged", "dense"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Servable:
    """A model that can run. `settings`: its `config.json`; `geometries`: the distinct ones of its attention layers.

    `widths[i]`: values a token that component i reads; the embedding's are those that it gives.
    """

    settings: Mapping[str, Any]
    plan: ChainPlan
    vocab_size: int
    dtype: torch.dtype
    geometries: tuple[Geometry, ...]
    widths: tuple[int, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of K of one token in its widest layer."""
        return max(geometry.token_bytes for geometry in self.geometries)

    def page_tokens(self, pool: Pages) -> int:
        """Tokens that every layer of the model fits into a page. Raises NotServable when not one fits."""
        return min(pool.page_tokens(geometry) for geometry in self.geometries)


def servable(
    store: Store, manifest: ModelManifest, dtype: torch.dtype | None, executor: Executor = "paged"
) -> Servable:
    """What serving must know of a model before it loads it. `dtype`: what the engine casts weights to, None for as they
    are.
    `executor`: which one is to run it; the dense one runs all that the paged one does, and families whose layers attend
    by themselves.

    Raises:
        NotServable: the executor does not run this model exactly, with the reason.
        MalformedCheckpoint: no usable config, or one that does not describe the components.
    """
    name = manifest.name
    if manifest.kind == "stitch":
        raise NotServable(f"{name} is a stitch, not a model: `zoo compose` puts it between the layers of two models")
    settings = config_of(store, manifest)
    plan = plan_of(settings, manifest.components)
    for source in plan.sources:
        _check_source(source, manifest, executor)
    shapes = [_shape_of(source, name) for source in plan.sources]
    widths = _check_chain(plan, manifest, shapes)
    vocabulary = _vocabulary(plan, name, shapes)
    stored = dtype or stored_dtype(manifest)
    attending = dict.fromkeys(link.source for link in plan.links if link.kind in ("attention", "layer"))
    geometries = [Geometry(shapes[at].kv_heads, shapes[at].head_dim, stored) for at in attending if at is not None]
    return Servable(settings, plan, vocabulary, stored, tuple(dict.fromkeys(geometries)), widths)


def stored_dtype(manifest: ModelManifest) -> torch.dtype:
    """The dtype of a model's components. Raises NotServable when it is no float, or not one."""
    metas = {tensor.digest: tensor for tensor in manifest.tensors}
    found: dict[str, Placed] = {}
    for placed in manifest.components:
        tensors = [metas[digest] for _, digest in placed.component.tensors]
        if tensors:
            found.setdefault(max(tensors, key=lambda meta: meta.elements).dtype, placed)
    for name in found:
        if TORCH_DTYPES.get(name) not in _FLOATS:
            raise NotServable(f"{manifest.name}: weights of dtype {name} are not served")
    if len(found) != 1:
        several = ", ".join(f"{_words(placed)} {name}" for name, placed in found.items())
        raise NotServable(
            f"{manifest.name}: its blocks have several dtypes ({several}); serve it with one dtype for all (--dtype)"
        )
    return TORCH_DTYPES[next(iter(found))]


def _words(placed: Placed) -> str:
    kind = placed.component.kind
    return kind if placed.layer is None else f"{kind} of layer {placed.layer}"


def _check_source(config: Mapping[str, Any], manifest: ModelManifest, executor: Executor) -> None:
    family = family_of(config)
    if family.masked and executor == "paged":
        raise NotServable(f"{manifest.name} ({family.name}): {DENSE_ONLY} (--executor dense)")
    if family.masked and any(
        p.component.adapter is not None and p.component.adapter.kind == "prefix" for p in manifest.components
    ):
        raise NotServable(
            f"{manifest.name}: prefix tuning is not served on {family.name}, whose layers attend by themselves"
        )
    if config.get("quantization_config"):
        raise NotServable(f"{manifest.name}: quantized weights are stored and exported, not served")


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of a config: vocabulary, width of the hidden states, and heads of K and V."""

    vocabulary: int
    width: int
    kv_heads: int
    head_dim: int


def _shape_of(config: Mapping[str, Any], name: str) -> _Shape:
    plain = plain_settings(config)
    if plain is not None:
        return _Shape(plain.vocab_size, plain.hidden_size, plain.kv_heads, plain.head_dim)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        full = CONFIG_MAPPING[family_of(config).name].from_dict(dict(config))
    except Exception as error:  # its validators raise errors of many kinds
        raise MalformedCheckpoint(
            f"{name}: transformers refuses its config: {' '.join(str(error).split())[:200]}"
        ) from None
    heads = full.num_attention_heads
    head_dim = getattr(full, "head_dim", None) or full.hidden_size // heads
    kv_heads = getattr(full, "num_key_value_heads", None) or heads
    if family_of(config).name == "falcon":  # the new architecture repeats K and V before it keeps them
        kv_heads = 1 if full.multi_query and not full.new_decoder_architecture else heads
    return _Shape(int(full.vocab_size), int(full.hidden_size), int(kv_heads), int(head_dim))


def _check_chain(plan: ChainPlan, manifest: ModelManifest, shapes: list[_Shape]) -> tuple[int, ...]:
    """What the components read. Raises NotServable for a chain without beginning or end, MalformedCheckpoint where one
    is given other.
    """
    kinds = [link.kind for link in plan.links]
    ends = kinds[:1] == ["embedding"] and kinds[-1:] == ["lm_head"]
    if not ends or {"embedding", "lm_head"} & set(kinds[1:-1]) or not {"attention", "layer"} & set(kinds):
        raise NotServable(
            f"{manifest.name}: only a chain from one embedding through layers that attend to one head can be served"
        )
    width: int | None = None
    every: list[int] = []
    for at, (link, placed) in enumerate(zip(plan.links, manifest.components, strict=True)):
        reads, gives = _widths(link, placed.component, shapes)
        if width not in (None, reads):
            raise MalformedCheckpoint(
                f"{manifest.name}: component {at} ({link.kind}) is for {reads} values a token, it would be given "
                f"{width}"
            )
        every.append(reads)
        width = gives
    return tuple(every)


def _widths(link: ChainLink, component: Component, shapes: list[_Shape]) -> tuple[int, int]:
    """How many values a token a component reads and gives."""
    if link.kind == STITCH or link.source is None:
        spec = stitch_spec(component)
        return spec.width_in, spec.width_out
    return shapes[link.source].width, shapes[link.source].width


def _vocabulary(plan: ChainPlan, name: str, shapes: list[_Shape]) -> int:
    """Tokens that the embedding knows. Raises NotServable when the head knows others: it would answer with tokens that
    cannot be read.
    """
    first, last = (shapes[link.source or 0].vocabulary for link in (plan.links[0], plan.links[-1]))
    if first != last:
        raise NotServable(
            f"{name}: its embedding is for {first} tokens, its head for {last}; only chains of one vocabulary can be "
            "served"
        )
    return first
