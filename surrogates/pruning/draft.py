"""Find what can be pruned in a run of a model's layers, and build the block's smaller components from a plan.

    target = target_of(manifest, config, (4, 6), "layer")        # components and their shape, or an InputError
    run = pruned_run(target, plan, tensors)                      # smaller components over new tensors
    chain = whole_chain(target, run)                             # the model's chain with them in place

Pure except for slicing tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from surgery.chains.plan import ChainLink, ChainPlan, plan_of, renumbered
from surgery.families.quantized import is_quantized
from surgery.families.table import Family, family_of
from surgery.models.put import check_adapters
from surrogates.block import BlockRun
from surrogates.pruning.groups import Axis, Part, axes_of, kinds_of
from surrogates.pruning.plan import BlockShape, Cost, PrunePlan, check_layers
from surrogates.pruning.prune import cost_of, pruned_config, respecced, shape_of, slice_tensors
from zoo.errors import InputError
from zoo.manifest import Component, ModelManifest, Placed


@dataclass(frozen=True)
class PruneTarget:
    """A run of components [lo, hi) of a model, of which `part` is to be pruned.

    Fields:
        family: Family of the pruned components.
        shape: Shape of the pruned components.
        axes: `axes[i]` are the axes to slice in component lo + i; empty if it stays unchanged.
    """

    manifest: ModelManifest
    plan: ChainPlan
    part: Part
    layers: tuple[int, int]
    lo: int
    hi: int
    family: Family
    shape: BlockShape
    axes: tuple[tuple[Axis, ...], ...]

    @property
    def placed(self) -> tuple[Placed, ...]:
        return self.manifest.components[self.lo : self.hi]

    @property
    def changed(self) -> tuple[int, ...]:
        """Indices of the components that lose units, within the run."""
        return tuple(at for at, axes in enumerate(self.axes) if axes)

    @property
    def layer_of(self) -> tuple[int, ...]:
        """Per component of the run, its layer counted from the run's first."""
        return tuple((placed.layer or 0) - self.layers[0] for placed in self.placed)

    @property
    def cost(self) -> Cost:
        """Parameters of the part as a function of its shape."""
        shapes = {tensor.digest: tensor.shape for tensor in self.manifest.tensors}
        return cost_of(self.family, [self.placed[at].component for at in self.changed], shapes, self.part)


def target_of(manifest: ModelManifest, config: Mapping[str, Any], layers: tuple[int, int], part: Part) -> PruneTarget:
    """Return the run of a model's layers, first and last inclusive, of which a part is to be pruned.

    Raises:
        InputError: Layers that do not exist, stitches or adapters among them, layers of several shapes, or a family in
            which the part cannot be pruned.
    """
    plan = plan_of(config, manifest.components)
    lo, hi = bounds_of(manifest, layers, part)
    inside = manifest.components[lo:hi]
    kinds = kinds_of(family_of(plan.sources[plan.links[lo].source or 0]), part)
    _check_inside(manifest.name, inside, kinds)
    check_adapters(manifest.components)
    sources = [plan.sources[link.source or 0] for link in plan.links[lo:hi] if link.kind in kinds]
    shapes = {(family_of(source).name, shape_of(source)) for source in sources}
    if len(shapes) > 1:
        raise InputError(
            f"layers {layers[0]}-{layers[1]} of {manifest.name} are of several shapes: prune them one by one"
        )
    family = family_of(sources[0])
    axes = tuple(axes_of(family, placed.component, part) if placed.component.kind in kinds else () for placed in inside)
    return PruneTarget(manifest, plan, part, layers, lo, hi, family, shapes.pop()[1], axes)


def _check_inside(name: str, inside: Sequence[Placed], kinds: Sequence[str]) -> None:
    """Raise InputError for a run that holds a stitch, or an adapter on a component to be pruned."""
    for placed in inside:
        kind = placed.component.kind
        if kind == "stitch":
            raise InputError(f"these layers of {name} hold a stitch: surrogates stand for blocks between stitches")
        if kind in kinds and placed.component.adapter is not None:
            raise InputError(
                f"the {kind} of layer {placed.layer} of {name} has an adapter: merge it into a checkpoint first"
            )


