"""Order the sequences that leave a device so that few shared pages end up on two devices (BL-18).

A page that several sequences share is stored once per device that runs one of them. A move copies it, unless the new
path has it already, so a moved sequence has its own pages afterwards:

    pages afterwards = pages before + sum over pages of (movers that hold it, less one if no other sequence does)
                    <= pages before + sum over movers of shared(i)           shared(i): pages that sequence i shares

The paper's order minimises that bound for every number of movers. It is the best choice for one mover, and whenever no
shared page has all its holders among the movers. Pure functions on sets of page numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mover:
    """Describe a sequence that could move.

    Fields:
        pages: Its pages on the device, without tentative ones (UN-13).
        resume: When it needs them, in ns.
    """

    seq: str
    pages: frozenset[int]
    resume: int = 0


@dataclass(frozen=True, slots=True)
class RankedMove:
    """Hold a sequence in the order of moves, and how many of its pages are shared."""

    mover: Mover
    shared: int


def order_moves(movers: Sequence[Mover], stay: Collection[Mover] = ()) -> tuple[RankedMove, ...]:
    """Return the paper's order (section 5.1): fewer shared pages first, then earlier resumption, then name.

    `stay`: the other sequences on the device.
    """
    holders = Counter(page for each in (*movers, *stay) for page in each.pages)
    ranked = [RankedMove(each, sum(holders[page] > 1 for page in each.pages)) for each in movers]
    return tuple(sorted(ranked, key=lambda one: (one.shared, one.mover.resume, one.mover.seq)))
