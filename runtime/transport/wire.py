"""Encode messages and their arrays to frames of bytes, and decode them.

    frame 0     preamble: magic, protocol, number of the message on its link; then msgpack of (kinds of the arrays,
                message), and a ticket if the arrays go over a direct link
    frame 1 …   one array each, or all of them back to back in one frame if they are small; none with a ticket

Neighbouring arrays with equal dtype and shape, usual for the rows of one step, share one entry (dtype, shape, count).

Received data is not trusted. Types, column lengths, and number, kinds and sizes of arrays are checked first; any fault
raises a WireError and nothing else. There is no pickle (see CVE-2025-32444 and similar).

Arrays are sent without a copy, unless they are several and small. Received arrays are views of the frames, which may
start at any byte. Does not depend on sockets.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, repeat
from math import prod
from typing import Any, TypeAlias

import msgspec

from runtime.chains import Array
from runtime.messages import PROTOCOL, Message, ToAgent, ToDriver, ToScheduler
from runtime.transport.delta import Delta, ForwardRowsDelta
from runtime.transport.validate import WireError, check, check_arrays

#: Accepted dtypes, with bytes per element.
ITEM_BYTES = {"uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}
#: Largest frame; transports refuse larger ones before they allocate memory.
MAX_FRAME_BYTES = 1 << 30
#: Largest frame 0.
MAX_MESSAGE_BYTES = 256 << 20
_MAX_DIMENSIONS = 4
#: Most arrays of one message.
_MAX_ARRAYS = 1 << 20
#: Several arrays up to this total are copied into one frame: a frame costs more than copying a few kilobytes.
_JOINED_BYTES = 1 << 20
#: Most bytes of a body that is looked up in the cache of decoded messages (`_read_again`).
_AGAIN_BYTES = 512

_MAGIC = b"BZoo"
_PREAMBLE = struct.Struct("<4sHxxQ")
#: Where the number is in frame 0.
NUMBER_AT = 8

Frame: TypeAlias = bytes | bytearray | memoryview


class OtherProtocol(WireError):
    """Raised for a message of another protocol version."""

    def __init__(self, theirs: int) -> None:
        super().__init__(f"it speaks protocol {theirs}, not {PROTOCOL}")


@dataclass(frozen=True, slots=True)
class Parcel:
    """Hold a decoded message.

    Fields:
        number: Number of the message on its link, from 0.
        arrays: Without `data` if there is a ticket.
        ticket: Number under which the arrays arrive over a direct link; None if they came with the message.
    """

    number: int
    message: Message
    arrays: tuple[Array, ...]
    ticket: int | None = None


class _Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    arrays: tuple[tuple[str, tuple[int, ...], int], ...]
    message: ToAgent | ToScheduler | ToDriver | Delta


class _Announced(_Envelope, frozen=True, array_like=True, gc=False):
    """Envelope with a ticket, for arrays that may go over a direct link."""

    ticket: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Announced)


# -- out ---------------------------------------------------------------------------------------------------------------


def encode(
    number: int, message: Message, arrays: Sequence[Array] = (), short: Message | None = None, ticket: int | None = None
) -> list[Frame]:
    """Encode a message to frames, as `short` if given (`transport.delta`). The arrays must not change any more.

    With a `ticket` there must be at least one array; only the kinds of the arrays are in the frames. Raises WireError
    for messages that the receiver would refuse.
    """
    if short is None:
        check(message, arrays)
    else:
        check_arrays(message, arrays)
    kinds = _kinds(arrays)
    preamble = _PREAMBLE.pack(_MAGIC, PROTOCOL, number)
    parts: list[memoryview] = []
    if ticket is not None:
        _require_announced(kinds, ticket)
        body = preamble + _encoder.encode(_Announced(kinds, short or message, ticket))  # type: ignore[arg-type]
    else:
        parts = _parts(arrays, kinds)
        envelope = _Envelope(kinds, short or message)  # type: ignore[arg-type]
        body = preamble + (
            _said_again(kinds, short.slot)
            if isinstance(short, ForwardRowsDelta) and not short.sent
            else _encoder.encode(envelope)
        )
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes is too large")
    if len(parts) > 1 and sum(map(len, parts)) <= _JOINED_BYTES:
        return [body, b"".join(parts)]
    return [body, *parts]


@lru_cache(maxsize=256)
def _said_again(kinds: tuple[tuple[str, tuple[int, ...], int], ...], slot: int) -> bytes:
    """Encode a ForwardRowsDelta beside such arrays; by far the most frequent message."""
    return _encoder.encode(_Envelope(kinds, ForwardRowsDelta(slot)))


def _kinds(arrays: Sequence[Array]) -> tuple[tuple[str, tuple[int, ...], int], ...]:
    """Return (dtype, shape, count) of each run of arrays with equal dtype and shape."""
    if len(arrays) == 1:
        return ((arrays[0].dtype, arrays[0].shape, 1),)
    alike = groupby((each.dtype, each.shape) for each in arrays)
    return tuple((dtype, shape, sum(1 for _ in group)) for (dtype, shape), group in alike)


def _parts(arrays: Sequence[Array], kinds: Sequence[tuple[str, tuple[int, ...], int]]) -> list[memoryview]:
    """Return the bytes of each array. Raises WireError if a size does not match dtype and shape."""
    sizes = [size for dtype, shape, count in kinds for size in repeat(_nbytes(dtype, shape), count)]
    return [_bytes_of(array.data, size) for array, size in zip(arrays, sizes, strict=True)]


def _bytes_of(data: Any, nbytes: int) -> memoryview:
    try:
        view = memoryview(data)
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
    except (TypeError, BufferError) as error:
        raise WireError(f"an array's data cannot be sent: {error}") from None
    if view.nbytes != nbytes:
        raise WireError(f"an array has {view.nbytes} bytes, and says {nbytes}")
    return view


def number_of(frames: Sequence[Frame]) -> int | None:
    """Return a message's number on its link; None if it is not a message."""
    if not frames or len(frames[0]) < _PREAMBLE.size:
        return None
    magic, _, number = _PREAMBLE.unpack_from(frames[0])
    return int(number) if magic == _MAGIC else None


