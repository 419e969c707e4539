"""Compose a chain from slices of models in the zoo (`surgery.chains.composition`).

It costs no bytes: components are referenced, not copied. Where widths differ, a stitch between the two models is
inserted (`zoo stitch`) for the position at which the slices meet (BL-09); if both sides come from one model that has a
stitch there, that one is used. Reads and writes the catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from surgery.chains.composition import Composition, ModelSlice
from surgery.chains.plan import ChainLink, ChainPlan, StitchSpec, plan_of, renumbered, stitch_component
from surgery.chains.stitches import STITCH_FILE, StoredStitch, stitch_position, stored_stitches
from surgery.families.settings import config_of, hidden_width
from surgery.models.put import MadeModel, MadeReport, check_adapters, put_made
from surgery.text.tokenizers import require_same
from zoo.catalog import Reader
from zoo.errors import InputError, NotFound
from zoo.manifest import PARTS, Component, ModelManifest, SideFile, TensorMeta, canonical_json
from zoo.store import Store


@dataclass(frozen=True)
class _Parent:
    """A model that a composition draws from."""

    manifest: ModelManifest
    plan: ChainPlan

    @property
    def name(self) -> str:
        return self.manifest.name

    @cached_property
    def pieces(self) -> tuple[_Piece, ...]:
        """The model's components, in order."""
        both = zip(self.manifest.components, self.plan.links, strict=True)
        return tuple(_Piece(self, at, placed.component, placed.layer, link) for at, (placed, link) in enumerate(both))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Width of the hidden states, by source."""
        return tuple(hidden_width(source) for source in self.plan.sources)

    @cached_property
    def spelled(self) -> tuple[str, ...]:
        """The model's sources as canonical JSON: equal sources have equal texts."""
        return tuple(canonical_json(source) for source in self.plan.sources)


@dataclass(frozen=True, eq=False)
class _Piece:
    """A component selected for the chain, with its origin.

    Fields:
        at: Index in the parent's chain; None for a stitch from the zoo.
        layer: Layer in the parent.
        link: How the parent builds it.
    """

    parent: _Parent
    at: int | None
    component: Component
    layer: int | None
    link: ChainLink

    @property
    def width(self) -> int:
        """Width of the hidden states that it reads and writes; not meaningful for a stitch."""
        return self.parent.widths[self.link.source or 0]


class _Parents:
    """The models that a composition draws from, each read once."""

    def __init__(self, store: Store, reader: Reader) -> None:
        self._store = store
        self._reader = reader
        self._found: dict[str, _Parent] = {}

    def __getitem__(self, name: str) -> _Parent:
        full = self._reader.resolve(name)
        if full not in self._found:
            manifest = self._reader.model(full)
            if manifest.kind in PARTS:
                raise InputError(f"{full} is of kind {manifest.kind}, not a model with layers")
            self._found[full] = _Parent(manifest, plan_of(config_of(self._store, manifest), manifest.components))
        return self._found[full]

    def manifests(self) -> list[ModelManifest]:
        return [parent.manifest for parent in self._found.values()]


def compose(store: Store, composition: Composition, name: str) -> MadeReport:
    """Add a composed chain to the zoo.

    Raises:
        InputError: Layers that a model does not have, adapters that cannot be part of a chain, or more than a chain can
            hold.
        Incomparable: Models with different tokenizers.
        NotFound, AmbiguousName: A model, or the stitch between two widths, is not in the zoo.
        NameTaken: Another model has the name.
    """
    with store.ingesting():
        with store.catalog.reading() as reader:
            made = draft(store, reader, composition, name)
        return put_made(store, made)


def draft(store: Store, reader: Reader, composition: Composition, name: str) -> MadeModel:
    """Return the model that a composition describes. Raises as `compose`; writes nothing."""
    parents = _Parents(store, reader)
    pieces = _pieces(parents, composition)
    stitched, tensors = _with_stitches(store, reader, pieces)
    first = parents[composition.embedding].manifest
    _check_tokenizers(store, first, parents.manifests())
    components = renumbered(piece.component for piece in stitched)
    check_adapters(components)
    for parent in parents.manifests():
        tensors.update((tensor.digest, tensor) for tensor in parent.tensors)
    return MadeModel(
        name=name,
        kind="composed",
        base=None,
        source=_describe(composition),
        plan=_plan(stitched),
        components=components,
        tensors=tensors,
        sides=_carried(first),
    )


def _check_tokenizers(store: Store, first: ModelManifest, parents: Sequence[ModelManifest]) -> None:
    """Raise Incomparable if a model has another tokenizer than the first.

    Its layers were trained on other token ids.
    """
    from zoo.api import ModelHandle

    for other in parents:
        require_same(ModelHandle(store, first), ModelHandle(store, other))


