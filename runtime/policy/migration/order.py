"""Which sequences leave a device first, so that few shared pages come to be on two devices (BL-18).

A page that several sequences share is there once on each device that runs one of them, and a move copies it:
whoever moves has pages of its own afterwards. So

    pages afterwards = pages before + sum over pages of (movers that hold it, less one if nobody else does)
                    <= pages before + sum over movers of shared(i)           shared(i): pages of sequence i that others
                                                                             hold too

The paper's order minimises that bound for every number of movers, and is the best choice for one mover, and
wherever no shared page has
all its holders among the movers. Pure: sets of page numbers in, an order out. It knows no devices and no times but
the ones it is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mover:
    """A sequence that could move. `pages`: its pages on the device but tentative ones (UN-13); `resume`: when it needs
    them, in ns.
    """

    seq: str
    pages: frozenset[int]
    resume: int = 0


@dataclass(frozen=True, slots=True)
class RankedMove:
    """A sequence in the order of moves, and how many of its pages others hold too."""

    mover: Mover
    shared: int


def order_moves(movers: Sequence[Mover], stay: Collection[Mover] = ()) -> tuple[RankedMove, ...]:
    """The paper's order (section 5.1): fewer shared pages first, then who resumes sooner, then by name. `stay`: others
    on the device.
    """
    holders = Counter(page for each in (*movers, *stay) for page in each.pages)
    ranked = [RankedMove(each, sum(holders[page] > 1 for page in each.pages)) for each in movers]
    return tuple(sorted(ranked, key=lambda one: (one.shared, one.mover.resume, one.mover.seq)))
