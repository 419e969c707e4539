"""Compute and verify digests of arrays that move between devices: the sender computes, the receiver verifies."""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from runtime.chains import Array


class ArrayChecksums:
    """Compute and verify BLAKE3 digests of arrays in host memory."""

    def sealed(self, to: str, pieces: Sequence[tuple[Array, int, int]] | Array) -> tuple[Array, str]:
        """Return the array to send to `to` and its digest.

        `pieces`: an array, or rows [first, last) of arrays to concatenate (`joined_rows`).
        """
        array = pieces if isinstance(pieces, Array) else joined_rows(pieces)
        return array, digest_of(array)

    def verified(self, array: Array, digest: str) -> bool:
        """Return whether an array matches its digest."""
        return digest_of(array) == digest


def joined_rows(pieces: Sequence[tuple[Array, int, int]]) -> Array:
    """Concatenate rows [first, last) of arrays [tokens, width]; at least one, all of one dtype and width."""
    parts = []
    for array, first, last in pieces:
        whole = memoryview(array.data).cast("B")
        row = whole.nbytes // array.shape[0]
        parts.append(whole[first * row : last * row])
    like = pieces[0][0]
    return Array(like.dtype, (sum(last - first for _, first, last in pieces), *like.shape[1:]), b"".join(parts))


def digest_of(array: Array) -> str:
    """Return the BLAKE3 digest of an array's bytes, in hexadecimal."""
    return blake3(array.data).hexdigest()
