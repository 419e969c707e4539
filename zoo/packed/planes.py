"""The arithmetic of packed tensors: elements against their base's, byte planes apart, each plane coded on its own. Lossless for any bytes.

A fine-tune's weight differs from its base's in the last places only. So the elements are read as unsigned integers of their width, the
base's are taken away (FM-Delta, ZipLLM), and byte k of every element is gathered in plane k: the high planes are almost all zero, the
low ones skewed. A plane is coded by zstd at a low level, where its Huffman coder does the work; what does not shrink is kept as it is.

    difference   element - base modulo 2^w, folded so that small ones of either sign have zero high bytes
    xor          element XOR base
    none         the element itself, without a base

A coded plane of 0 bytes is all zeros, one of as many bytes as there are elements is kept as it is, any other is a zstd frame.
This file knows nothing of files, digests or dtypes' meaning: only of their width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

Elements = NDArray[np.unsignedinteger[Any]]
Buffer = bytes | bytearray | memoryview

#: A plane that zstd leaves longer than this share is kept as it is: decoding it would take more time than its bytes are worth.
WORTH = 0.9
LEVELS = range(-7, 20)


def elements_of(data: Buffer, width: int) -> Elements:
    """A view of bytes as little-endian unsigned integers of 1, 2, 4 or 8 bytes."""
    return np.frombuffer(data, dtype=np.dtype(f"<u{width}"))


def empty(nbytes: int) -> memoryview:
    """Writable memory that is not cleared first."""
    return np.empty(nbytes, dtype=np.uint8).data


def encode(data: Buffer, base: Buffer | None, width: int, delta: str, level: int) -> list[bytes]:
    """The coded planes of some elements, lowest byte first. `base` has as many bytes; None only where `delta` is "none"."""
    elements = elements_of(data, width)
    changed = elements if base is None else _TAKEN[delta](elements, elements_of(base, width))
    bytewise = np.ascontiguousarray(changed).view(np.uint8).reshape(-1, width)
    coder = zstandard.ZstdCompressor(level=level)
    return [_coded(np.ascontiguousarray(bytewise[:, plane]), coder) for plane in range(width)]


def decode(planes: Sequence[Buffer], base: Buffer | None, delta: str, out: Elements) -> None:
    """Write the elements of coded planes into `out`, whose length and width say what they must be.

    Raises:
        ValueError: a plane cannot be decoded, or into another number of elements.
    """
    decoder = zstandard.ZstdDecompressor()
    found = [_plain(plane, len(out), decoder) for plane in planes]
    _interleave(found, out)
    if base is not None:
        _GIVEN_BACK[delta](out, elements_of(base, out.itemsize))


def _coded(plane: NDArray[np.uint8], coder: zstandard.ZstdCompressor) -> bytes:
    if not plane.any():
        return b""
    coded = coder.compress(plane.data)
    return coded if len(coded) <= WORTH * len(plane) else plane.tobytes()


def _plain(coded: Buffer, elements: int, decoder: zstandard.ZstdDecompressor) -> NDArray[np.uint8] | None:
    """A plane's bytes; None when all are zero."""
    if not len(coded):
        return None
    if len(coded) == elements:
        return np.frombuffer(coded, dtype=np.uint8)
    try:
        # The frame's own size is checked first: a damaged frame may not ask for memory at will.
        if zstandard.frame_content_size(coded) != elements:
            raise ValueError("a plane does not hold its chunk's elements")
        return np.frombuffer(decoder.decompress(coded), dtype=np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"a plane cannot be decoded: {error}") from error


def _interleave(planes: Sequence[NDArray[np.uint8] | None], out: Elements) -> None:
    """Planes to elements from the highest byte down: shifts and ors of whole elements run several times faster than strided bytes."""
    out[...] = 0 if planes[-1] is None else planes[-1]
    for plane in reversed(planes[:-1]):
        np.left_shift(out, 8, out=out)
        if plane is not None:
            np.bitwise_or(out, plane, out=out)


def _folded(elements: Elements, base: Elements) -> Elements:
    """Differences as 0, -1, 1, -2, 2 … -> 0, 1, 2, 3, 4 …"""
    change: Elements = np.subtract(elements, base)
    sign: Elements = np.right_shift(change, 8 * change.itemsize - 1)
    folded: Elements = np.left_shift(change, 1)
    np.negative(sign, out=sign)
    np.bitwise_xor(folded, sign, out=folded)
    return folded


def _unfold(out: Elements, base: Elements) -> None:
    sign: Elements = np.bitwise_and(out, 1)
    np.negative(sign, out=sign)
    np.right_shift(out, 1, out=out)
    np.bitwise_xor(out, sign, out=out)
    np.add(out, base, out=out)


def _unxor(out: Elements, base: Elements) -> None:
    np.bitwise_xor(out, base, out=out)


_TAKEN: Mapping[str, Callable[[Elements, Elements], Elements]] = {"difference": _folded, "xor": np.bitwise_xor}
_GIVEN_BACK: Mapping[str, Callable[[Elements, Elements], None]] = {"difference": _unfold, "xor": _unxor}
