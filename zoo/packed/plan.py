"""Which objects to pack, and against what. Pure functions of manifests and of what is packed already.

A tensor of a full fine-tune is packed against the tensor in the same place of the model it descends from. Where several
ancestors have one, the eldest's is taken: a family then stands on its foundation alone, and nothing that is packed has
to serve as a base itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from zoo.manifest import ModelKind, ModelManifest, TensorMeta
from zoo.packed.writer import PackCandidate

#: Kinds whose weights are their base's, moved.
MOVED: frozenset[ModelKind] = frozenset({"full", "bitfit"})

_Place = tuple[str, int | None, str]


@dataclass(frozen=True, slots=True)
class Plan:
    """`candidates`: each tensor once, in the models' order. `left`: looked at, and to stay as they are."""

    candidates: tuple[PackCandidate, ...]
    left: tuple[TensorMeta, ...]


def lineage(model: ModelManifest, models: Mapping[str, ModelManifest]) -> list[ModelManifest]:
    """The models it descends from through models of its own kind and up to a foundation, eldest first."""
    found: list[ModelManifest] = []
    name = model.base if model.kind in MOVED else None
    while name is not None and name in models and models[name] not in found:
        found.append(models[name])
        name = models[name].base if models[name].kind in MOVED else None
    return found[::-1]


def plan(
    models: Iterable[tuple[ModelManifest, Sequence[ModelManifest]]], packed: Mapping[str, str | None], alone: bool
) -> Plan:
    """What to pack of some models.

    Args:
        models: each with its lineage, eldest first.
        packed: packed objects that there are -> what they are packed against.
        alone: also pack by themselves the tensors that have nothing to be packed against.
    """
    found: dict[str, PackCandidate] = {}
    left: dict[str, TensorMeta] = {}
    for model, ancestors in models:
        inherited = {tensor.digest for ancestor in ancestors for tensor in ancestor.tensors}
        places = [_places(ancestor) for ancestor in ancestors]
        for place, tensor in _places(model).items():
            if tensor.digest in inherited or tensor.digest in found or tensor.digest in left:
                continue
            base = _counterpart(tensor, (there[place] for there in places if place in there), packed)
            if tensor.digest in packed or (base is None and not alone):
                left[tensor.digest] = tensor
            else:
                found[tensor.digest] = PackCandidate(tensor, base)
    return _without_bases(found, left, {base for base in packed.values() if base is not None})


def _counterpart(tensor: TensorMeta, offered: Iterable[TensorMeta], packed: Collection[str]) -> str | None:
    fits = (
        one for one in offered if (one.dtype, one.shape) == (tensor.dtype, tensor.shape) and one.digest not in packed
    )
    return next((one.digest for one in fits), None)


def _without_bases(found: dict[str, PackCandidate], left: dict[str, TensorMeta], bases: Collection[str]) -> Plan:
    """A base stays plain: what anything is or is to be packed against is not packed itself."""
    needed = {*bases, *(candidate.base for candidate in found.values())}
    kept = tuple(candidate for digest, candidate in found.items() if digest not in needed)
    freed = (candidate.tensor for digest, candidate in found.items() if digest in needed)
    return Plan(kept, (*left.values(), *freed))


def _places(model: ModelManifest) -> dict[_Place, TensorMeta]:
    """Where a tensor stands -> the tensor. Adapters' own tensors have no counterpart and are left out."""
    known = {tensor.digest: tensor for tensor in model.tensors}
    return {
        (placed.component.kind, placed.layer, name): known[digest]
        for placed in model.components
        for name, digest in placed.component.tensors
    }
