"""Composing a chain from slices of models in the zoo, in mergekit's terms. It costs no bytes: components are named, not copied.

    slices:                                   # layers in order; a slice may come from any model
      - sources: [{model: base, layer_range: [0, 4]}]
      - sources: [{model: wide, layer_range: [3, 6]}]
    embedding: base                           # optional; the first slice's model
    head: wide                                # optional; the last slice's model

Where widths differ a stitch of the two models is put between (`zoo stitch`), for the position that the slices meet at (BL-09).
`parse` is pure; `compose` reads and writes the catalogue. Knows nothing of training or scoring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from surgery.chains import ChainPlan, Link, StitchSpec, plan_of, stitch_component
from surgery.making import Made, MadeReport, check_adapters, put_made, renumbered
from surgery.settings import config_of
from surgery.stitches import STITCH_FILE, StoredStitch, stitch_position, stored_stitches
from surgery.tokenizers import require_same
from zoo.catalog import Reader
from zoo.errors import InputError, NotFound
from zoo.manifest import Component, ModelManifest, Placed, SideFile, TensorMeta, canonical_json
from zoo.store import Store

_FILE_LIMIT = 1 << 20
_SLICES_LIMIT = 1000
_LAYERS_LIMIT = 100_000
_KEYS = frozenset({"slices", "embedding", "head", "name", "merge_method", "dtype", "tokenizer_source", "base_model"})


@dataclass(frozen=True, slots=True)
class Slice:
    """Layers [lo, hi) of a model."""

    model: str
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Composition:
    """A chain that is asked for. `embedding`, `head`: the models they come from."""

    slices: tuple[Slice, ...]
    embedding: str
    head: str


def read_composition(path: Path) -> Composition:
    """Read a YAML file. Raises InputError when it cannot be read, is no YAML or asks for what cannot be."""
    import yaml

    try:
        if path.stat().st_size > _FILE_LIMIT:
            raise InputError(f"{path} is too large for a composition")
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no YAML: {' '.join(str(error).split())[:200]}") from None
    return parse(value)


def parse(value: Any) -> Composition:
    """A composition from a parsed document, in mergekit's terms for `passthrough`. Raises InputError."""
    if not isinstance(value, Mapping):
        raise InputError("a composition is a mapping with `slices`")
    if unknown := sorted(str(key) for key in set(value) - _KEYS):
        raise InputError(f"a composition has no field {unknown[0]!r}; it has slices, embedding, head")
    if value.get("merge_method") not in (None, "passthrough"):
        raise InputError(f"merge_method {str(value['merge_method'])[:40]!r} mixes weights; only passthrough composes blocks")
    if value.get("dtype") is not None:
        raise InputError("dtype: blocks are used as they are stored; load with --dtype instead")
    slices = value.get("slices")
    if not isinstance(slices, list) or not 0 < len(slices) <= _SLICES_LIMIT:
        raise InputError(f"slices must be a list of 1 to {_SLICES_LIMIT} slices")
    parsed = tuple(_slice(at, each) for at, each in enumerate(slices))
    if sum(each.hi - each.lo for each in parsed) > _LAYERS_LIMIT:
        raise InputError(f"a composition has at most {_LAYERS_LIMIT} layers")
    return Composition(parsed, _name(value, "embedding", parsed[0].model), _name(value, "head", parsed[-1].model))


def _slice(at: int, value: Any) -> Slice:
    sources = value.get("sources") if isinstance(value, Mapping) else None
    if not isinstance(sources, list) or len(sources) != 1 or not isinstance(sources[0], Mapping):
        raise InputError(f"slice {at} needs exactly one source with model and layer_range (several would have to be mixed)")
    source = sources[0]
    if unknown := sorted(str(key) for key in set(source) - {"model", "layer_range"}):
        raise InputError(f"slice {at}: a source has no field {unknown[0]!r}; it has model, layer_range")
    model, bounds = source.get("model"), source.get("layer_range")
    if not isinstance(model, str) or not model:
        raise InputError(f"slice {at} names no model")
    if not isinstance(bounds, list) or len(bounds) != 2 or not all(type(each) is int for each in bounds):
        raise InputError(f"slice {at}: layer_range must be [first, one behind the last]")
    lo, hi = bounds
    if not 0 <= lo < hi:
        raise InputError(f"slice {at}: layer_range {bounds} holds no layer")
    return Slice(model, lo, hi)


