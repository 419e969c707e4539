"""Choose running sequences that give way to a waiting one which would be late otherwise (QL-09).

The waiting sequence is the first in the order, and is short of a place or of pages. It gets them from running ones only
if it would be late by waiting for what ends by itself, and may be on time if it starts now. Sequences that give way are
later in the order, are on time all the same, and have run for a while since they last started. Of these, those of the
least urgent group go first (QL-03), and within a group those with the fewest tokens to compute again. Pure; times in
ns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

#: Within so many mean times an end without memory comes in nine of ten cases, -ln(0.1), and in 95 %, -ln(0.05).
_SURE, _SURELY = 2.3, 3.0


@dataclass(frozen=True, slots=True)
class Urgent:
    """The waiting sequence.

    Fields:
        due: Its deadline.
        shortest: A time in which it may end, if all goes well.
        service: Expected time from its start to its end.
        longest: An upper bound of that time.
        places: Devices that have no place for another sequence.
        pages: Pages that are missing, by device; none where only places are.
    """

    due: int
    shortest: int
    service: int
    longest: int
    places: frozenset[str] = frozenset()
    pages: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Occupant:
    """A running sequence.

    Fields:
        group: Its priority and the time that its requests have in all: less urgent groups are greater.
        due: Its deadline.
        rest: Expected time from now to its end if it runs on.
        ends: An upper bound of that time.
        resumes: Expected time from its next start to its end, what it has to compute again included.
        lost: Tokens that it has to compute again.
        held: Pages that it holds by device; every device of its path is named.
        may_yield: Whether it may give way: it is behind the urgent one in the order, and has run for a while since its
            latest start.
        lent: Pages that it holds on devices that are not on its path, where it takes no place.
    """

    seq: str
    group: tuple[int, int]
    due: int
    rest: int
    ends: int
    resumes: int
    lost: int
    held: Mapping[str, int]
    may_yield: bool = True
    lent: Mapping[str, int] = field(default_factory=dict)

    @property
    def pages(self) -> Iterable[tuple[str, int]]:
        """Its pages by device."""
        return chain(self.held.items(), self.lent.items())


def victims(urgent: Urgent, running: Sequence[Occupant], now: int) -> tuple[str, ...]:
    """Return the sequences that give way to the urgent one, in order; none if it can wait or they would not suffice.

    `running`: those on the devices that it needs.
    """
    if now + urgent.shortest > urgent.due:
        return ()  # it is late anyway
    if now + _wait(urgent, running) + urgent.longest <= urgent.due:
        return ()
    able = [each for each in running if each.may_yield and now + urgent.service + each.resumes <= each.due]
    able.sort(key=lambda each: (-each.group[0], -each.group[1], each.lost, each.seq))
    return tuple(each.seq for each in _enough(urgent, able))


def leave_for_load(urgent: Urgent, running: Sequence[Occupant], load: int, now: int) -> tuple[str, ...]:
    """Return the sequences that give way to a model that waits to be loaded: all that are in its way, or none.

    They have to load their own model again before they go on.

    Args:
        running: Those on the stages that have to leave, at least one.
        load: Expected time of a load.
    """
    if now + load + urgent.shortest > urgent.due:
        return ()  # it is late anyway
    if now + max(each.ends for each in running) + load + urgent.longest <= urgent.due:
        return ()
    away = 2 * load + urgent.service
    able = all(each.may_yield and now + away + each.resumes <= each.due for each in running)
    return tuple(each.seq for each in running) if able else ()


def _wait(urgent: Urgent, running: Sequence[Occupant]) -> int:
    """Return the time within which what ends by itself most likely suffices.

    Of many that run, some may end long before their upper bounds.
    """
    freed = _enough(urgent, sorted(running, key=lambda each: each.ends))
    if not freed:
        return 1 << 62
    return min(max(each.ends for each in freed), int(_until_ends(running, len(freed))))


def _until_ends(running: Sequence[Occupant], count: int) -> float:
    """Return the time within which at least so many of these have ended in nine of ten cases.

    Each is taken to end at any moment after a time in which it does not: so that its mean is `rest`, and 95 % of the
    ends are before `ends`. One of which the end is known, since it runs to its limit, does not end before.
    """
    slopes: list[tuple[float, float]] = []
    for each in running:
        spread = max(min((each.ends - each.rest) / (_SURELY - 1.0), float(each.rest)), 1.0)
        begins = max(each.rest - spread, 0.0)
        # From then on it counts as ended more and more, and once at most.
        slopes += [(begins, 1 / spread), (begins + _SURE * spread, -1 / spread)]
    at = ended = slope = 0.0
    for moment, change in sorted(slopes):
        if slope > 0 and ended + slope * (moment - at) >= _SURE * count:
            return at + (_SURE * count - ended) / slope
        ended, at, slope = ended + slope * (moment - at), moment, slope + change
    return at


def _enough(urgent: Urgent, some: Sequence[Occupant]) -> list[Occupant]:
    """Return the first of these that free what is missing, those left out that free nothing of it; none if too few."""
    places, pages, taken = set(urgent.places), dict(urgent.pages), []
    for each in some:
        if not places and all(count <= 0 for count in pages.values()):
            break
        if places.isdisjoint(each.held) and not any(pages.get(name, 0) > 0 and count for name, count in each.pages):
            continue
        taken.append(each)
        places.difference_update(each.held)
        for name, count in each.pages:
            if name in pages:
                pages[name] -= count
    return taken if not places and all(count <= 0 for count in pages.values()) else []