# -- in ----------------------------------------------------------------------------------------------------------------


def decode(frames: Sequence[Frame]) -> Parcel:
    """Decode a message; its arrays are views of the frames.

    A message encoded as a difference is checked later, once it is complete. Raises WireError.
    """
    if not frames or not _PREAMBLE.size < len(frames[0]) <= MAX_MESSAGE_BYTES:
        raise WireError("it has no preamble, or is too large")
    magic, protocol, number = _PREAMBLE.unpack_from(frames[0])
    if magic != _MAGIC:
        raise WireError("it is no message of a cluster")
    if protocol != PROTOCOL:
        raise OtherProtocol(protocol)
    try:
        envelope = _envelope(memoryview(frames[0])[_PREAMBLE.size :])
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise WireError(f"it cannot be read: {_short(error)}") from None
    arrays = (
        _arrays(envelope.arrays, frames[1:])
        if envelope.ticket is None
        else _announced(envelope.arrays, envelope.ticket, frames[1:])
    )
    if not isinstance(envelope.message, Delta):
        check(envelope.message, arrays)
    return Parcel(number, envelope.message, arrays, envelope.ticket)


def _envelope(body: memoryview) -> _Announced:
    return _read_again(bytes(body)) if len(body) <= _AGAIN_BYTES else _decoder.decode(body)


@lru_cache(maxsize=1024)
def _read_again(body: bytes) -> _Announced:
    """Decode a short body, with a cache: most are the same ForwardRowsDelta or AttendLoans. Errors are not cached."""
    return _decoder.decode(body)


