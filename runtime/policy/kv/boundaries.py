"""Choose the boundaries of each chain at which hidden states of prompts are saved, and when to wait for them (UN-15).

Two chains share everything up to their deepest common boundary. Domains include everything upstream, so the chains form
a tree, and a boundary is worth saving at where at least one other chain parts from this one:

    a, b, c, d --- 4 layers --- a, b, c --- 6 layers --- a, b        a and b save behind 4, 6 and where they part,
               \\- d                      \\- c                        c behind 4 and 6, d behind 4 layers

Pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise

from runtime.chains import Boundary, Chain

#: Boundaries of a chain, the deepest ones: each costs a page of hidden states per page set of a prompt.
MOST = 4
#: A prompt waits for states on their way if they spare it at least this share of its tokens times layers: the device
#: computes the prompt that it waits for meanwhile, so little is lost.
WORTH = 0.25


def parting_boundaries(chains: Iterable[Chain], most: int = MOST) -> Mapping[str, tuple[Boundary, ...]]:
    """Return, by version, the deepest boundaries that a chain has in common with another one; none are left out.

    Chains with different numbers of tokens per page share nothing.
    """
    known = {chain.version: chain for chain in chains}.values()
    users = Counter((chain.spec.page_tokens, each.domain) for chain in known for each in chain.boundaries)
    found: dict[str, tuple[Boundary, ...]] = {}
    for chain in known:
        counts = [*(users[chain.spec.page_tokens, each.domain] for each in chain.boundaries), 1]
        parting = [each for each, (here, after) in zip(chain.boundaries, pairwise(counts), strict=True) if here > after]
        if parting:
            found[chain.version] = tuple(parting[-most:])
    return found


def worth_waiting(now: int, soon: int, whole: int) -> bool:
    """Return whether a prompt should wait for states that a running sequence is about to save.

    Args:
        now: Pages that it can share already.
        soon: Pages that it can share then.
        whole: All pages of its prompt.
    """
    return soon > now and soon - now >= WORTH * whole
