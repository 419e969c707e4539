"""Where part of a device's sequences goes, with a copy of what they use if the other device does not hold it: one
rule, two measures of load.

    replicate(spots, measure)     the best of all moves that the measure offers to a device with room for the copy

    BySequences   a device's load is its number of sequences: half the difference goes to the device with the fewest
    ByBytes       a device's load is its sequences x the bytes that a step reads (`policy.routing.bytes_read`): all or
                  half of the
                  part goes where all sequences of both devices then read least

What switching to another device costs is only the bytes that are not there already (UN-04). Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

#: By bytes a change must save so much of what both devices' sequences read: where weights have to be loaded for it, and
#: where they are there already. Then it costs a sequence a step or two, of the hundreds that it has before it.
_GAIN, _MOVED = 0.1, 0.04


@dataclass(frozen=True, slots=True)
class ReplicaSpot:
    """A device that could take part of another's sequences. `load`: its sequences; `room`: bytes of weights it still
    takes, of which a copy needs `more`, 0 where it holds all of it. `reads`: bytes of a step now; `adds`: weights that
    it would read beside."""

    device: str
    load: float
    room: int
    more: int
    reads: float = 0.0
    adds: int = 0


@dataclass(frozen=True, slots=True)
class Replica:
    """So many sequences go to a device, with a copy if it holds none. `rank`: of two the smaller is better, and of
    equals the first; `gain`: share of what both devices' sequences read that is saved, where that was measured."""

    device: str
    moves: int
    rank: tuple[float | str, ...]
    gain: float = 0.0


class Measure(Protocol):
    """What counts as load."""

    def offers(self, spot: ReplicaSpot) -> Iterator[Replica]:
        """Moves to a device that are worth their while."""
        ...


def replicate(spots: Sequence[ReplicaSpot], measure: Measure) -> Replica | None:
    """The best move for one part of a chain on one device; None where no device with room makes one worth its while."""
    offers = (offer for spot in spots if spot.more <= spot.room for offer in measure.offers(spot))
    return min(offers, key=lambda offer: offer.rank, default=None)


@dataclass(frozen=True, slots=True)
class BySequences:
    """A device with `load` sequences, `share` of them of the part. Less than `margin` between two devices is not worth
    a copy."""

    load: float
    share: int
    margin: int

    def offers(self, spot: ReplicaSpot) -> Iterator[Replica]:
        """Half the difference; the device with the fewest sequences first, of equals that where most of the blocks
        are."""
        moves = min(self.share, int(self.load - spot.load) // 2)
        if self.load - spot.load > self.margin and moves:
            yield Replica(spot.device, moves, (spot.load, spot.more, spot.device))


@dataclass(frozen=True, slots=True)
class ByBytes:
    """A device with `load` sequences, whose step reads `reads` bytes. The part has `count` of them, each with `kv`
    bytes of pages, and `weights` of blocks that no others there use."""

    load: float
    reads: float
    count: int
    kv: float
    weights: int

    def offers(self, spot: ReplicaSpot) -> Iterator[Replica]:
        """All of them or half, whichever saves enough; what saves most first."""
        before = self.load * self.reads + spot.load * spot.reads
        for moves in dict.fromkeys((self.count, self.count // 2)):
            if moves:
                left = self.reads - moves * self.kv - (self.weights if moves == self.count else 0)
                here = (self.load - moves) * left
                there = (spot.load + moves) * (spot.reads + moves * self.kv + spot.adds)
                gain = (before - here - there) / before if before else 0.0
                if gain >= (_GAIN if spot.more else _MOVED):
                    yield Replica(spot.device, moves, (-gain,), gain)
