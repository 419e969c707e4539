"""A model's chain as people ask for it: its blocks, who shares each, and what was scored against each. Only reads the
catalogue.
"""

from __future__ import annotations

from dataclasses import dataclass

from zoo.catalog import Reader
from zoo.manifest import ChainBlock, Component, ModelManifest, block_digest
from zoo.records import Equivalence, ScoredRun


@dataclass(frozen=True, slots=True)
class BlockView:
    """A block of a model's chain. `layers` [lo, hi): the layers it has a part in, an empty range for the embedding
    or the head alone.

    `shared_with`: the other models whose chains have the same block. `equivalents`: runs of other models that were
    scored against this very block (BL-06), best first.
    """

    digest: str
    layers: tuple[int, int]
    components: tuple[BlockComponentView, ...]
    shared_with: tuple[str, ...]
    equivalents: tuple[Equivalent, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockComponentView:
    """A component at its place in the model."""

    layer: int | None
    component: Component


@dataclass(frozen=True, slots=True)
class Equivalent:
    """A run of another model, as it was scored: `block` names its components, which that model's chain may have cut
    into `blocks`.
    """

    block: str
    model: str
    similarity: float
    blocks: tuple[str, ...]


def chain_of(reader: Reader, manifest: ModelManifest) -> tuple[BlockView, ...]:
    """The model's blocks in order, as the catalogue has them now. Raises NotFound when the model was removed."""
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
    """Layers that components [lo, hi) have a part in; for the embedding or the head alone, the empty range where it
    stands.
    """
    inside = [each.layer for each in manifest.components[lo:hi] if each.layer is not None]
    if inside:
        return (min(inside), max(inside) + 1)
    before = [each.layer for each in manifest.components[:lo] if each.layer is not None]
    at = max(before) + 1 if before else 0
    return (at, at)


def _equivalents(reader: Reader, name: str) -> dict[tuple[int, int], tuple[Equivalent, ...]]:
    """Components [lo, hi) of a model -> what was scored against exactly these. Only stored pairs, either way round
    (BL-06).
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
    """(the model's own run, the other's, similarity): the relation is symmetric."""
    mine, other = (pair.a, pair.b) if pair.a.model == name else (pair.b, pair.a)
    return mine, other, pair.similarity
