"""Choose a device for part of another device's sequences, with a copy of their blocks if it lacks them.

    replicate(spots, measure)     the best of the moves that the measure offers to devices with room for the copy

There are two measures of load:

    BySequences   number of sequences: half the difference moves to the device with the fewest
    ByBytes       sequences x the bytes that a step reads (`policy.routing.bytes_read`): all or half of the sequences
                  move to where the sequences of both devices then read the least in total

A device that has some of the blocks needs only the bytes that are missing (UN-04). Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

#: With `ByBytes`, the least share of both devices' bytes that a move must save: if weights must be loaded for it, and
#: if they are there already. In the second case a sequence loses a step or two, out of the hundreds that it still runs.
_GAIN, _MOVED = 0.1, 0.04


@dataclass(frozen=True, slots=True)
class ReplicaSpot:
    """Describe a device that could take part of another device's sequences.

    Fields:
        load: Its sequences.
        room: Bytes of weights that it can still take.
        more: Bytes that a copy needs; 0 if it has all blocks.
        reads: Bytes that a step reads now.
        adds: Bytes of weights that its steps would read in addition.
    """

    device: str
    load: float
    room: int
    more: int
    reads: float = 0.0
    adds: int = 0


@dataclass(frozen=True, slots=True)
class Replica:
    """Describe a move of `moves` sequences to a device, with a copy if it has none.

    Fields:
        rank: Smaller is better; of equals the first wins.
        gain: Share saved of what both devices' sequences read; 0 if not measured.
    """

    device: str
    moves: int
    rank: tuple[float | str, ...]
    gain: float = 0.0


class Measure(Protocol):
    """Define a measure of load."""

    def offers(self, spot: ReplicaSpot) -> Iterator[Replica]:
        """Yield the moves to a device that are worth making."""
        ...


def replicate(spots: Sequence[ReplicaSpot], measure: Measure) -> Replica | None:
    """Return the best move for one part of a chain on one device, or None if none is worthwhile or fits."""
    offers = (offer for spot in spots if spot.more <= spot.room for offer in measure.offers(spot))
    return min(offers, key=lambda offer: offer.rank, default=None)


@dataclass(frozen=True, slots=True)
class BySequences:
    """Measure load in sequences, for a device with `load` sequences, `share` of them on the part.

    Fields:
        margin: Difference between two devices that does not justify a copy.
    """

    load: float
    share: int
    margin: int

    def offers(self, spot: ReplicaSpot) -> Iterator[Replica]:
        """Yield a move of half the difference.

        The device with the fewest sequences ranks first, then that with the most blocks.
        """
        moves = min(self.share, int(self.load - spot.load) // 2)
        if self.load - spot.load > self.margin and moves:
            yield Replica(spot.device, moves, (spot.load, spot.more, spot.device))


@dataclass(frozen=True, slots=True)
class ByBytes:
    """Measure load in bytes read, for a device with `load` sequences and steps that read `reads` bytes.

    Fields:
        count: Sequences on the part.
        kv: Bytes of pages of each of them.
        weights: Bytes of blocks that only they use there.
    """

    load: float
    reads: float
    count: int
    kv: float
    weights: int

    def offers(self, spot: ReplicaSpot) -> Iterator[Replica]:
        """Yield moves of all or half of the sequences that save enough; the largest saving ranks first."""
        before = self.load * self.reads + spot.load * spot.reads
        for moves in dict.fromkeys((self.count, self.count // 2)):
            if moves:
                left = self.reads - moves * self.kv - (self.weights if moves == self.count else 0)
                here = (self.load - moves) * left
                there = (spot.load + moves) * (spot.reads + moves * self.kv + spot.adds)
                gain = (before - here - there) / before if before else 0.0
                if gain >= (_GAIN if spot.more else _MOVED):
                    yield Replica(spot.device, moves, (-gain,), gain)
