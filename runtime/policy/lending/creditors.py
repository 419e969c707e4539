"""Choose the device that holds page sets for another one (IL-08, IL-09, IL-13).

The nearest device comes first, then the one with the most pages to lend. A loan lies on one device; what does not fit
there becomes a further loan. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Creditor(NamedTuple):
    """A device that may lend.

    Fields:
        free: Pages that are free now.
        lent: Pages that it holds for other devices.
        most: Pages that it may hold for other devices (IL-08).
        load: Share of its places for sequences that is taken.
        near: Whether it is on the debtor's machine.
        decodes: Whether K and V of answers grow there: other devices, which have their pages for prompts, lend first.
    """

    device: str
    free: int
    lent: int
    most: int
    load: float
    near: bool
    decodes: bool = True

    @property
    def spare(self) -> int:
        """Pages that it can lend now."""
        return max(0, min(self.free, self.most - self.lent))


def candidates(creditors: Iterable[Creditor], busy: float) -> list[Creditor]:
    """Return the devices that can lend now, the best first (IL-13). `busy`: load from which on a device refuses."""
    able = [each for each in creditors if each.spare and each.load < busy]
    return sorted(able, key=lambda each: (not each.near, each.decodes, -each.spare, each.device))


def refusal(creditor: Creditor, busy: float, pages: int) -> str:
    """Return why a device does not take so many pages, by its own account alone; empty if it takes them (IL-07)."""
    if creditor.load >= busy:
        return "it is busy"
    if creditor.lent + pages > creditor.most:
        return "it lends no more"
    return "" if pages <= creditor.free else "it has no room"


def choose(creditors: Iterable[Creditor], busy: float, groups: int, pages: int) -> tuple[str, int] | None:
    """Return which device takes how many of `groups` page sets of `pages` pages each; None if none takes any.

    The best one that takes them all, else the one that takes the most.
    """
    able = [(each, min(groups, each.spare // pages)) for each in candidates(creditors, busy)]
    best = max(able, key=lambda each: each[1], default=None)
    return (best[0].device, best[1]) if best is not None and best[1] else None
