"""What a step of a device reads, as the measure of how long it takes; and where sequences go so that all steps
together read least.

A step that decodes is bound by memory: it reads the weights of each block that anybody on the device uses, once for
all of them, and everybody's K and V. A sequence gets a token per step, so what all of them wait is the sum over
devices of sequences x bytes read. A newcomer adds to that what it reads itself, and for everybody there the weights
that nobody there used before. Hence

    choose(...)     devices for the blocks of a newcomer: it goes where its blocks are in use already, until others are better off alone
    relieve(...)    whether part of a device's sequences should go to another one, which has what they use or gets a copy of it

so devices come to serve few foundations each, where counting sequences (`paths`, `demand`) mixes them. Prompts,
which are bound by computing, are not in it. Pure; bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: A change must save so much of what both devices' sequences read: where weights have to be loaded for it, and where
#: they are there already. Then it costs a sequence a step or two, of the hundreds that it has before it.
_GAIN, _MOVED = 0.1, 0.04


def choose(adds: Sequence[Mapping[str, float]], enters: Mapping[str, float], hop: float) -> tuple[str, ...] | None:
    """A device for each block, the cheapest path; of equals the one whose devices come first. None where a block has no
    candidate.

    Args:
        adds: per block and candidate what running it there adds, everybody there counted.
        enters: per device what a step there reads before: it is waited for whole at every change of device.
        hop: what a change of device costs beside.
    """
    if not adds or not all(adds):
        return None
    total = {device: enters[device] + add for device, add in adds[0].items()}
    came: list[dict[str, str]] = []
    for some in adds[1:]:
        cheapest = min(total, key=total.__getitem__)
        after: dict[str, float] = {}
        before: dict[str, str] = {}
        for device, add in some.items():
            stays, changes = total.get(device, math.inf), total[cheapest] + hop + enters[device]
            before[device] = device if stays <= changes else cheapest
            after[device] = min(stays, changes) + add
        total = after
        came.append(before)
    path = [min(total, key=total.__getitem__)]
    for before in reversed(came):
        path.append(before[path[-1]])
    return tuple(reversed(path))


@dataclass(frozen=True, slots=True)
class ReadShare:
    """Sequences of a device that use the same blocks: `count` of them, each with `kv` bytes of pages; `weights`: of
    blocks that nobody else there uses."""

    count: int
    kv: float
    weights: int


@dataclass(frozen=True, slots=True)
class ReadSpot:
    """A device that could take a copy. `reads`: bytes of a step now, for `load` sequences; `adds`: weights that it
    would read beside;
    `room`: bytes of weights it still takes, of which the copy needs `more`; 0 where it holds all of it."""

    device: str
    load: float
    reads: float
    adds: int
    room: int
    more: int


@dataclass(frozen=True, slots=True)
class Relief:
    """Put a copy there, if there is none; so many sequences go with it. `gain`: share of what both devices' sequences
    read that is saved."""

    device: str
    moves: int
    gain: float


def relieve(load: float, reads: float, share: ReadShare, spots: Sequence[ReadSpot]) -> Relief | None:
    """All or half of a share to one of the spots, whichever saves most; None where nothing saves enough."""
    best: Relief | None = None
    for spot in spots:
        if spot.more > spot.room:
            continue
        before = load * reads + spot.load * spot.reads
        for moves in dict.fromkeys((share.count, share.count // 2)):
            if not moves:
                continue
            here = (load - moves) * (reads - moves * share.kv - (share.weights if moves == share.count else 0))
            there = (spot.load + moves) * (spot.reads + moves * share.kv + spot.adds)
            gain = (before - here - there) / before if before else 0.0
            if gain >= (_GAIN if spot.more else _MOVED) and (best is None or gain > best.gain):
                best = Relief(spot.device, moves, gain)
    return best