def bounds_of(manifest: ModelManifest, layers: tuple[int, int], part: Part) -> tuple[int, int]:
    """Return components [lo, hi) from the first to the last with the part of these layers. Raises InputError."""
    count = 1 + max((placed.layer for placed in manifest.components if placed.layer is not None), default=-1)
    check_layers(layers, count, manifest.name)
    kinds = ("layer", "attention", "ffn") if part == "layer" else ("layer", part)
    inside = [
        at
        for at, placed in enumerate(manifest.components)
        if placed.layer is not None and layers[0] <= placed.layer <= layers[1] and placed.component.kind in kinds
    ]
    if not inside:
        raise InputError(f"layers {layers[0]}-{layers[1]} of {manifest.name} have no {part}")
    refuse_quantized(manifest.name, manifest.components)
    return inside[0], inside[-1] + 1


def refuse_quantized(name: str, components: Iterable[Placed]) -> None:
    """Raise InputError if a component is quantised: stand-ins are made of, and for, exact weights."""
    if any(is_quantized(placed.component) for placed in components):
        raise InputError(f"{name} is quantized: make stand-ins of exact models")


def pruned_run(target: PruneTarget, plan: PrunePlan, tensors: Mapping[str, Tensor]) -> BlockRun:
    """Return the block after a plan.

    Changed components get new tensors, named `<index in the run>.<name>` instead of digests.

    Args:
        tensors: The model's, by digest.

    Raises:
        InputError: transformers refuses the shape.
        MalformedCheckpoint: A tensor does not match the config.
    """
    links = list(target.plan.links[target.lo : target.hi])
    used = sorted({links[at].source or 0 for at in target.changed})
    configs = [pruned_config(target.plan.sources[source], target.part, plan.after) for source in used]
    placed, own = list(target.placed), {}
    for at in target.changed:
        which = used.index(links[at].source or 0)
        old = placed[at].component
        given = {name: tensors[digest] for name, digest in old.tensors}
        sliced = slice_tensors(target.axes[at], target.shape, plan.kept[target.layer_of[at]], given)
        own.update({f"{at}.{name}": tensor.clone() for name, tensor in sliced.items()})
        names = tuple((name, f"{at}.{name}") for name, _ in old.tensors)
        links[at] = ChainLink(old.kind, len(target.plan.sources) + which, links[at].layer)
        component = Component(old.kind, old.family, old.spec, names)
        placed[at] = replace(placed[at], component=respecced(component, configs[which], target.family, links[at].layer))
    return BlockRun(tuple(placed), ChainPlan((*target.plan.sources, *configs), tuple(links)), own, target.changed)


def renamed(run: BlockRun, digests: Mapping[str, str], tensors: Mapping[str, Tensor]) -> BlockRun:
    """Return a run over other tensors; `digests` maps the names in the changed components to digests."""
    placed = list(run.placed)
    for at in run.changed:
        old = placed[at].component
        names = tuple((name, digests[key]) for name, key in old.tensors)
        placed[at] = replace(placed[at], component=Component(old.kind, old.family, old.spec, names, old.adapter))
    return replace(run, placed=tuple(placed), tensors=tensors)


def whole_chain(target: PruneTarget, run: BlockRun) -> tuple[ChainPlan, tuple[Placed, ...]]:
    """Return the model's chain with the run in place.

    If every such component of the model is pruned, the pruned config applies to the whole model: embedding and head get
    its settings too (their tensors stay shared), so that a plain checkpoint of the family can be written.
    """
    before, after = target.manifest.components[: target.lo], target.manifest.components[target.hi :]
    placed = (*before, *run.placed, *after)
    links = (*target.plan.links[: target.lo], *run.plan.links, *target.plan.links[target.hi :])
    kinds = {target.placed[at].component.kind for at in target.changed}
    every = all(
        target.lo <= at < target.hi
        for at, each in enumerate(target.manifest.components)
        if each.component.kind in kinds
    )
    if not (every and target.plan.is_plain):
        return ChainPlan(run.plan.sources, links), renumbered(each.component for each in placed)
    config = run.plan.sources[-1]
    components = [respecced(each.component, config, target.family, each.layer) for each in placed]
    return ChainPlan((config,), tuple(ChainLink(link.kind, 0, link.layer) for link in links)), renumbered(components)
