"""Lazy partitioning (BL-02, BL-03): the coarsest cut of chains in which everything that is shared is a block.

A pure function of component digests. Equivalences enter as requested cuts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from zoo.manifest import ChainBlock, block_digest

#: Component -> its neighbours on one side; None stands for the end of a chain.
_Neighbours = dict[str, set[str | None]]


def partition(
    chains: Mapping[str, Sequence[str]], cuts: Collection[tuple[str, str]] = ()
) -> dict[str, tuple[ChainBlock, ...]]:
    """Cut every chain into blocks.

    Two neighbours x, y stay joined exactly if, over all chains, x is always directly followed by y, y is always
    directly preceded by x, and no cut between them is requested. Then every chain that uses one uses the other beside
    it, and a boundary would be useless. Any other boundary exists because a chain enters or leaves there.

    Args:
        chains: Model name -> its component digests, in order. All models that share components with each other must be
            included; models that share nothing do not influence each other.
        cuts: Pairs (x, y) of component digests that must not share a block, wherever they are adjacent.

    Returns:
        The same names -> blocks that cover the components once and in order. Independent of the order of `chains`.
    """
    after = _followers(chains.values())
    before = _followers([list(reversed(chain)) for chain in chains.values()])
    asked = set(cuts)

    def joined(left: str, right: str) -> bool:
        return after[left] == {right} and before[right] == {left} and (left, right) not in asked

    blocks: dict[str, tuple[ChainBlock, ...]] = {}
    for name, chain in chains.items():
        edges = [at for at in range(1, len(chain)) if not joined(chain[at - 1], chain[at])]
        bounds = [0, *edges, len(chain)] if chain else []
        blocks[name] = tuple(ChainBlock(block_digest(chain[lo:hi]), lo, hi) for lo, hi in pairwise(bounds))
    return blocks


def _followers(chains: Collection[Sequence[str]]) -> _Neighbours:
    """Return component -> all components that directly follow it in any chain."""
    found: _Neighbours = defaultdict(set)
    for chain in chains:
        for here, following in zip(chain, [*chain[1:], None], strict=False):
            found[here].add(following)
    return found
