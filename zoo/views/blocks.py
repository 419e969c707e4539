"""A model's chain for display: its blocks, the models that share each, and the runs scored against each.

Only reads the catalogue.
"""

from __future__ import annotations

from dataclasses import dataclass

from zoo.catalog import Reader
from zoo.manifest import ChainBlock, Component, ModelManifest, block_digest
from zoo.records import Equivalence, ScoredRun


@dataclass(frozen=True, slots=True)
class BlockView:
    """A block of a model's chain.

    Fields:
        layers: Range [lo, hi) of the layers that it covers, in part or whole; empty for the embedding or the head
            alone.
        shared_with: The other models that have the same block in their chain.
        equivalents: Runs of other models that were scored against exactly this block (BL-06), best first.
    """

    digest: str
    layers: tuple[int, int]
    components: tuple[BlockComponentView, ...]
    shared_with: tuple[str, ...]
    equivalents: tuple[Equivalent, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockComponentView:
    """A component at its position in the model."""

    layer: int | None
    component: Component


@dataclass(frozen=True, slots=True)
class Equivalent:
    """A run of another model that was scored against a block.

    Fields:
        block: Digest over the run's components.
        blocks: The blocks of that model's chain that overlap the run.
    """

    block: str
    model: str
    similarity: float
    blocks: tuple[str, ...]


def chain_of(reader: Reader, manifest: ModelManifest) -> tuple[BlockView, ...]:
    """Return the model's blocks in order, as the catalogue has them now. Raises NotFound if the model was removed."""
    blocks = reader.chain(manifest.name)
    users = reader.block_models([block.digest for block in blocks])
    alike = _equivalents(reader, manifest.name)
    return tuple(
        _block(block, manifest, users.get(block.digest, ()), alike.get((block.lo, block.hi), ())) for block in blocks
    )


def _block(
    block: ChainBlock, manifest: ModelManifest, users: tuple[str, ...], alike: tuple[Equivalent, ...]
) -> BlockView:
    placed = manifest.components[block.lo : block.hi]
    return BlockView(
        digest=block.digest,
        layers=_layers(manifest, block.lo, block.hi),
        components=tuple(BlockComponentView(each.layer, each.component) for each in placed),
        shared_with=tuple(name for name in users if name != manifest.name),
        equivalents=alike,
    )


def _layers(manifest: ModelManifest, lo: int, hi: int) -> tuple[int, int]:
    """Return the layers [lo, hi) that components [lo, hi) cover.

    For the embedding or the head alone this is an empty range at its place.
    """
    inside = [each.layer for each in manifest.components[lo:hi] if each.layer is not None]
    if inside:
        return (min(inside), max(inside) + 1)
    before = [each.layer for each in manifest.components[:lo] if each.layer is not None]
    at = max(before) + 1 if before else 0
    return (at, at)


def _equivalents(reader: Reader, name: str) -> dict[tuple[int, int], tuple[Equivalent, ...]]:
    """Return components [lo, hi) of a model -> the runs scored against exactly these.

    Only stored pairs count, in either direction (BL-06).
    """
    pairs = [_seen_from(pair, name) for pair in reader.equivalences([name]) if pair.relation == "equivalent"]
    others = {other.model for _, other, _ in pairs}
    digests, chains = reader.component_digests(others), reader.chains(others)
    newest: dict[tuple[int, int], dict[ScoredRun, Equivalent]] = {}
    for mine, other, similarity in pairs:
        components = digests[other.model][other.lo : other.hi]
        within = tuple(block.digest for block in chains[other.model] if block.lo < other.hi and other.lo < block.hi)
        found = Equivalent(block_digest(components), other.model, similarity, within)
        newest.setdefault((mine.lo, mine.hi), {})[other] = found
    return {run: tuple(sorted(found.values(), key=lambda each: -each.similarity)) for run, found in newest.items()}


def _seen_from(pair: Equivalence, name: str) -> tuple[ScoredRun, ScoredRun, float]:
    """Return (the model's own run, the other's, similarity); the relation is symmetric."""
    mine, other = (pair.a, pair.b) if pair.a.model == name else (pair.b, pair.a)
    return mine, other, pair.similarity
