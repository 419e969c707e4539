"""The arithmetic of packed tensors: differences of elements, split into byte planes, each coded separately. Lossless.

A fine-tune's weight differs from its base's in the last bits only. So the elements are read as unsigned integers of
their width, the base's are subtracted (FM-Delta, ZipLLM), and byte k of every element is gathered in plane k: the high
planes are almost all zero, the low ones noise. A plane is coded by zstd, where Huffman coding does most of the work; a
plane that hardly shrinks is kept as it is (ZipNN).

    difference   element - base modulo 2^w, in digits of base 256 from -128 to 127: small ones of either sign have zero
                 high digits
    xor          element XOR base
    none         the element itself, without a base

A coded plane of 0 bytes is all zeros, one of as many bytes as there are elements is uncompressed, any other is a zstd
frame. This module does not depend on files or digests; of a dtype it uses only the width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

Elements = NDArray[np.unsignedinteger[Any]]
Buffer = bytes | bytearray | memoryview

#: A plane that zstd leaves longer than this share is kept uncompressed: decoding it would cost more than its bytes
#: save.
WORTH = 0.85


def elements_of(data: Buffer, width: int) -> Elements:
    """Return a view of bytes as little-endian unsigned integers of 1, 2, 4 or 8 bytes."""
    return np.frombuffer(data, dtype=np.dtype(f"<u{width}"))


def empty(nbytes: int) -> memoryview:
    """Return writable, uninitialised memory."""
    return np.empty(nbytes, dtype=np.uint8).data


def encode(data: Buffer, base: Buffer | None, width: int, delta: str, level: int) -> list[bytes]:
    """Return the coded planes of some elements, lowest byte first.

    `base` has as many bytes as `data`; it is None only if `delta` is "none".
    """
    elements = elements_of(data, width)
    changed = _taken(elements, None if base is None else elements_of(base, width), delta)
    bytewise = np.ascontiguousarray(changed).view(np.uint8).reshape(-1, width)
    return [_coded(np.ascontiguousarray(bytewise[:, plane]), level) for plane in range(width)]


class Decoder:
    """Decodes planes; used by one thread at a time."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor()

    def decode(self, planes: Sequence[Buffer], base: Buffer | None, delta: str, out: Elements) -> None:
        """Decode planes and write their elements into `out`; its length and width are the expected ones.

        Raises:
            ValueError: A plane cannot be decoded, or gives another number of elements.
        """
        _interleave([self._plain(plane, len(out)) for plane in planes], out, signed=delta == "difference")
        if base is not None:
            _GIVEN_BACK[delta](out, elements_of(base, out.itemsize), out=out)

    def _plain(self, coded: Buffer, elements: int) -> NDArray[np.uint8] | None:
        """Return a plane's bytes; None if all are zero."""
        if not len(coded):
            return None
        if len(coded) == elements:
            return np.frombuffer(coded, dtype=np.uint8)
        try:
            # Check the frame's declared size first, so that a damaged frame cannot request unbounded memory.
            if zstandard.frame_content_size(coded) != elements:
                raise ValueError("a plane does not hold its chunk's elements")
            return np.frombuffer(self._zstd.decompress(coded), dtype=np.uint8)
        except zstandard.ZstdError as error:
            raise ValueError(f"a plane cannot be decoded: {error}") from error


def _coded(plane: NDArray[np.uint8], level: int) -> bytes:
    if not plane.any():
        return b""
    coded = min(
        (zstandard.ZstdCompressor(compression_params=way).compress(plane.data) for way in _ways(level)), key=len
    )
    return coded if len(coded) <= WORTH * len(plane) else plane.tobytes()


@cache
def _ways(level: int) -> tuple[zstandard.ZstdCompressionParameters, ...]:
    """Return the two zstd settings to try.

    The first uses almost only Huffman codes: smaller and faster to decode for skewed noise. The second is zstd's
    default for the level, for sparse planes.
    """
    entropy = zstandard.ZstdCompressionParameters(
        window_log=17,
        hash_log=6,
        chain_log=6,
        search_log=1,
        min_match=7,
        target_length=0,
        strategy=zstandard.STRATEGY_FAST,
    )
    return entropy, zstandard.ZstdCompressionParameters.from_level(level)


def _interleave(planes: Sequence[NDArray[np.uint8] | None], out: Elements, signed: bool) -> None:
    """Combine planes into elements from the highest byte down, each byte a digit with or without a sign.

    Shifts and additions of whole elements run several times faster than strided bytes.
    """
    digit, whole = (np.int8, out.view(f"<i{out.itemsize}")) if signed else (np.uint8, out)
    whole[...] = 0 if planes[-1] is None else planes[-1].view(digit)
    for plane in reversed(planes[:-1]):
        np.left_shift(whole, 8, out=whole)
        if plane is not None:
            np.add(whole, plane.view(digit), out=whole)


def _taken(elements: Elements, base: Elements | None, delta: str) -> Elements:
    """Return the elements minus (or XOR) their base's, in the form of which the bytes are the digits."""
    if base is None:
        return elements
    if delta == "xor":
        return np.bitwise_xor(elements, base)
    # Adding 128 to every digit avoids borrows between digits; the XOR then takes the 128 off each digit separately.
    middle = elements.dtype.type(int.from_bytes(b"\x80" * elements.itemsize, "little"))
    return np.bitwise_xor(np.add(np.subtract(elements, base), middle), middle)


_GIVEN_BACK: Mapping[str, np.ufunc] = {"difference": np.add, "xor": np.bitwise_xor}
