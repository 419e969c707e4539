"""Stand-ins from existing blocks (BL-10): a cheaper block of a smaller model, or fewer layers, in a block's place.

    report = make_from(zoo, "wide", (4, 7), "narrow")                  # the narrow model's layers at the same depth,
                                                                       stitched at both ends
    report = make_from(zoo, "base", (4, 6), "base", take=(4, 5))       # a layer left out

This costs no bytes: components are referenced, not copied. Where widths differ, the two models' stitches (`zoo stitch`)
are inserted at both ends. The result is scored, timed and recorded as a pruned stand-in is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from surgery.chains.compose import draft
from surgery.chains.composition import Composition, ModelSlice
from surgery.chains.plan import ChainLink, ChainPlan
from surgery.models.put import MadeModel, MadeReport, put_made
from surgery.tensors.pool import map_tensor
from surgery.text.tokenizers import require_same
from surrogates.block import BlockRun, Subject, as_float32
from surrogates.making import free_name
from surrogates.material import gather, metrics_of, score
from surrogates.options import SurrogateOptions, SurrogateReport
from surrogates.pruning.draft import bounds_of, refuse_quantized
from surrogates.pruning.plan import check_layers
from zoo.errors import InputError
from zoo.manifest import Component, ModelManifest, Placed, TensorMeta
from zoo.records import Equivalence
from zoo.records import ScoredRun as ChainRun

if TYPE_CHECKING:
    from zoo.api import Zoo


def make_from(
    zoo: Zoo,
    model: str,
    layers: tuple[int, int],
    other: str,
    take: tuple[int, int] | None = None,
    options: SurrogateOptions | None = None,
) -> SurrogateReport:
    """Put another model's layers in place of a block, if they have fewer parameters.

    Args:
        layers: Layers of `model`, first and last inclusive.
        take: Layers of `other`, first and last inclusive; the run at the same relative depth when None.

    Raises:
        NotFound: A model, or a stitch between the two widths.
        InputError: Layers that do not exist, a run that is not cheaper, blocks with stitches or adapters inside.
        Incomparable: The models' tokenizers differ.
    """
    options = options or SurrogateOptions()
    options.check()
    begun = time.monotonic()
    handle, source = zoo.model(model), zoo.model(other)
    require_same(handle, source)
    bounds = bounds_of(handle.manifest, layers, "layer")
    first, last = take or proportional(layers, layers_of(handle.manifest), layers_of(source.manifest))
    check_layers((first, last), layers_of(source.manifest), source.name)
    refuse_quantized(source.name, source.manifest.components)
    default = f"{handle.name}@surrogate-{layers[0]}-{layers[1]}-{source.name}-{first}-{last}"
    name = free_name(zoo, default if options.name is None else options.name)
    swap = _Swap(zoo, handle.manifest, bounds, _composition(handle.manifest, layers, source.name, (first, last)), name)
    made = swap.draft()
    removed = swap.removed(made)
    material = gather(zoo, handle, layers, bounds, options)
    agreement, speed = score(material, swap.run(made, material.subject), options.timing)
    described = f"layers {first}-{last} of {source.name} for layers {layers[0]}-{layers[1]} of {handle.name}"
    metrics = metrics_of(agreement, speed, removed)
    put = swap.put(
        described, lambda a, b: Equivalence("surrogate", a, b, material.probe.digest, agreement.block, None, metrics)
    )
    return SurrogateReport(
        name, handle.name, layers, "layer", removed, agreement, speed, material.probe.digest, put.bytes_new,
        time.monotonic() - begun, put.exportable, put.reason,
    )  # fmt: skip


@dataclass(frozen=True)
class _Swap:
    """A model with components `bounds` replaced as a composition says."""

    zoo: Zoo
    manifest: ModelManifest
    bounds: tuple[int, int]
    wanted: Composition
    name: str

    def draft(self) -> MadeModel:
        with self.zoo.store.catalog.reading() as reader:
            return draft(self.zoo.store, reader, self.wanted, self.name)

    def inside(self, made: MadeModel) -> tuple[int, int]:
        """Return the stand-in's components in the chain; the part after the block has its old length."""
        return self.bounds[0], len(made.components) - (len(self.manifest.components) - self.bounds[1])

    def removed(self, made: MadeModel) -> float:
        """Return the share of the block's parameters that the stand-in saves. Raises InputError if it saves none."""
        metas = {**made.tensors, **{tensor.digest: tensor for tensor in self.manifest.tensors}}
        (lo, hi), (first, end) = self.bounds, self.inside(made)
        old, new = _parameters(self.manifest.components[lo:hi], metas), _parameters(made.components[first:end], metas)
        if new >= old:
            raise InputError(
                f"the other block is no cheaper: {new:,} parameters for {old:,}; take fewer layers (--take) or a "
                "smaller model"
            )
        return 1.0 - new / old

    def run(self, made: MadeModel, subject: Subject) -> BlockRun:
        """Return the stand-in over its own tensors, with its sources after the subject's."""
        lo, hi = self.inside(made)
        placed = made.components[lo:hi]
        named = {
            digest for each in placed for _, digest in (*each.component.tensors, *_adapter_tensors(each.component))
        }
        tensors = {
            digest: as_float32(map_tensor(self.zoo.store.open_tensor(digest)), subject.device) for digest in named
        }
        shift = len(subject.plan.sources)
        links = [
            ChainLink(link.kind, None if link.source is None else link.source + shift, link.layer)
            for link in made.plan.links[lo:hi]
        ]
        return BlockRun(placed, ChainPlan((*subject.plan.sources, *made.plan.sources), tuple(links)), tensors)

    def put(self, source: str, pair: Callable[[ChainRun, ChainRun], Equivalence]) -> MadeReport:
        """Draft the chain again under the store's lock, so that its components stay in the store, and add it."""
        with self.zoo.store.ingesting():
            made = self.draft()
            runs = ChainRun(self.manifest.name, *self.bounds), ChainRun(self.name, *self.inside(made))
            kept = replace(made, kind="surrogate", base=self.manifest.name, source=source, pairs=(pair(*runs),))
            return put_made(self.zoo.store, kept)


def layers_of(manifest: ModelManifest) -> int:
    """Return a model's number of layers."""
    return 1 + max((placed.layer for placed in manifest.components if placed.layer is not None), default=-1)


def proportional(layers: tuple[int, int], count: int, other: int) -> tuple[int, int]:
    """Return the run, in a model of `other` layers, at the depth of `layers` in a model of `count` layers.

    Runs are first and last layer, inclusive.
    """
    first = round(layers[0] * other / count)
    last = round((layers[1] + 1) * other / count) - 1
    first = min(first, other - 1)
    return first, max(first, min(last, other - 1))


def _composition(manifest: ModelManifest, layers: tuple[int, int], other: str, take: tuple[int, int]) -> Composition:
    slices = [
        ModelSlice(manifest.name, 0, layers[0]),
        ModelSlice(other, take[0], take[1] + 1),
        ModelSlice(manifest.name, layers[1] + 1, layers_of(manifest)),
    ]
    return Composition(tuple(each for each in slices if each.lo < each.hi), manifest.name, manifest.name)


def _parameters(placed: Iterable[Placed], metas: dict[str, TensorMeta]) -> int:
    return sum(metas[digest].elements for each in placed for _, digest in each.component.tensors)


def _adapter_tensors(component: Component) -> tuple[tuple[str, str], ...]:
    return () if component.adapter is None else component.adapter.tensors
