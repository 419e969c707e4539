"""Make variants of a chain offline: blocks that were scored against its own replace them (BL-20), one or several.

    chain  A0 A1 A2 A3     scored  (A1, B1) 0.99, (A2, B2) 0.98
    ->  A0 B1 A2 A3 0.99,   A0 A1 B2 A3 0.98,   A0 B1 B2 A3 0.97

- The score of a variant with several replacements is the product of theirs. That is an estimate, because errors add up
  along the chain and over tokens (BL-28: 0.98 for each block, 0.88 for answers); a measured score can replace it.
- Only pairs scored with the chain's own use of a block count, never two that meet in a third model (BL-06).
- K and V of a variant are its own from the first replaced block on.

Which of it an engine can load, and under which name, is left to the caller; for stored models see
`engine.catalog.variants`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from runtime.chains import BlockUse, Chain, Variant
from zoo.manifest import digest_of


@dataclass(frozen=True, slots=True)
class ScoredPair:
    """Two uses of blocks, each in its own chain (given by `domain`), and the similarity of their outputs. Symmetric."""

    a: BlockUse
    b: BlockUse
    score: float

    def instead_of(self, use: BlockUse) -> BlockUse | None:
        """Return the other use if one of the two is this one, else None.

        A block in another chain, or under other adapters, is another use.
        """
        for own, other in ((self.a, self.b), (self.b, self.a)):
            if (own.block, own.domain) == (use.block, use.domain):
                return other
        return None


@dataclass(frozen=True, slots=True)
class _BlockSwap:
    at: int
    use: BlockUse
    score: float


def variants_of(
    chain: Chain,
    pairs: Sequence[ScoredPair],
    sizes: Mapping[str, int],
    least: float,
    most: int = 8,
    named: Callable[[str], str] | None = None,
) -> list[Variant]:
    """Return at most `most` variants with a score of at least `least`, best first; equal scores: fewest bytes first.

    Args:
        sizes: Bytes of every block.
        named: Returns the name under which engines find the variant of a version; None: made from the model's name and
            the version.
    """
    swaps = [
        _BlockSwap(at, other, pair.score)
        for at, use in enumerate(chain.uses)
        for pair in pairs
        if pair.score >= least and (other := pair.instead_of(use)) is not None and other.block != use.block
    ]
    swaps.sort(key=lambda swap: (-swap.score, sizes[swap.use.block], swap.at))
    found: dict[str, Variant] = {}
    for some in (*([swap] for swap in swaps), *_together(swaps)):
        score = prod(swap.score for swap in some)
        if score >= least:
            made = _swapped(chain, some)
            name = f"{chain.model}~{made.version[:8]}" if named is None else named(made.version)
            found.setdefault(made.version, Variant(name, replace(made, source=name), chain.version, score))

    def rank(variant: Variant) -> tuple[float, int]:
        return -variant.score, sum(sizes[block] for block in {use.block for use in variant.chain.uses})

    return sorted(found.values(), key=rank)[:most]


def _together(swaps: Sequence[_BlockSwap]) -> list[list[_BlockSwap]]:
    """Return the best two swaps, the best three, and so on, one for each place."""
    best: dict[int, _BlockSwap] = {}
    out: list[list[_BlockSwap]] = []
    for swap in swaps:
        if swap.at not in best:
            best[swap.at] = swap
            out.append(list(best.values()))
    return out[1:]


def _swapped(chain: Chain, swaps: Sequence[_BlockSwap]) -> Chain:
    """Return the chain with these uses in place of its own; later ones shift if lengths differ."""
    instead = {swap.at: swap.use for swap in swaps}
    uses: list[BlockUse] = []
    at, upstream = 0, ""
    for number, own in enumerate(chain.uses):
        use = instead.get(number, own)
        if number in instead or upstream:
            upstream = digest_of(
                ["kv of a variant", upstream or (uses[-1].domain if uses else ""), use.block, use.domain]
            )
        uses.append(replace(use, lo=at, hi=at + use.hi - use.lo, domain=upstream or own.domain))
        at = uses[-1].hi
    version = digest_of(["variant", chain.version, [[use.block, use.domain] for use in uses]])
    spec = replace(
        chain.spec,
        kv_layers=sum(use.kv_layers for use in uses),
        blocks=tuple(use.block for use in uses),
        domain=uses[-1].domain,
    )
    return Chain(spec, version, tuple(uses))
