"""Decide from manifest and configs, before anything is loaded, whether a stored model can run and what its K and V are.

A model's components may come from several configs (`surgery.chains.plan`); each attention layer then has the KV
geometry of its own config. All components must have one dtype unless the engine casts them: no checkpoint defines what
hidden states of one dtype mean to a layer of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from runtime.kv.pool import Geometry, Pages
from surgery.chains.plan import STITCH, ChainLink, ChainPlan, plan_of, stitch_spec
from surgery.families.plain import plain_settings
from surgery.families.quantized import exact_digests, why_not_computed
from surgery.families.settings import config_of
from surgery.families.table import DENSE_ONLY, family_of
from surgery.tensors.pool import TORCH_DTYPES
from zoo.errors import MalformedCheckpoint, NotServable
from zoo.manifest import Component, ModelManifest, Placed
from zoo.store import Store

#: Executor kinds: attention through page tables, or Baton's left-padded batches.
Executor = Literal["paged", "dense"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Servable:
    """A stored model that can run.

    Fields:
        settings: Its `config.json`.
        plan: Its components and the configs that they come from.
        geometries: The distinct KV geometries of its attention layers.
        widths: Values per token that each component reads; for the embedding, those that it returns.
    """

    settings: Mapping[str, Any]
    plan: ChainPlan
    vocab_size: int
    dtype: torch.dtype
    geometries: tuple[Geometry, ...]
    widths: tuple[int, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of K of one token in the widest layer."""
        return max(geometry.token_bytes for geometry in self.geometries)

    def page_tokens(self, pool: Pages) -> int:
        """Return the tokens that every layer of the model fits into a page. Raises NotServable if not even one fits."""
        return min(pool.page_tokens(geometry) for geometry in self.geometries)


def servable(
    store: Store, manifest: ModelManifest, dtype: torch.dtype | None, executor: Executor = "paged"
) -> Servable:
    """Return what serving needs of a model before it is loaded.

    Args:
        dtype: the dtype that the engine casts weights to; None leaves them as stored.
        executor: the executor that is to run the model. The dense one runs all that the paged one does, and also
            families with layers that attend by themselves.

    Raises:
        NotServable: the executor cannot run this model exactly; the message has the reason.
        MalformedCheckpoint: no usable config, or one that does not describe the components.
    """
    name = manifest.name
    if manifest.kind == "lengths":
        raise NotServable(f"{name} predicts lengths of answers: serve its target with --lengths")
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
    """Return the dtype of a model's components. Raises NotServable if it is not a float or if there are several."""
    metas = {tensor.digest: tensor for tensor in manifest.tensors}
    found: dict[str, Placed] = {}
    for placed in manifest.components:
        tensors = [metas[digest] for digest in exact_digests(placed.component)]
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
    if reason := why_not_computed(config):
        raise NotServable(f"{manifest.name}: {reason}")


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes from a config: vocabulary, width of the hidden states, and heads of K and V."""

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
    """Return the width that each component reads.

    Raises NotServable for a chain without beginning or end, MalformedCheckpoint where a component would receive another
    width than it reads.
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
    """Return how many values per token a component reads and returns."""
    if link.kind == STITCH or link.source is None:
        spec = stitch_spec(component)
        return spec.width_in, spec.width_out
    return shapes[link.source].width, shapes[link.source].width


def _vocabulary(plan: ChainPlan, name: str, shapes: list[_Shape]) -> int:
    """Return the embedding's vocabulary size.

    Raises NotServable if the head has another one: it could sample tokens that the embedding cannot read.
    """
    first, last = (shapes[link.source or 0].vocabulary for link in (plan.links[0], plan.links[-1]))
    if first != last:
        raise NotServable(
            f"{name}: its embedding is for {first} tokens, its head for {last}; only chains of one vocabulary can be "
            "served"
        )
    return first
