"""Cache the hidden states that entered this device's stages, to recompute blocks where they move to (BL-16).

Hidden states are kept by sequence and by the component that they entered, in spans as they arrived.

- A new span replaces everything that begins at or behind its start, because its row has written those pages again.
- All spans together, bookkeeping included, take at most `limit` bytes. The oldest spans are evicted first, of any
  sequence, so the spans of a sequence may have gaps, mostly at its beginning.
- Closing a sequence discards its spans.
- A view of a larger array is copied, so that the larger array is not kept alive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from runtime.chains import Array
from runtime.policy.migration.two_ended import Spans

#: Approximate bookkeeping of a span, in bytes.
_AROUND = 256

#: (array, first, last): rows [first, last) of each array, concatenated in order.
Pieces = tuple[tuple[Array, int, int], ...]


@dataclass(slots=True)
class _CachedSpan:
    """Hidden states of tokens [start, stop) of a sequence: the first rows of `array`. Lower `number`: older."""

    number: int
    start: int
    stop: int
    array: Array
    nbytes: int


class ActivationCache:
    """The kept hidden states of one device, bounded to `limit` bytes; 0 keeps none."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: dict[str, dict[int, deque[_CachedSpan]]] = {}
        self._ages: dict[int, tuple[str, int]] = {}  # (sequence, component) by span number, oldest first
        self._count = 0
        self.nbytes = 0

    def __bool__(self) -> bool:
        """Return whether this device keeps hidden states at all."""
        return self._limit > 0

    def __contains__(self, seq: str) -> bool:
        return seq in self._kept

    def store_span(self, seq: str, before: int, start: int, array: Array) -> None:
        """Store the hidden states that entered component `before`, for tokens from `start` on: [tokens, width]."""
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
        """Return the token ranges [lo, hi) that are kept, in order."""
        spans: list[tuple[int, int]] = []
        for piece in self._kept.get(seq, {}).get(before, ()):
            if spans and spans[-1][1] == piece.start:
                spans[-1] = (spans[-1][0], piece.stop)
            else:
                spans.append((piece.start, piece.stop))
        return tuple(spans)

    def pieces(self, seq: str, before: int, lo: int, hi: int) -> Pieces | None:
        """Return the arrays that hold tokens [lo, hi); None unless all of them are kept. Requires lo < hi."""
        found: list[tuple[Array, int, int]] = []
        at = lo
        for piece in self._kept.get(seq, {}).get(before, ()):
            if piece.start <= at < min(piece.stop, hi):
                end = min(piece.stop, hi)
                found.append((piece.array, at - piece.start, end - piece.start))
                at = end
        return tuple(found) if at == hi and found else None

    def retain(self, seq: str, before: Collection[int]) -> None:
        """Discard a sequence's spans except those of stages that begin with one of these components."""
        for each in [each for each in self._kept.get(seq, ()) if each not in before]:
            self.discard_spans(seq, each)

    def discard_spans(self, seq: str, before: int) -> None:
        for piece in self._kept.get(seq, {}).get(before, ()):
            self._evict_span(piece)
        self._kept.get(seq, {}).pop(before, None)
        if not self._kept.get(seq, True):
            del self._kept[seq]

    def close(self, seq: str) -> None:
        """Discard all spans of a sequence."""
        self.retain(seq, ())

    def check(self, seqs: Collection[str]) -> None:
        """Verify sizes, order and owners of all spans. Raises RuntimeError. For tests, after every event."""
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
        """Evict the oldest span: the first one of its sequence and stage."""
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
    """Return the bytes of an array."""
    return array.data.nbytes if isinstance(array.data, memoryview) else len(array.data)


def _own(array: Array) -> Array:
    """Copy the data, on its device; bytes that are no view are returned as they are."""
    data = array.data
    if isinstance(data, memoryview):
        return Array(array.dtype, array.shape, bytes(data))
    return Array(array.dtype, array.shape, data.clone()) if hasattr(data, "clone") else array
