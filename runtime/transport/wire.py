"""Messages and the arrays beside them as frames of bytes, and back. msgspec's tagged unions, arrays as they lie in
memory.

    frame 0     preamble: magic, protocol, number of the message on its link; then msgpack of (what the arrays are, the
                message)
    frame 1 …   an array each, or all of them back to back in one where they are small; none where arrays come directly
                (`directed`), which
                frame 0 says then, by a ticket

What arrays are is said once for all that are alike and neighbours: rows of one step mostly are.

Contract: nothing that comes in is trusted. Types, lengths of columns, number, kinds and sizes of arrays are checked
before anything is taken for what it says it is; whatever is wrong is a WireError and nothing else. Arrays go out
without a copy unless they are small and many, and come in as views of the frames, which may begin at any byte. No
pickle (see CVE-2025-32444 and its kin). Knows no sockets.
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

#: What bytes may be said to be: bytes of each element.
ITEM_BYTES = {"uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}
#: One frame at most; transports refuse larger ones before they take memory for them.
MAX_FRAME_BYTES = 1 << 30
#: Frame 0 at most.
MAX_MESSAGE_BYTES = 256 << 20
_MAX_DIMENSIONS = 4
#: Beside one message.
_MAX_ARRAYS = 1 << 20
#: Several arrays of so many bytes together are copied into one frame: a frame costs more than a copy of a few
#: kilobytes.
_JOINED_BYTES = 1 << 20
#: As many bytes as a message that says no more than "again" may have.
_AGAIN_BYTES = 64

_MAGIC = b"BZoo"
_PREAMBLE = struct.Struct("<4sHxxQ")

#: One frame. (`memoryview` takes whatever is bytes-like.)
Frame: TypeAlias = bytes | bytearray | memoryview


class OtherProtocol(WireError):
    """It comes from another version of these messages."""

    def __init__(self, theirs: int) -> None:
        super().__init__(f"it speaks protocol {theirs}, not {PROTOCOL}")


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message and what came beside it. `number`: of the messages of its link, from 0 on. `ticket`: under which its
    arrays come directly: they have no `data` here; None where they came with it."""

    number: int
    message: Message
    arrays: tuple[Array, ...]
    ticket: int | None = None


class _Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    arrays: tuple[tuple[str, tuple[int, ...], int], ...]
    message: ToAgent | ToScheduler | ToDriver | Delta


class _Announced(_Envelope, frozen=True, array_like=True, gc=False):
    """One whose arrays come directly."""

    ticket: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Announced)


# -- out ---------------------------------------------------------------------------------------------------------------


def encode(
    number: int, message: Message, arrays: Sequence[Array] = (), short: Message | None = None, ticket: int | None = None
) -> list[Frame]:
    """Frames of a message, in the words of `short` if there are any (`transport.delta`). What arrays hold must not
    change any more.

    `ticket`: under which the arrays go directly, at least one: only what they are is in the frames. Raises WireError
    for what the other side would refuse.
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
            _said_again(kinds, short.slot) if isinstance(short, ForwardRowsDelta) else _encoder.encode(envelope)
        )
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes is too large")
    if len(parts) > 1 and sum(map(len, parts)) <= _JOINED_BYTES:
        return [body, b"".join(parts)]
    return [body, *parts]


@lru_cache(maxsize=256)
def _said_again(kinds: tuple[tuple[str, tuple[int, ...], int], ...], slot: int) -> bytes:
    """A ForwardRowsDelta beside such arrays: the message of which there are most by far."""
    return _encoder.encode(_Envelope(kinds, ForwardRowsDelta(slot)))


def _kinds(arrays: Sequence[Array]) -> tuple[tuple[str, tuple[int, ...], int], ...]:
    """(dtype, shape, how many) of arrays that are alike, in their order."""
    if len(arrays) == 1:
        return ((arrays[0].dtype, arrays[0].shape, 1),)
    alike = groupby((each.dtype, each.shape) for each in arrays)
    return tuple((dtype, shape, sum(1 for _ in group)) for (dtype, shape), group in alike)


def _parts(arrays: Sequence[Array], kinds: Sequence[tuple[str, tuple[int, ...], int]]) -> list[memoryview]:
    """Bytes of each array. Raises WireError where they are not what they should be."""
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
    """Which of its link's messages it is; None where it is no message."""
    if not frames or len(frames[0]) < _PREAMBLE.size:
        return None
    magic, _, number = _PREAMBLE.unpack_from(frames[0])
    return int(number) if magic == _MAGIC else None


# -- in ----------------------------------------------------------------------------------------------------------------


def decode(frames: Sequence[Frame]) -> Parcel:
    """A message from its frames; its arrays are views of them. One in short is to be checked once it is there in full.

    Raises WireError, OtherProtocol among them.
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


@lru_cache(maxsize=256)
def _read_again(body: bytes) -> _Announced:
    """Few bytes are the same ones again, mostly: a ForwardRowsDelta. What is wrong raises anew each time."""
    return _decoder.decode(body)


def _arrays(kinds: Sequence[tuple[str, tuple[int, ...], int]], frames: Sequence[Frame]) -> tuple[Array, ...]:
    total = sum(_counted(count) for _, _, count in kinds)
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
    """Arrays that come directly: what they are."""
    if frames:
        raise WireError("its arrays come directly, and beside it")
    _require_announced(kinds, ticket)
    return tuple(Array(dtype, shape, None) for dtype, shape, count in kinds for _ in range(count))


def _require_announced(kinds: Sequence[tuple[str, tuple[int, ...], int]], ticket: int) -> None:
    """Raises WireError for arrays that cannot go directly: they are none, or more than a frame may hold."""
    total = sum(_counted(count) for _, _, count in kinds)
    nbytes = sum(_nbytes(dtype, shape) * count for dtype, shape, count in kinds)
    if ticket < 0 or total > _MAX_ARRAYS or not 0 < nbytes <= MAX_FRAME_BYTES:
        raise WireError(f"{total} arrays of {nbytes} bytes cannot come directly")


def nbytes_of(arrays: Sequence[Array]) -> int:
    """Bytes of arrays, by what they say that they are. Raises WireError for kinds and shapes that are none."""
    return sum(_nbytes(array.dtype, array.shape) for array in arrays)


def _cut(kinds: Sequence[tuple[str, tuple[int, ...], int]], whole: memoryview) -> tuple[Array, ...]:
    """Arrays that lie back to back."""
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


def _counted(count: int) -> int:
    if not 0 < count <= _MAX_ARRAYS:
        raise WireError("a number of arrays that is none")
    return count


@lru_cache(maxsize=1024)
def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array. Raises WireError for kinds and shapes that are none."""
    if dtype not in ITEM_BYTES:
        raise WireError("an array of a kind that is not in the table")
    if len(shape) > _MAX_DIMENSIONS or any(not 0 <= size <= MAX_FRAME_BYTES for size in shape):
        raise WireError("an array's shape is none")
    nbytes = ITEM_BYTES[dtype] * prod(shape)
    if nbytes > MAX_FRAME_BYTES:
        raise WireError(f"an array of {nbytes} bytes is too large")
    return nbytes


def _short(error: Exception) -> str:
    """Where a message is wrong: msgspec's own words (types and paths, never values), cut."""
    return f"{type(error).__name__}: {error}"[:200]
