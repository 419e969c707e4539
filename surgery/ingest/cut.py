"""Cut a checkpoint's keys into components in order (BL-01, BL-02): a pure function of names and digests.

Names on disk are made canonical here (a base-model checkpoint without its prefix, NeoX's `embed_out`), so that the same
weights give the same component however they were saved. Tensors' bytes are never read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surgery.families.quantized import has_head
from surgery.families.specs import spec_of
from surgery.families.table import Family, family_of, is_tied, is_unread, layer_count
from zoo.errors import MalformedCheckpoint
from zoo.manifest import Component, ComponentKind, Placed, canonical_json


@dataclass(frozen=True, slots=True)
class ComponentSpot:
    """The place of one key: the component's kind, its layer, and the tensor's name within the component."""

    kind: ComponentKind
    layer: int | None
    name: str


def canonical_key(family: Family, key: str) -> str:
    """Return a disk key without the base prefix; the head is always `lm_head.…`."""
    if key.startswith(family.head + "."):
        return "lm_head." + key[len(family.head) + 1 :]
    for prefix in (family.prefix, *family.other_prefixes):
        if key.startswith(prefix):
            return key[len(prefix) :]
    return key


def spot_of(family: Family, key: str) -> ComponentSpot | None:
    """Return the place of a disk key, or None if the family has none for it."""
    name = canonical_key(family, key)
    first = name.split(".", 1)[0]
    if first == "lm_head" or first in family.final:
        return ComponentSpot("lm_head", None, name)
    if first in family.embedding:
        return ComponentSpot("embedding", None, name)
    if first != family.stack:
        return None
    parts = name.split(".", 2)
    if len(parts) < 3 or not parts[1].isdecimal():
        return None
    part = parts[2].split(".", 1)[0]
    layer = int(parts[1])
    if part in family.whole:
        return ComponentSpot("layer", layer, parts[2])
    if part in family.attention:
        return ComponentSpot("attention", layer, parts[2])
    if part in family.ffn:
        return ComponentSpot("ffn", layer, parts[2])
    return None


def disk_key(family: Family, layer: int | None, name: str) -> str:
    """Return the canonical key on disk of a component's tensor: the inverse of `spot_of`."""
    if name.startswith("lm_head."):
        return family.head + name.removeprefix("lm_head")
    return f"{family.prefix}{name}" if layer is None else f"{family.prefix}{family.stack}.{layer}.{name}"


def layer_kinds(family: Family) -> tuple[ComponentKind, ...]:
    """Return the components of one layer, in order."""
    return ("layer",) if family.parallel else ("attention", "ffn")


def places(family: Family, layers: int) -> list[tuple[ComponentKind, int | None]]:
    """Return all components of a model with `layers` layers, in order."""
    inner = [(kind, layer) for layer in range(layers) for kind in layer_kinds(family)]
    return [("embedding", None), *inner, ("lm_head", None)]


def cut(config: Mapping[str, Any], digests: Mapping[str, str]) -> tuple[Placed, ...]:
    """Cut a full checkpoint.

    Args:
        config: The `config.json`.
        digests: disk key -> tensor digest, over all weight files.

    Returns:
        Every component once, in chain order. Keys that no module reads are left out (they are still exported).

    Raises:
        UnknownFamily: No row for the architecture.
        MalformedCheckpoint: A key without a place, a component without tensors, or a layer beyond the config's count.
    """
    family = family_of(config)
    layers = layer_count(config)
    found: dict[tuple[ComponentKind, int | None], dict[str, str]] = defaultdict(dict)
    for key, digest in digests.items():
        if is_unread(family, key):
            continue
        spot = spot_of(family, key)
        if spot is None:
            raise MalformedCheckpoint(f"tensor {key!r} has no place in a {family.name} model")
        if spot.layer is not None and spot.layer >= layers:
            raise MalformedCheckpoint(f"tensor {key!r} lies beyond the {layers} layers that config.json promises")
        group = found[spot.kind, spot.layer]
        if spot.name in group:
            raise MalformedCheckpoint(f"two tensors stand for {spot.name!r} ({key!r} is the second)")
        group[spot.name] = digest
    _tie(config, family, found)
    return tuple(_placed(config, family, kind, layer, found) for kind, layer in places(family, layers))


def _tie(config: Mapping[str, Any], family: Family, found: dict[Any, dict[str, str]]) -> None:
    """Give a tied head the embedding's tensor; a head in the file, if any, is ignored."""
    table = found["embedding", None].get(f"{family.embedding[0]}.weight")
    if is_tied(config, family) and table is not None:
        found["lm_head", None]["lm_head.weight"] = table


def _placed(
    config: Mapping[str, Any],
    family: Family,
    kind: ComponentKind,
    layer: int | None,
    found: Mapping[Any, Mapping[str, str]],
) -> Placed:
    tensors = found.get((kind, layer))
    if not tensors or (kind == "lm_head" and not has_head(tensors)):
        where = kind if layer is None else f"{kind} of layer {layer}"
        raise MalformedCheckpoint(f"config.json promises {layer_count(config)} layers, but the files hold no {where}")
    spec = canonical_json(spec_of(config, family, kind, layer))
    return Placed(layer, Component(kind, family.name, spec, tuple(sorted(tensors.items()))))