def _arrays(kinds: Sequence[tuple[str, tuple[int, ...], int]], frames: Sequence[Frame]) -> tuple[Array, ...]:
    total = _total(kinds)
    if total > 1 and len(frames) == 1:
        return _cut(kinds, memoryview(frames[0]))
    if total != len(frames):
        raise WireError(f"it says that there are {total} arrays, and there are {len(frames)}")
    said = [(dtype, shape) for dtype, shape, count in kinds for _ in range(count)]
    parts = [memoryview(frame) for frame in frames]
    if [part.nbytes for part in parts] != [_nbytes(dtype, shape) for dtype, shape in said]:
        raise WireError("its arrays are not what it says")
    return tuple(Array(dtype, shape, part) for (dtype, shape), part in zip(said, parts, strict=True))


def _announced(
    kinds: Sequence[tuple[str, tuple[int, ...], int]], ticket: int, frames: Sequence[Frame]
) -> tuple[Array, ...]:
    """Return arrays without data, which arrive over a direct link."""
    if frames:
        raise WireError("its arrays come directly, and beside it")
    _require_announced(kinds, ticket)
    return tuple(Array(dtype, shape, None) for dtype, shape, count in kinds for _ in range(count))


def _require_announced(kinds: Sequence[tuple[str, tuple[int, ...], int]], ticket: int) -> None:
    """Raise WireError for arrays that cannot go over a direct link: none, or larger than a frame may be."""
    total = _total(kinds)
    nbytes = sum(_nbytes(dtype, shape) * count for dtype, shape, count in kinds)
    if ticket < 0 or not 0 < nbytes <= MAX_FRAME_BYTES:
        raise WireError(f"{total} arrays of {nbytes} bytes cannot come directly")


def nbytes_of(arrays: Sequence[Array]) -> int:
    """Return the total bytes of arrays by dtype and shape. Raises WireError for invalid ones."""
    return sum(_nbytes(array.dtype, array.shape) for array in arrays)


def _cut(kinds: Sequence[tuple[str, tuple[int, ...], int]], whole: memoryview) -> tuple[Array, ...]:
    """Slice arrays that lie back to back in one frame."""
    nbytes = sum(_nbytes(dtype, shape) * count for dtype, shape, count in kinds)
    if nbytes != whole.nbytes:
        raise WireError(f"its arrays are {whole.nbytes} bytes, not {nbytes}")
    out: list[Array] = []
    at = 0
    for dtype, shape, count in kinds:
        size = _nbytes(dtype, shape)
        end = at + size * count
        out += [
            Array(dtype, shape, whole[lo : lo + size]) for lo in (range(at, end, size) if size else repeat(at, count))
        ]
        at = end
    return tuple(out)


def _total(kinds: Sequence[tuple[str, tuple[int, ...], int]]) -> int:
    """Return the number of arrays. Raises WireError if it is too large: arrays without elements take no bytes."""
    if any(count < 1 for _, _, count in kinds):
        raise WireError("a number of arrays that is none")
    total = sum(count for _, _, count in kinds)
    if total > _MAX_ARRAYS:
        raise WireError(f"{total} arrays are too many")
    return total


@lru_cache(maxsize=1024)
def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of an array. Raises WireError for an invalid dtype or shape."""
    if dtype not in ITEM_BYTES:
        raise WireError("an array of a kind that is not in the table")
    if len(shape) > _MAX_DIMENSIONS or any(not 0 <= size <= MAX_FRAME_BYTES for size in shape):
        raise WireError("an array's shape is none")
    nbytes = ITEM_BYTES[dtype] * prod(shape)
    if nbytes > MAX_FRAME_BYTES:
        raise WireError(f"an array of {nbytes} bytes is too large")
    return nbytes


def _short(error: Exception) -> str:
    """Return msgspec's message (types and paths, never values), cut to 200 characters."""
    return f"{type(error).__name__}: {error}"[:200]
