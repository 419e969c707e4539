"""Which copies of K and V to drop because their sequence has others: the check once a minute (BL-27).

Contract: `sweep` drops a copy only if the same sequence has its authoritative copy on another device, under the same or
a later epoch; it never drops that one, nor one that somebody uses or moves (`leased`). A copy of an older epoch goes at
once, others when nobody has used them for `idle`. So what every sequence has computed is still there afterwards.

The paper names the period and no more; this is what the name asks for. Pure: copies and now in, what to drop out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: Nanoseconds between two checks (BlockLLM, section 7.1: one minute).
PERIOD = 60_000_000_000

#: Why a copy stays.
Kept = Literal["authoritative", "only", "leased", "used"]


@dataclass(frozen=True, slots=True)
class Copy:
    """A sequence's pages of one stage on a device. `used`: when last, nanoseconds. One copy of a sequence's stage is
    `authoritative`.
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
    """`dropped` copies hold `freed` pages; `kept` in the order given, each with its reason."""

    dropped: tuple[Copy, ...]
    freed: int
    kept: tuple[tuple[Copy, Kept], ...]


def due(last: int, now: int, period: int = PERIOD) -> bool:
    """Whether the next check's time has come."""
    return now - last >= period


def sweep(copies: Sequence[Copy], now: int, idle: int = 0) -> Sweep:
    """Which copies to drop now."""
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
