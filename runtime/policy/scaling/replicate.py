"""Where what is asked for most gets another copy while devices have room: demand-driven instances behind `packing`.

    widen(load, share, spots, margin)     from a device with `load` sequences, `share` of them of one part of a chain, to which other one

A copy pays where the other device has so much less to do that handing over some of the part's sequences leaves both
with less than the
first has now: the copy goes to the device with the fewest sequences, of equals to where most of its blocks are
already (what switching there costs is only the bytes that are not shared: UN-04), and half the difference goes with
it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaSpot:
    """A device that could take a copy. `load`: sequences; `room`: bytes of weights; `more`: bytes that it needs beside
    what is there.
    """

    device: str
    load: float
    room: int
    more: int


@dataclass(frozen=True, slots=True)
class Widened:
    """Put a copy there; so many sequences go with it."""

    device: str
    moves: int


def widen(load: float, share: int, spots: Sequence[ReplicaSpot], margin: int) -> Widened | None:
    """Choose for one part of a chain on one device; None where no device with room has more than `margin` sequences
    less, or too few of the part's would go."""
    fitting = [spot for spot in spots if spot.more <= spot.room and load - spot.load > margin]
    best = min(fitting, key=lambda spot: (spot.load, spot.more, spot.device), default=None)
    if best is None:
        return None
    moves = min(share, int(load - best.load) // 2)
    return Widened(best.device, moves) if moves else None