def _pieces(parents: _Parents, composition: Composition) -> list[_Piece]:
    pieces = [_end(parents[composition.embedding], "embedding")]
    for each in composition.slices:
        pieces.extend(_layers(parents[each.model], each))
    return [*pieces, _end(parents[composition.head], "lm_head")]


def _end(parent: _Parent, kind: str) -> _Piece:
    found = next((piece for piece in parent.pieces if piece.component.kind == kind), None)
    if found is None:
        raise InputError(f"{parent.name} has no {kind}")
    return found


def _layers(parent: _Parent, wanted: ModelSlice) -> list[_Piece]:
    count = 1 + max((piece.layer for piece in parent.pieces if piece.layer is not None), default=-1)
    if wanted.hi > count:
        raise InputError(
            f"{parent.name} has {count} layers; layer_range [{wanted.lo}, {wanted.hi}] reaches beyond them"
        )
    return [piece for piece in parent.pieces if piece.layer is not None and wanted.lo <= piece.layer < wanted.hi]


def _plan(pieces: Sequence[_Piece]) -> ChainPlan:
    """Return the plan of the chain.

    Its sources are the parents' own sources, each distinct config once per parent, so that a place is used once per
    source.
    """
    sources: list[Mapping[str, Any]] = []
    at: dict[tuple[str, str], int] = {}
    links: list[ChainLink] = []
    for piece in pieces:
        if piece.link.source is None:
            links.append(piece.link)
            continue
        key = (piece.parent.name, piece.parent.spelled[piece.link.source])
        if key not in at:
            at[key] = len(sources)
            sources.append(piece.parent.plan.sources[piece.link.source])
        links.append(ChainLink(piece.link.kind, at[key], piece.link.layer))
    return ChainPlan(tuple(sources), tuple(links))


def _carried(parent: ModelManifest) -> tuple[SideFile, ...]:
    """Return tokenizer and generation settings of the embedding's model, as the new model's own files."""
    skipped = ("config.json", "README.md", "adapter_config.json", STITCH_FILE)
    kept = [side for side in parent.side_files if side.path not in skipped and not side.path.endswith(".index.json")]
    return tuple(SideFile(side.path, side.blob, side.nbytes) for side in kept)


def _describe(composition: Composition) -> str:
    slices = ", ".join(f"{each.model}[{each.lo}:{each.hi}]" for each in composition.slices)
    return f"composed: embedding of {composition.embedding}, {slices}, head of {composition.head}"


# -- stitches ----------------------------------------------------------------------------------------------------------


def _with_stitches(
    store: Store, reader: Reader, pieces: Sequence[_Piece]
) -> tuple[list[_Piece], dict[str, TensorMeta]]:
    """Return the pieces with a stitch wherever the width changes, and the tensors of stitches from the zoo."""
    out: list[_Piece] = [pieces[0]]
    tensors: dict[str, TensorMeta] = {}
    for before, after in pairwise(pieces):
        if before.width != after.width:
            own = _own_stitch(before, after)
            if own is None:
                own, used = _zoo_stitch(store, reader, before, after)
                tensors.update((tensor.digest, tensor) for tensor in used)
            out.append(own)
        out.append(after)
    return out, tensors


def _own_stitch(before: _Piece, after: _Piece) -> _Piece | None:
    """Return the stitch that one model has between two of its components, if there is exactly one; else None."""
    if before.parent is not after.parent or before.at is None or after.at is None:
        return None
    between = [piece for piece in before.parent.pieces[before.at + 1 : after.at] if piece.component.kind == "stitch"]
    return between[0] if len(between) == 1 else None


def _zoo_stitch(
    store: Store, reader: Reader, before: _Piece, after: _Piece
) -> tuple[_Piece, tuple[TensorMeta, TensorMeta]]:
    if after.layer is None:
        raise InputError("a stitch needs a layer behind it: the head must come from the model of the last layer")
    stitch = _stitch_for(store, reader, before.parent.manifest, after.parent.manifest)
    spec = StitchSpec(stitch.width_a, stitch.width_b, stitch_position(before.layer, after.layer))
    component = stitch_component(spec, stitch.weight.digest, stitch.bias.digest)
    return _Piece(after.parent, None, component, None, ChainLink("stitch", None, None)), (stitch.weight, stitch.bias)


def _stitch_for(store: Store, reader: Reader, before: ModelManifest, after: ModelManifest) -> StoredStitch:
    """Return the newest stitch from one model (or its base) to the other (or its base)."""
    heads, tails = _self_and_base(before), _self_and_base(after)
    found = [stitch for stitch in stored_stitches(store, reader) if stitch.a in heads and stitch.b in tails]
    if not found:
        raise NotFound(
            f"{before.name} and {after.name} differ in width, and there is no stitch from the one to the other: "
            f"train one with `zoo stitch --a {before.name} --b {after.name}`"
        )
    return found[-1]


def _self_and_base(manifest: ModelManifest) -> tuple[str, ...]:
    return (manifest.name,) if manifest.base is None else (manifest.name, manifest.base)
