"""Choose duplicate copies of K and V to drop, in a check once per minute (BL-27).

`sweep` drops a copy only if the same sequence has its authoritative copy on another device, under the same or a later
epoch. It never drops the authoritative copy, nor one in use or migrating (`leased`). A copy of an older epoch is
dropped at once, a current one when it has not been used for `idle`. So the computed tokens of every sequence stay.

The paper only gives the name and the period; the rules are this project's. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: Nanoseconds between two checks (BlockLLM, section 7.1: one minute).
PERIOD = 60_000_000_000

#: Why a copy is kept.
Kept = Literal["authoritative", "only", "leased", "used"]


@dataclass(frozen=True, slots=True)
class Copy:
    """Describe a sequence's pages of one stage on a device. One copy per sequence and stage is `authoritative`.

    Fields:
        pages: Number of pages.
        leased: In use or migrating.
        used: Time of last use, in ns.
    """

    seq: str
    stage: str
    device: str
    pages: int
    epoch: int
    authoritative: bool
    leased: bool
    used: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """Hold the dropped copies with the number of pages freed, and the kept ones with the reason for each."""

    dropped: tuple[Copy, ...]
    freed: int
    kept: tuple[tuple[Copy, Kept], ...]


def due(last: int, now: int, period: int = PERIOD) -> bool:
    """Return whether it is time for the next check."""
    return now - last >= period


def sweep(copies: Sequence[Copy], now: int, idle: int = 0) -> Sweep:
    """Choose the copies to drop now."""
    owners = {(each.seq, each.stage): each for each in copies if each.authoritative}
    dropped: list[Copy] = []
    kept: list[tuple[Copy, Kept]] = []
    for each in copies:
        why = _why_kept(each, owners.get((each.seq, each.stage)), now, idle)
        if why is None:
            dropped.append(each)
        else:
            kept.append((each, why))
    return Sweep(tuple(dropped), sum(each.pages for each in dropped), tuple(kept))


def _why_kept(copy: Copy, owner: Copy | None, now: int, idle: int) -> Kept | None:
    if copy.authoritative:
        return "authoritative"
    if owner is None or owner.device == copy.device or owner.epoch < copy.epoch:
        return "only"
    if copy.leased:
        return "leased"
    return "used" if copy.epoch == owner.epoch and now - copy.used < idle else None
