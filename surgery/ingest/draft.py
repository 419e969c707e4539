"""Check a source, before a tensor is read, and prepare what an ingest will write.

A draft computes its components once the digests are known. It writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surgery.adapters.inherit import inherited
from surgery.adapters.overlay import AdapterBase, OfferedTensor
from surgery.adapters.placing import AdapterPlan, plan_adapter
from surgery.chains.files import check_parts, place_parts
from surgery.chains.plan import CHAIN, is_chain, parse_chain
from surgery.families.quantized import quantization_of, why_not_computed
from surgery.families.settings import config_of
from surgery.families.shapes import check_shapes
from surgery.families.specs import spec_of
from surgery.families.table import DENSE_ONLY, FAMILIES, family_of, is_tied
from surgery.ingest.base_model import adapter_base
from surgery.ingest.cut import cut
from surgery.sources.base import Source
from surgery.sources.strict_json import parse_object
from zoo.errors import MalformedCheckpoint, UnknownFamily, UnsafeCheckpoint, UnsupportedAdapter, WrongBase
from zoo.manifest import ModelKind, ModelManifest, Placed, SideFile, canonical_json
from zoo.store import Store

#: Placeholder for every digest until they are known: the checks before bytes are read do not depend on which are equal.
_UNKNOWN = "0" * 64


@dataclass(frozen=True)
class Draft:
    """A checked source.

    Fields:
        kind: The kind as far as the source shows; a full checkpoint (`foundation`) may still prove to be a fine-tune.
        place: Returns the components from the digests of the source's keys.
        base: Set for adapters only.
    """

    kind: ModelKind
    family: str
    place: Callable[[Mapping[str, str]], tuple[Placed, ...]]
    base: ModelManifest | None
    inherited: tuple[SideFile, ...]
    notes: tuple[str, ...]


def draft(store: Store, source: Source, base: str | None) -> Draft:
    """Check a source against its own config, and an adapter against its base.

    Args:
        base: Name (or unique ending) of the requested base; ignored here for full checkpoints.

    Raises:
        zoo.errors.InputError: Any fault of the source; see the error tree.
        NotFound, AmbiguousName: The adapter's base is not in the zoo, or could be several.
    """
    _check_generation_config(source)
    try:
        made = _adapter(store, source, base) if source.adapter is not None else _full(source)
        made.place({tensor.key: _UNKNOWN for tensor in source.tensors()})
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise MalformedCheckpoint(
            f"a value in the configs is not of the kind that belongs there: {str(error)[:200]}"
        ) from error
    return made


def _full(source: Source) -> Draft:
    config = source.config
    if config is None:
        raise MalformedCheckpoint("there is no config.json")
    if is_chain(config):
        return _chain(source, config)
    family = _known_family(config)
    shapes = {tensor.key: tensor.shape for tensor in source.tensors()}
    place = _Cut(config)
    place(dict.fromkeys(shapes, _UNKNOWN))
    check_shapes(config, shapes)
    return Draft("foundation", family, place, None, (), (*source.notes, *_notes(config, family)))


def _chain(source: Source, config: Mapping[str, Any]) -> Draft:
    """Return the draft of a chain as an export writes it.

    Its components are those that it was made of, so a zoo that has them stores no new bytes.
    """
    families = [_known_family(each) for each in parse_chain(config).sources]
    for each in config["sources"]:
        if reason := why_not_computed(each):
            raise UnknownFamily(reason)
    check_parts(config, {tensor.key: tensor.shape for tensor in source.tensors()})
    notes = (note for each, family in zip(config["sources"], families, strict=True) for note in _notes(each, family))
    return Draft("composed", CHAIN, _Parts(config), None, (), (*source.notes, *dict.fromkeys(notes)))


@dataclass(frozen=True)
class _Parts:
    config: Mapping[str, Any]

    def __call__(self, digests: Mapping[str, str]) -> tuple[Placed, ...]:
        return place_parts(self.config, digests)


@dataclass(frozen=True)
class _Cut:
    config: Mapping[str, Any]

    def __call__(self, digests: Mapping[str, str]) -> tuple[Placed, ...]:
        return cut(self.config, digests)


def _known_family(config: Mapping[str, Any]) -> str:
    if config.get("auto_map") and config.get("model_type") not in FAMILIES:
        raise UnsafeCheckpoint(
            f"models of type {str(config.get('model_type'))[:60]!r} need code from their repository (auto_map), which "
            "is never run; "
            f"known families: {', '.join(sorted(FAMILIES))}"
        )
    family = family_of(config).name
    quantization_of(config)  # raises for a method that cannot be stored
    return family


def _notes(config: Mapping[str, Any], family: str) -> tuple[str, ...]:
    notes = []
    if config.get("auto_map"):
        notes.append(
            "config.json names code of its own (auto_map): it is kept, but never run; transformers' own classes are "
            "used"
        )
    if reason := why_not_computed(config):
        notes.append(reason)
    if FAMILIES[family].masked:
        notes.append(f"stored, exported and served, not compared or stitched: {DENSE_ONLY}")
    return tuple(notes)


def _adapter(store: Store, source: Source, given: str | None) -> Draft:
    config = source.adapter or {}
    plan = plan_adapter(config)  # variants refused in any case are refused before a base is looked up
    if source.side("adapter_interface.json") is not None:
        raise UnsupportedAdapter(
            "the adapter was made through an adapter_interface.json: where its parts stand in the layer is not known "
            "here"
        )
    with store.catalog.reading() as reader:
        base = adapter_base(reader, config, given)
    base_config = config_of(store, base)
    if source.config is not None:
        _check_own_config(source.config, base)
    place = _LaidOver(
        plan=plan,
        shapes={tensor.key: tensor.shape for tensor in source.tensors()},
        base=AdapterBase(
            name=base.name,
            family=base.family,
            config=base_config,
            components=base.components,
            shapes={tensor.digest: tensor.shape for tensor in base.tensors},
            tied=is_tied(base_config, FAMILIES[base.family]),
        ),
    )
    sides = inherited(base.side_files, (side.path for side in source.sides))
    return Draft(plan.kind, base.family, place, base, sides, (*source.notes, *_notes({}, base.family)))


@dataclass(frozen=True)
class _LaidOver:
    plan: AdapterPlan
    shapes: Mapping[str, tuple[int, ...]]
    base: AdapterBase

    def __call__(self, digests: Mapping[str, str]) -> tuple[Placed, ...]:
        offered = {key: OfferedTensor(shape, digests[key]) for key, shape in self.shapes.items()}
        return self.plan.place(offered, self.base)


def _check_own_config(config: Mapping[str, Any], base: ModelManifest) -> None:
    """Check that an adapter's own config.json, if any, describes the same model as its base."""
    family = family_of(config)
    same = family.name == base.family and all(
        canonical_json(spec_of(config, family, placed.component.kind, placed.layer)) == placed.component.spec
        for placed in base.components
    )
    if not same:
        raise WrongBase(f"the adapter's own config.json describes another model than its base {base.name}")


def _check_generation_config(source: Source) -> None:
    data = source.side("generation_config.json")
    if data is not None:
        parse_object(data, "generation_config.json")
