"""A composition: the description of a composed chain, as data and as YAML in mergekit's terms.

    slices:                                   # layers in order; a slice may come from any model
      - sources: [{model: base, layer_range: [0, 4]}]
      - sources: [{model: wide, layer_range: [3, 6]}]
    embedding: base                           # optional; the first slice's model
    head: wide                                # optional; the last slice's model

Apart from reading the file this module is pure; `surgery.chains.compose` applies a composition to a store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.errors import InputError

_FILE_LIMIT = 1 << 20
_SLICES_LIMIT = 1000
_LAYERS_LIMIT = 10_000
#: Includes fields of mergekit's files that have no effect here: all tokenizers must be the same, and nothing is merged
#: into a base.
_KEYS = frozenset({"slices", "embedding", "head", "merge_method", "dtype", "tokenizer_source", "base_model"})


@dataclass(frozen=True, slots=True)
class ModelSlice:
    """Layers [lo, hi) of a model."""

    model: str
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Composition:
    """A requested chain. `embedding`, `head`: the models they come from."""

    slices: tuple[ModelSlice, ...]
    embedding: str
    head: str


def read_composition(path: Path) -> Composition:
    """Read a YAML file. Raises InputError if it cannot be read, is not YAML or is not a valid composition."""
    import yaml

    try:
        with path.open("rb") as file:
            data = file.read(_FILE_LIMIT + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(data) > _FILE_LIMIT:
        raise InputError(f"{path} is too large for a composition")
    try:
        value = yaml.safe_load(data.decode("utf-8"))
    except RecursionError:
        raise InputError(f"{path} is no YAML: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # PyYAML's scalars raise ValueError for invalid dates and numbers
        raise InputError(f"{path} is no YAML: {' '.join(str(error).split())[:200]}") from None
    return parse(value)


def parse(value: Any) -> Composition:
    """Return a composition from a parsed document in mergekit's terms for `passthrough`. Raises InputError."""
    if not isinstance(value, Mapping):
        raise InputError("a composition is a mapping with `slices`")
    if unknown := sorted(str(key) for key in set(value) - _KEYS):
        raise InputError(f"a composition has no field {unknown[0]!r}; it has slices, embedding, head")
    if value.get("merge_method") not in (None, "passthrough"):
        raise InputError("a merge_method other than passthrough mixes weights; only passthrough composes blocks")
    if value.get("dtype") is not None:
        raise InputError("dtype: blocks are used as they are stored; load with --dtype instead")
    slices = value.get("slices")
    if not isinstance(slices, list) or not 0 < len(slices) <= _SLICES_LIMIT:
        raise InputError(f"slices must be a list of 1 to {_SLICES_LIMIT} slices")
    parsed = tuple(_slice(at, each) for at, each in enumerate(slices))
    if sum(each.hi - each.lo for each in parsed) > _LAYERS_LIMIT:
        raise InputError(f"a composition has at most {_LAYERS_LIMIT:,} layers")
    return Composition(parsed, _name(value, "embedding", parsed[0].model), _name(value, "head", parsed[-1].model))


def _slice(at: int, value: Any) -> ModelSlice:
    sources = value.get("sources") if isinstance(value, Mapping) else None
    if not isinstance(sources, list) or len(sources) != 1 or not isinstance(sources[0], Mapping):
        raise InputError(
            f"slice {at} needs exactly one source with model and layer_range (several would have to be mixed)"
        )
    source = sources[0]
    if unknown := sorted(str(key) for key in set(source) - {"model", "layer_range"}):
        raise InputError(f"slice {at}: a source has no field {unknown[0]!r}; it has model, layer_range")
    model, bounds = source.get("model"), source.get("layer_range")
    if not isinstance(model, str) or not model:
        raise InputError(f"slice {at} names no model")
    if not isinstance(bounds, list) or len(bounds) != 2 or not all(type(each) is int for each in bounds):
        raise InputError(f"slice {at}: layer_range must be [first, one behind the last]")
    lo, hi = bounds
    if not 0 <= lo < hi <= _LAYERS_LIMIT:
        raise InputError(f"slice {at}: layer_range holds no layer, or one beyond {_LAYERS_LIMIT:,}")
    return ModelSlice(model, lo, hi)


def _name(value: Mapping[str, Any], field: str, default: str) -> str:
    given = value.get(field, default)
    if not isinstance(given, str) or not given:
        raise InputError(f"{field} must name a model")
    return given