def _name(value: Mapping[str, Any], field: str, default: str) -> str:
    given = value.get(field, default)
    if not isinstance(given, str) or not given:
        raise InputError(f"{field} must name a model")
    return given


# -- putting it together -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Piece:
    """A component on its way into the chain: from which model, and which layer there."""

    model: str
    component: Component
    layer: int | None


class _Parents:
    """The models that a composition draws from, each read once."""

    def __init__(self, store: Store, reader: Reader) -> None:
        self._store = store
        self._reader = reader
        self._manifests: dict[str, ModelManifest] = {}

    def __getitem__(self, name: str) -> ModelManifest:
        full = self._reader.resolve(name)
        if full not in self._manifests:
            manifest = self._reader.model(full)
            if manifest.kind == "stitch":
                raise InputError(f"{full} is a stitch, not a model with layers")
            self._manifests[full] = manifest
        return self._manifests[full]

    def all(self) -> list[ModelManifest]:
        return list(self._manifests.values())

    def config(self, manifest: ModelManifest) -> dict[str, Any]:
        return config_of(self._store, manifest)


def compose(store: Store, composition: Composition, name: str) -> MadeReport:
    """Put a composed chain into the zoo.

    Raises:
        InputError: layers that a model does not have, adapters that cannot be taken along.
        Incomparable: models whose tokenizers differ.
        NotFound, AmbiguousName: a model, or the stitch between two widths, is not in the zoo.
        NameTaken: the name holds another model.
    """
    with store.ingesting():
        with store.catalog.reading() as reader:
            made = draft(store, reader, composition, name)
        return put_made(store, made)


def draft(store: Store, reader: Reader, composition: Composition, name: str) -> Made:
    """The model that a composition asks for. Raises as `compose`; writes nothing."""
    parents = _Parents(store, reader)
    pieces = _pieces(parents, composition)
    stitched, tensors = _with_stitches(store, reader, parents, pieces)
    first = parents[composition.embedding]
    _check_tokenizers(store, first, parents.all())
    components = renumbered(piece.component for piece in stitched)
    check_adapters(components)
    for parent in parents.all():
        tensors.update((tensor.digest, tensor) for tensor in parent.tensors)
    return Made(
        name=name,
        kind="composed",
        base=None,
        source=_describe(composition),
        plan=_plan(parents, stitched, components),
        components=components,
        tensors=tensors,
        sides=_carried(first),
    )


def _check_tokenizers(store: Store, first: ModelManifest, parents: Sequence[ModelManifest]) -> None:
    """Layers that were trained on other token ids cannot read the first model's. Raises Incomparable with the reason."""
    from zoo.api import ModelHandle

    for other in parents:
        require_same(ModelHandle(store, first), ModelHandle(store, other))


def _pieces(parents: _Parents, composition: Composition) -> list[_Piece]:
    pieces = [_piece(parents[composition.embedding], "embedding")]
    for each in composition.slices:
        pieces.extend(_layers(parents[each.model], each))
    return [*pieces, _piece(parents[composition.head], "lm_head")]


def _piece(parent: ModelManifest, kind: str) -> _Piece:
    found = next((placed for placed in parent.components if placed.component.kind == kind), None)
    if found is None:
        raise InputError(f"{parent.name} has no {kind}")
    return _Piece(parent.name, found.component, None)


def _layers(parent: ModelManifest, wanted: Slice) -> list[_Piece]:
    count = 1 + max((placed.layer for placed in parent.components if placed.layer is not None), default=-1)
    if wanted.hi > count:
        raise InputError(f"{parent.name} has {count} layers; layer_range [{wanted.lo}, {wanted.hi}] reaches beyond them")
    inside = [p for p in parent.components if p.layer is not None and wanted.lo <= p.layer < wanted.hi]
    return [_Piece(parent.name, placed.component, placed.layer) for placed in inside]


