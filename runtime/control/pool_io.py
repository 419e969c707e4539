"""Define what scheduler and managers of the pool say to each other (`--lending negotiated`, IL-12).

    PoolQuery  scheduler, for a debtor -> one manager       PoolAnswer  that manager -> scheduler
    PoolDenial scheduler, for a creditor -> all managers

They pass through the driver, which carries them in any way that keeps their order. All may be lost: a query without an
answer ends by time.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class PoolQuery(msgspec.Struct, frozen=True, gc=False):
    """Ask for devices that may hold pages for another one.

    Fields:
        number: Its number, another one for each query.
        debtor: The device that lacks pages.
        pages: The least number of pages that a creditor must take.
        wanted: Pages that the debtor gives away if the creditor has room for them.
        path: Devices of the sequence's path, which cannot be creditors.
        refused: Devices that have refused this sequence's pages since it asked first.
    """

    number: int
    debtor: str
    pages: int
    wanted: int
    path: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


class PoolOffer(NamedTuple):
    """A device that may lend, and the pages that the manager believes it to have room for."""

    device: str
    room: int


class PoolAnswer(msgspec.Struct, frozen=True, gc=False):
    """Recommend creditors, the best first; none if the manager knows of none.

    Fields:
        number: Number of the query.
        offers: At most `runtime.pool.manager.MOST` of them.
        manager: Index of the manager that answers.
        age: Age in ns of the sorted list that it has read (IL-16).
    """

    number: int
    offers: tuple[PoolOffer, ...]
    manager: int = 0
    age: int = 0


class PoolDenial(msgspec.Struct, frozen=True, gc=False):
    """Report that a creditor has refused (IL-14)."""

    creditor: str


PoolCommand = PoolQuery | PoolDenial
