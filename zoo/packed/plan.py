"""Choose which objects to pack, and against which base. Pure functions of manifests and of the packed objects.

A tensor of a full fine-tune is packed against the tensor at the same place of a model that it descends from. If several
ancestors have one, the oldest ancestor's is taken: all packed tensors of a family then depend on its foundation alone,
and no packed tensor serves as a base.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from zoo.manifest import ModelKind, ModelManifest, TensorMeta
from zoo.packed.writer import PackCandidate

#: Kinds of models with weights that are their base's, changed.
MOVED: frozenset[ModelKind] = frozenset({"full", "bitfit"})

_Place = tuple[str, int | None, str]


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of planning.

    Fields:
        candidates: Each tensor to pack, once, in the models' order.
        left: Tensors examined that stay as they are.
    """

    candidates: tuple[PackCandidate, ...]
    left: tuple[TensorMeta, ...]


def lineage(model: ModelManifest, models: Mapping[str, ModelManifest]) -> list[ModelManifest]:
    """Return the ancestors through models of the kinds in MOVED, up to a foundation, oldest first."""
    found: list[ModelManifest] = []
    name = model.base if model.kind in MOVED else None
    while name is not None and name in models and models[name] not in found:
        found.append(models[name])
        name = models[name].base if models[name].kind in MOVED else None
    return found[::-1]


def plan(
    models: Iterable[tuple[ModelManifest, Sequence[ModelManifest]]], packed: Mapping[str, str | None], alone: bool
) -> Plan:
    """Choose what to pack of some models.

    Args:
        models: Each with its lineage, oldest first.
        packed: Packed objects -> the bases that they are packed against.
        alone: Also pack tensors that have no base, by themselves.
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
    """Return the plan without candidates that are bases themselves: the base of any packed object stays plain."""
    needed = {*bases, *(candidate.base for candidate in found.values())}
    kept = tuple(candidate for digest, candidate in found.items() if digest not in needed)
    freed = (candidate.tensor for digest, candidate in found.items() if digest in needed)
    return Plan(kept, (*left.values(), *freed))


def _places(model: ModelManifest) -> dict[_Place, TensorMeta]:
    """Return place in the model -> the tensor. Adapters' own tensors have no counterpart and are left out."""
    known = {tensor.digest: tensor for tensor in model.tensors}
    return {
        (placed.component.kind, placed.layer, name): known[digest]
        for placed in model.components
        for name, digest in placed.component.tensors
    }