def _plan(parents: _Parents, pieces: Sequence[_Piece], components: Sequence[Placed]) -> ChainPlan:
    """Sources are the parents' own sources, each distinct config once per parent: a place is then used once per source."""
    sources: list[Mapping[str, Any]] = []
    at: dict[tuple[str, str], int] = {}
    links: list[Link] = []
    for piece, placed in zip(pieces, components, strict=True):
        if placed.component.kind == "stitch":
            links.append(Link("stitch", None, None))
            continue
        parent = parents[piece.model]
        plan = plan_of(parents.config(parent), parent.components)
        link = _link_in(plan, parent, piece)
        source = plan.sources[link.source or 0]
        key = (parent.name, canonical_json(source))
        if key not in at:
            at[key] = len(sources)
            sources.append(source)
        links.append(Link(placed.component.kind, at[key], link.layer))
    return ChainPlan(tuple(sources), tuple(links))


def _link_in(plan: ChainPlan, parent: ModelManifest, piece: _Piece) -> Link:
    """Where a parent's own plan has the piece."""
    for link, placed in zip(plan.links, parent.components, strict=True):
        if placed.layer == piece.layer and placed.component.digest == piece.component.digest:
            return link
    raise InputError(f"{parent.name} has no such {piece.component.kind}")


def _carried(parent: ModelManifest) -> tuple[SideFile, ...]:
    """Tokenizer and generation settings of the model whose embedding comes first, as files of the new model's own."""
    skipped = ("config.json", "README.md", "adapter_config.json", STITCH_FILE)
    kept = [side for side in parent.side_files if side.path not in skipped and not side.path.endswith(".index.json")]
    return tuple(SideFile(side.path, side.blob, side.nbytes) for side in kept)


def _describe(composition: Composition) -> str:
    slices = ", ".join(f"{each.model}[{each.lo}:{each.hi}]" for each in composition.slices)
    return f"composed: embedding of {composition.embedding}, {slices}, head of {composition.head}"


# -- stitches ----------------------------------------------------------------------------------------------------------


def _with_stitches(store: Store, reader: Reader, parents: _Parents, pieces: Sequence[_Piece]) -> tuple[list[_Piece], dict[str, TensorMeta]]:
    """The pieces with a stitch wherever the width changes, and the stitches' tensors."""
    out: list[_Piece] = [pieces[0]]
    tensors: dict[str, TensorMeta] = {}
    for before, after in pairwise(pieces):
        width, wanted = width_of(parents, before), width_of(parents, after)
        if width != wanted:
            stitch = _stitch_for(store, reader, parents, before, after)
            spec = StitchSpec(stitch.width_a, stitch.width_b, stitch_position(before.layer, _tail_layer(after)))
            tensors.update({stitch.weight.digest: stitch.weight, stitch.bias.digest: stitch.bias})
            out.append(_Piece(stitch.name, stitch_component(spec, stitch.weight.digest, stitch.bias.digest), None))
        out.append(after)
    return out, tensors


def _tail_layer(piece: _Piece) -> int:
    if piece.layer is None:
        raise InputError("a stitch needs a layer behind it: the head must come from the model of the last layer")
    return piece.layer


def width_of(parents: _Parents, piece: _Piece) -> int:
    """Width of the hidden states that a piece reads and writes, from its source's config."""
    parent = parents[piece.model]
    plan = plan_of(parents.config(parent), parent.components)
    source = plan.sources[_link_in(plan, parent, piece).source or 0]
    for key in ("hidden_size", "n_embd", "n_embed"):
        if isinstance(source.get(key), int):
            return int(source[key])
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return int(CONFIG_MAPPING[source["model_type"]].from_dict(dict(source)).hidden_size)


def _stitch_for(store: Store, reader: Reader, parents: _Parents, before: _Piece, after: _Piece) -> StoredStitch:
    """The newest stitch from the one model (or its base) to the other (or its base)."""
    heads, tails = (_self_and_base(parents[piece.model]) for piece in (before, after))
    found = [stitch for stitch in stored_stitches(store, reader) if stitch.a in heads and stitch.b in tails]
    if not found:
        raise NotFound(
            f"{before.model} and {after.model} differ in width, and there is no stitch from the one to the other: "
            f"train one with `zoo stitch --a {before.model} --b {after.model}`"
        )
    return found[-1]


def _self_and_base(manifest: ModelManifest) -> tuple[str, ...]:
    return (manifest.name,) if manifest.base is None else (manifest.name, manifest.base)
