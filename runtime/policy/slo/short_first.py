"""Order equals by the length of their answers: the short ones first, within an aging limit.

Equals are waiting groups of one priority and one objective, or without objective. By arrival a short answer waits for
all long ones before it; behind it they hardly wait longer. Lengths count with a mark-up for their tail
(`lengths.AnswerLengths.inflated`), after TIE (arXiv 2604.00499), which adjusts the expectation of a fitted distribution
by its tail; here both come from the histogram of what was served.

A group counts as if its deadlines were later, by the share of the aging limit by which its answers are longer than the
shortest of its equals. So a request is overtaken only by those that come within the limit after it, and whole groups
are ordered: members stay by arrival. No group that is on time by arrival becomes late by this: then less is tried, at
last nothing. Pure; times in ns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Parts of the limit that are tried, in 1/8.
_PARTS = (8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class EqualGroup:
    """A waiting group of a cell.

    Fields:
        equals: What it has in common with its equals: priority first.
        size: Length of its answers in tokens, with the mark-up.
        count: Its waiting members.
        first, last: Deadlines of its first and last member, from now.
        work: Mean time that a member occupies a place.
        limit: By how much it may count later.
    """

    id: int
    equals: tuple[int, object]
    size: float
    count: int
    first: int
    last: int
    work: float
    limit: int


def delays(groups: Sequence[EqualGroup], busy: float, places: int) -> Mapping[int, int]:
    """Return by how much the deadlines of each group count later in the order; nothing where arrival orders.

    Args:
        groups: Those of a cell.
        busy: Time that what runs there still takes, summed.
        places: Requests that run there at a time.
    """
    sizes: dict[object, list[float]] = {}
    for each in groups:
        sizes.setdefault(each.equals, []).append(each.size)
    shares = {each.id: (each.size - min(sizes[each.equals])) / max(sizes[each.equals]) for each in groups}
    if not any(shares.values()):
        return {}
    late = _late(groups, {}, busy, places)
    for part in _PARTS:
        found = {each.id: int(each.limit * part / 8 * shares[each.id]) for each in groups}
        if _late(groups, found, busy, places) <= late:
            return found
    return {}


def _late(groups: Sequence[EqualGroup], later: Mapping[int, int], busy: float, places: int) -> set[int]:
    """Return the groups of which the first or last member is late, where the deadlines of some count later."""
    found, ahead = set[int](), busy
    for each in sorted(groups, key=lambda each: (each.equals[0], each.first + later.get(each.id, 0), each.id)):
        begin = ahead / places + each.work
        ahead += each.count * each.work
        if begin > each.first or (ahead - each.work) / places + each.work > each.last:
            found.add(each.id)
    return found
