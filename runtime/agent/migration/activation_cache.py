"""Hidden states that came into this device's stages, kept so that blocks can be recomputed where they move to (BL-16).
Bounded.

Contract: by sequence and the component that they came before, in pieces as they came: a piece takes the place of all
that begins or lies behind its own beginning, as its row has written those pages again. Together never more than `limit`
bytes, what is around a piece included; the oldest pieces go first, whosever they are. So what is there of a sequence
may have gaps, at its beginning above all. Whoever leaves the device takes all of its own along. Nobody looks into the
numbers here; what is a view of something larger is copied, so that it does not keep that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from runtime.chains import Array
from runtime.policy.migration.two_ended import Spans

#: What a piece takes beside its bytes, about.
_AROUND = 256

#: Rows [first, last) of arrays, below each other.
Pieces = tuple[tuple[Array, int, int], ...]


@dataclass(slots=True)
class _CachedSpan:
    """Tokens [start, stop) of a sequence, the first rows of `array`. `number`: the older, the lower."""

    number: int
    start: int
    stop: int
    array: Array
    nbytes: int


class ActivationCache:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: dict[str, dict[int, deque[_CachedSpan]]] = {}
        self._ages: dict[int, tuple[str, int]] = {}  # whose piece, by its number: the oldest first
        self._count = 0
        self.nbytes = 0

    def __bool__(self) -> bool:
        """Whether anything is kept at all, here."""
        return self._limit > 0

    def __contains__(self, seq: str) -> bool:
        return seq in self._kept

    def store_span(self, seq: str, before: int, start: int, array: Array) -> None:
        """What came before component `before` for tokens from `start` on, [tokens, width]."""
        pieces = self._kept.setdefault(seq, {}).setdefault(before, deque())
        while pieces and pieces[-1].start >= start:
            self._evict_span(pieces.pop())
        if pieces and pieces[-1].stop > start:
            pieces[-1].stop = start
        nbytes = size_of(array) + _AROUND
        if nbytes <= self._limit:
            self._count += 1
            pieces.append(_CachedSpan(self._count, start, start + array.shape[0], _own(array), nbytes))
            self._ages[self._count] = seq, before
            self.nbytes += nbytes
            while self.nbytes > self._limit:
                self._evict()
        self._tidy(seq, before)

    def spans(self, seq: str, before: int) -> Spans:
        """Tokens [lo, hi) that are there, in order."""
        spans: list[tuple[int, int]] = []
        for piece in self._kept.get(seq, {}).get(before, ()):
            if spans and spans[-1][1] == piece.start:
                spans[-1] = (spans[-1][0], piece.stop)
            else:
                spans.append((piece.start, piece.stop))
        return tuple(spans)

    def pieces(self, seq: str, before: int, lo: int, hi: int) -> Pieces | None:
        """Of tokens [lo, hi), at least one; None unless all are there."""
        found: list[tuple[Array, int, int]] = []
        at = lo
        for piece in self._kept.get(seq, {}).get(before, ()):
            if piece.start <= at < min(piece.stop, hi):
                end = min(piece.stop, hi)
                found.append((piece.array, at - piece.start, end - piece.start))
                at = end
        return tuple(found) if at == hi and found else None

    def retain(self, seq: str, before: Collection[int]) -> None:
        """A sequence goes on here, with these stages: by their first components."""
        for each in [each for each in self._kept.get(seq, ()) if each not in before]:
            self.discard_spans(seq, each)

    def discard_spans(self, seq: str, before: int) -> None:
        for piece in self._kept.get(seq, {}).get(before, ()):
            self._evict_span(piece)
        self._kept.get(seq, {}).pop(before, None)
        if not self._kept.get(seq, True):
            del self._kept[seq]

    def close(self, seq: str) -> None:
        """A sequence leaves."""
        self.retain(seq, ())

    def check(self, seqs: Collection[str]) -> None:
        """Verify sizes, order and whose it is. Raises RuntimeError. For tests, after every event."""
        every = [
            (piece, (seq, before))
            for seq, stages in self._kept.items()
            for before, some in stages.items()
            for piece in some
        ]
        if {piece.number: whose for piece, whose in every} != self._ages or sum(
            piece.nbytes for piece, _ in every
        ) != self.nbytes:
            raise RuntimeError("inputs that are kept are not those that are counted")
        if self.nbytes > self._limit or not self._kept.keys() <= set(seqs):
            raise RuntimeError(
                f"inputs are kept beyond the limit, or for nobody: {sorted(self._kept.keys() - set(seqs))[:5]}"
            )
        for stages in self._kept.values():
            for some in stages.values():
                if not some or any(
                    a.stop > b.start or a.number >= b.number for a, b in zip(some, list(some)[1:], strict=False)
                ):
                    raise RuntimeError("inputs that are kept are out of order")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _evict(self) -> None:
        """The oldest piece goes: of its stage's pieces it is the first."""
        seq, before = self._ages[next(iter(self._ages))]
        self._evict_span(self._kept[seq][before].popleft())
        self._tidy(seq, before)

    def _evict_span(self, piece: _CachedSpan) -> None:
        del self._ages[piece.number]
        self.nbytes -= piece.nbytes

    def _tidy(self, seq: str, before: int) -> None:
        stages = self._kept.get(seq)
        if stages is not None and not stages.get(before, True):
            del stages[before]
            if not stages:
                del self._kept[seq]


def size_of(array: Array) -> int:
    """Bytes of an array."""
    return array.data.nbytes if isinstance(array.data, memoryview) else len(array.data)


def _own(array: Array) -> Array:
    """On the device that it is on, where it is no host's (`stages.Array`)."""
    data = array.data
    if isinstance(data, memoryview):
        return Array(array.dtype, array.shape, bytes(data))
    return Array(array.dtype, array.shape, data.clone()) if hasattr(data, "clone") else array
