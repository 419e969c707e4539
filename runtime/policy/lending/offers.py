"""Rank the devices that a manager of the pool recommends as creditors (IL-13, IL-14). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Lender(NamedTuple):
    """A device that may lend, as a manager of the pool believes it to be.

    Fields:
        room: Pages that it lent when it was heard of last.
        promised: Pages of these that debtors have been sent to since.
        cost: Relative cost of communication with the debtor.
    """

    device: str
    room: int
    promised: int
    cost: int

    @property
    def open_room(self) -> int:
        """Pages of its room that no debtor has been sent to."""
        return self.room - self.promised


def rank(lenders: Iterable[Lender], pages: int, most: int) -> list[Lender]:
    """Return at most `most` of the devices with room for so many pages, the best first.

    The lowest cost comes first, then the most room that is left (IL-13). Devices of which the room has been
    promised to debtors come last: queries at one time are spread, and what a debtor does not take is not lost.
    """
    able = [each for each in lenders if each.room >= pages]
    return sorted(able, key=lambda each: (each.open_room < pages, each.cost, -each.open_room, each.device))[:most]
