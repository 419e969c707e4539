"""Find a model's variants among stored models: composed ones (`zoo compose`) with scored replacements (BL-20).

    A = a0 a1 a2 a3 a4        scored (BL-05): A[2:4] ~ B[2:4] 0.985
    C = a0 a1 b2 b3 a4        is a variant of A and adds no bytes

Only pairs scored between A and the model that the replacing run comes from count, never two pairs that meet in a third
model (BL-06). The score is that of A against C itself if these two were compared to their ends; else it is estimated as
the product of the pairs' scores, since errors add up along a chain (BL-28). Chains with stitches count only if they
were compared. Of several probes the lowest score counts.

Reads the catalogue and configs; loads nothing, writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.chains import Block, Chain, Rewriting, Variant
from runtime.config import EngineConfig
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.models.servable import Executor
from runtime.policy.routing.variants import DispatchLimits
from zoo.catalog import Reader
from zoo.errors import NotServable
from zoo.records import Equivalence, ScoredRun
from zoo.store import Store

_STITCH = "stitch"


@dataclass(frozen=True, slots=True)
class DescribedVariant:
    """A variant, and its blocks in order."""

    variant: Variant
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Swap:
    """A possible replacement of components [lo, hi) of a model by components with the digests `instead`."""

    lo: int
    hi: int
    instead: tuple[str, ...]
    score: float


def variants_in(
    store: Store,
    exact: Chain,
    name: str,
    config: EngineConfig,
    half_page: int,
    piece_bytes: int,
    limits: DispatchLimits | None = None,
    executor: Executor = "paged",
) -> tuple[DescribedVariant, ...]:
    """Return the variants of a served model that the store holds, best first.

    Args:
        exact: the model's chain, as `describe_chain` returned it for `name`.
        limits: the lowest scores at which a replacement is used.
        executor: the one that is to run them.

    Variants that cannot be served here are left out. Raises as `describe_chain` for other errors.
    """
    limits = limits or DispatchLimits()
    with store.catalog.reading() as reader:
        name = reader.resolve(name)
        found = _scored(reader, name, limits)
    out: list[DescribedVariant] = []
    for other, score, stitched in found:
        try:
            described = describe_chain(store, other, config, half_page, piece_bytes, exact.model, executor)
        except NotServable:
            continue
        if described.chain.spec.vocab_size == exact.spec.vocab_size and not described.chain.spec.virtual_tokens:
            variant = Variant(other, described.chain, exact.version, score, "stitched" if stitched else "equivalent")
            out.append(DescribedVariant(variant, described.blocks))
    return tuple(sorted(out, key=lambda each: -each.variant.score))


def rewriting_of(store: Store, name: str) -> Rewriting | None:
    """Find the full fine-tune that a stored model is a low-rank delta of (`zoo delta`); None for any other model. Of
    several probes the least score counts.
    """
    with store.catalog.reading() as reader:
        name = reader.resolve(name)
        scored = [
            Rewriting(pair.a.model, pair.similarity)
            for pair in reader.equivalences([name])
            if pair.relation == "delta" and pair.b.model == name and pair.a.lo == 0
        ]
    return min(scored, key=lambda each: each.score, default=None)


def _scored(reader: Reader, name: str, limits: DispatchLimits) -> list[tuple[str, float, bool]]:
    """Return (composed model, score, whether it has stitches) of all usable variants."""
    names = [entry.name for entry in reader.entries() if entry.kind == "composed" and entry.name != name]
    pairs = [pair for pair in reader.equivalences([name]) if pair.relation == "equivalent"]
    involved = {run.model for pair in pairs for run in (pair.a, pair.b)}
    digests = reader.component_digests([name, *names, *(involved - {name, *names})])
    own = digests[name]
    swaps = swaps_of(name, pairs, digests, limits.equivalent)
    out: list[tuple[str, float, bool]] = []
    for other in names:
        stitched = any(placed.component.kind == _STITCH for placed in reader.model(other).components)
        measured = compared(name, other, pairs, (len(own), len(digests[other])))
        if stitched:
            taken = measured is not None and measured >= limits.stitched
            score = measured
        else:
            estimate = replaced(own, digests[other], swaps)
            taken = estimate is not None and estimate[1] > 0
            score = measured if measured is not None or estimate is None else estimate[0]
        if taken and score is not None:
            out.append((other, score, stitched))
    return out


def swaps_of(name: str, pairs: Sequence[Equivalence], digests: Mapping[str, Sequence[str]], least: float) -> list[Swap]:
    """Return the replacements that pairs allow for a model's own components, each with its lowest score."""
    scores: dict[tuple[ScoredRun, ScoredRun], float] = {}
    for pair in pairs:
        key = (pair.a, pair.b) if pair.a.model == name else (pair.b, pair.a)
        scores[key] = min(scores.get(key, 1.0), pair.similarity)
    return [
        Swap(own.lo, own.hi, tuple(digests[other.model][other.lo : other.hi]), score)
        for (own, other), score in scores.items()
        if score >= least and other.model != name
    ]


def compared(name: str, other: str, pairs: Sequence[Equivalence], lengths: tuple[int, int]) -> float | None:
    """Return the similarity of two models' answers; None if they were never compared to their ends.

    It is the lowest score after their last components.
    """
    ends = [
        pair.similarity
        for pair in pairs
        for a, b in ((pair.a, pair.b), (pair.b, pair.a))
        if (a.model, b.model) == (name, other) and (a.hi, b.hi) == lengths
    ]
    return min(ends, default=None)


def replaced(own: Sequence[str], other: Sequence[str], swaps: Sequence[Swap]) -> tuple[float, int] | None:
    """Return how a chain results from another by swaps: (product of their scores, number), the best of all ways.

    Returns None if it does not.
    """
    at: dict[int, list[Swap]] = {}
    for swap in swaps:
        at.setdefault(swap.lo, []).append(swap)
    best: dict[tuple[int, int], tuple[float, int]] = {(0, 0): (1.0, 0)}
    for here in range(len(own)):
        for there in sorted(at_there for at_here, at_there in best if at_here == here):
            score, count = best[here, there]
            ways = [(1, 1, 1.0, 0)] if there < len(other) and own[here] == other[there] else []
            for swap in at.get(here, ()):
                if swap.instead and tuple(other[there : there + len(swap.instead)]) == swap.instead:
                    ways.append((swap.hi - swap.lo, len(swap.instead), swap.score, 1))
            for mine, theirs, factor, swapped in ways:
                place, value = (here + mine, there + theirs), (score * factor, count + swapped)
                if place not in best or best[place][0] < value[0]:
                    best[place] = value
    return best.get((len(own), len(other)))
