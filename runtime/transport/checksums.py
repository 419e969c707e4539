"""Arrays that move between devices carry a digest of their bytes: made by the sender, verified by the receiver."""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from runtime.chains import Array


class ArrayChecksums:
    """Arrays that move from device to device, each with a digest of its bytes: BLAKE3, in the host's memory."""

    def sealed(self, to: str, pieces: Sequence[tuple[Array, int, int]] | Array) -> tuple[Array, str]:
        """What goes to `to`, and its digest: an array, or rows [first, last) of arrays below each other
        (`joined_rows`).
        """
        array = pieces if isinstance(pieces, Array) else joined_rows(pieces)
        return array, digest_of(array)

    def verified(self, array: Array, digest: str) -> bool:
        """Whether it is what was sealed."""
        return digest_of(array) == digest


def joined_rows(pieces: Sequence[tuple[Array, int, int]]) -> Array:
    """Rows [first, last) of arrays [tokens, width] below each other; there is at least one. All are of one dtype and
    width.
    """
    parts = []
    for array, first, last in pieces:
        whole = memoryview(array.data).cast("B")
        row = whole.nbytes // array.shape[0]
        parts.append(whole[first * row : last * row])
    like = pieces[0][0]
    return Array(like.dtype, (sum(last - first for _, first, last in pieces), *like.shape[1:]), b"".join(parts))


def digest_of(array: Array) -> str:
    """BLAKE3 of an array's bytes, in hexadecimal."""
    return blake3(array.data).hexdigest()
