"""Which sequences leave a device first, so that few shared pages come to be on two devices (BL-18).

A page that several sequences share is there once on each device that runs one of them. Let `shared(i)` be the pages of sequence i that
others on the device hold too, and `doubled(M)` the pages held both by movers M and by others that stay. What holds, and no more:

    pages afterwards = pages before + doubled(M)            for every M, if movers share at the destination what they shared here
    doubled({i}) = shared(i)                                one mover: the paper's order is the best choice
    doubled(M) <= sum of shared(i) over M                   the paper's order minimises this bound, for every number of movers
    doubled(M) = that sum                                   if no page is shared by two movers: then the paper's choice is the best

It is not the best in general: of {A, B} with five pages in common and {C, D, E} with one, the paper moves C and D, which doubles a page;
A and B together double none. `fewest_doubled` sees that; to find the best choice always is as hard as cutting a hypergraph in two parts of
given sizes. Pure: sets of page numbers in, an order out. It knows no devices and no times but the ones it is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mover:
    """A sequence that could move. `pages`: its pages on the device but tentative ones (UN-13); `resume`: when it needs them, in ns."""

    seq: str
    pages: frozenset[int]
    resume: int = 0


@dataclass(frozen=True, slots=True)
class Ranked:
    """A sequence in the order of moves, and how many of its pages others hold too."""

    mover: Mover
    shared: int


def order_moves(movers: Sequence[Mover], stay: Collection[Mover] = ()) -> tuple[Ranked, ...]:
    """The paper's order (section 5.1): fewer shared pages first, then who resumes sooner, then by name. `stay`: others on the device."""
    holders = Counter(page for each in (*movers, *stay) for page in each.pages)
    ranked = [Ranked(each, sum(holders[page] > 1 for page in each.pages)) for each in movers]
    return tuple(sorted(ranked, key=lambda one: (one.shared, one.mover.resume, one.mover.seq)))


def doubled(moved: Collection[Mover], stay: Collection[Mover]) -> int:
    """Pages that will be on both devices."""
    return len(frozenset().union(*(each.pages for each in moved)) & frozenset().union(*(each.pages for each in stay)))


def fewest_doubled(movers: Sequence[Mover], count: int, stay: Collection[Mover] = ()) -> tuple[Mover, ...]:
    """`count` movers that double few pages: the paper's, or, if those double fewer, ones that begin with any mover and go on with whoever
    adds least to those before. Never worse than the paper's. Raises ValueError for more than there are.

    O(count * movers^2 * shared pages): for the tens of sequences that a device gives away at once.
    """
    if not 0 <= count <= len(movers):
        raise ValueError(f"{count} of {len(movers)} sequences cannot move")
    order = [one.mover for one in order_moves(movers, stay)]
    holders = Counter(page for each in (*movers, *stay) for page in each.pages)
    choices = [order[:count]]
    if count:
        choices.extend(_grown_from(first, order, count, holders) for first in order)
    best = min(choices, key=lambda chosen: doubled(chosen, [*_without(order, chosen), *stay]))
    return tuple(best)


def _grown_from(first: Mover, order: Sequence[Mover], count: int, holders: Mapping[int, int]) -> list[Mover]:
    """`first`, and one after another whoever doubles the fewest pages more, or takes the last holder of most."""
    shared = {each.seq: [page for page in each.pages if holders[page] > 1] for each in order}
    moved = Counter(shared[first.seq])
    chosen, rest = [first], _without(order, [first])
    while len(chosen) < count:
        following = min(rest, key=lambda each: sum((not moved[page]) - (moved[page] + 1 == holders[page]) for page in shared[each.seq]))
        moved.update(shared[following.seq])
        chosen.append(following)
        rest.remove(following)
    return chosen


def _without(movers: Sequence[Mover], chosen: Collection[Mover]) -> list[Mover]:
    names = {each.seq for each in chosen}
    return [each for each in movers if each.seq not in names]
