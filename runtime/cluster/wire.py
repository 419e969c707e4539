"""Messages and the arrays beside them as frames of bytes, and back. msgspec's tagged unions, arrays as they lie in memory.

    frame 0     preamble: magic, protocol, number of the message on its link; then msgpack of (what the arrays are, the message)
    frame 1 …   an array each, or all of them back to back in one where they are small

What arrays are is said once for all that are alike and neighbours: rows of one step mostly are.

Contract: nothing that comes in is trusted. Types, lengths of columns, number, kinds and sizes of arrays are checked before anything is
taken for what it says it is; whatever is wrong is a WireError and nothing else. Arrays go out without a copy unless they are small and
many, and come in as views of the frames, which may begin at any byte. No pickle (see CVE-2025-32444 and its kin). Knows no sockets.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, repeat
from math import prod
from typing import Any, TypeAlias

import msgspec

from runtime.cluster.shorthand import PassAgain, Short
from runtime.messages import (
    PROTOCOL,
    Bid,
    Close,
    Done,
    Go,
    Load,
    Lost,
    Message,
    Offer,
    Open,
    Pages,
    Pass,
    Retract,
    ToAgent,
    ToDriver,
    ToScheduler,
    Verdict,
    Won,
)  # fmt: skip
from runtime.stages import Array

#: What bytes may be said to be: bytes of each element.
ITEM_BYTES = {"uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}
#: One frame at most; transports refuse larger ones before they take memory for them.
MAX_FRAME_BYTES = 1 << 30
#: Frame 0 at most.
MAX_MESSAGE_BYTES = 256 << 20
_MAX_DIMENSIONS = 4
#: Beside one message.
_MAX_ARRAYS = 1 << 20
#: Several arrays of so many bytes together are copied into one frame: a frame costs more than a copy of a few kilobytes.
_JOINED_BYTES = 1 << 20
#: As many bytes as a message that says no more than "again" may have.
_AGAIN_BYTES = 64

_MAGIC = b"BZoo"
_PREAMBLE = struct.Struct("<4sHxxQ")

#: One frame. (`memoryview` takes whatever is bytes-like.)
Frame: TypeAlias = bytes | bytearray | memoryview


class WireError(Exception):
    """What came is not a message, or contradicts itself. The text says in what, and holds nothing of what came."""


class OtherProtocol(WireError):
    """It comes from another version of these messages."""

    def __init__(self, theirs: int) -> None:
        super().__init__(f"it speaks protocol {theirs}, not {PROTOCOL}")


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message and what came beside it. `number`: of the messages of its link, from 0 on."""

    number: int
    message: Message
    arrays: tuple[Array, ...]


class _Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    arrays: tuple[tuple[str, tuple[int, ...], int], ...]
    message: ToAgent | ToScheduler | ToDriver | Short


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Envelope)


# -- out ---------------------------------------------------------------------------------------------------------------


def encode(number: int, message: Message, arrays: Sequence[Array] = (), short: Message | None = None) -> list[Frame]:
    """Frames of a message, in the words of `short` if there are any (`cluster.shorthand`). What arrays hold must not change any more.

    Raises WireError for what the other side would refuse.
    """
    if short is None:
        check(message, arrays)
    else:
        check_arrays(message, arrays)
    kinds = _kinds(arrays)
    parts = _parts(arrays, kinds)
    preamble = _PREAMBLE.pack(_MAGIC, PROTOCOL, number)
    body = preamble + (_said_again(kinds) if isinstance(short, PassAgain) else _encoder.encode(_Envelope(kinds, short or message)))  # type: ignore[arg-type]
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes is too large")
    if len(parts) > 1 and sum(map(len, parts)) <= _JOINED_BYTES:
        return [body, b"".join(parts)]
    return [body, *parts]


@lru_cache(maxsize=256)
def _said_again(kinds: tuple[tuple[str, tuple[int, ...], int], ...]) -> bytes:
    """A PassAgain beside such arrays: the message of which there are most by far."""
    return _encoder.encode(_Envelope(kinds, PassAgain()))


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
    arrays = _arrays(envelope.arrays, frames[1:])
    if not isinstance(envelope.message, Short):
        check(envelope.message, arrays)
    return Parcel(number, envelope.message, arrays)


def _envelope(body: memoryview) -> _Envelope:
    return _read_again(bytes(body)) if len(body) <= _AGAIN_BYTES else _decoder.decode(body)


@lru_cache(maxsize=256)
def _read_again(body: bytes) -> _Envelope:
    """Few bytes are the same ones again, mostly: a PassAgain. What is wrong raises anew each time."""
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
        out += [Array(dtype, shape, whole[lo : lo + size]) for lo in (range(at, end, size) if size else repeat(at, count))]
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


# -- what must hold of messages ------------------------------------------------------------------------------------------

#: Columns of one length.
_COLUMNS: dict[type[Message], tuple[str, ...]] = {
    Load: ("stages", "blocks"),
    Open: ("epochs", "requests", "outputs", "paths", "keep", "computed", "shared"),
    Close: ("seqs", "epochs"),
    Go: ("seqs", "epochs", "starts", "counts", "sample", "generated", "steps"),
    Pass: ("seqs", "epochs", "hops", "starts", "counts", "sample", "generated"),
    Done: ("seqs", "epochs", "counts", "sampled"),
    Lost: ("seqs", "epochs"),
    Verdict: ("seqs", "epochs", "turns", "stands", "cosines"),
    Offer: ("seqs", "epochs", "hops", "counts"),
    Bid: ("seqs", "epochs", "hops"),
    Retract: ("seqs", "epochs", "hops"),
    Won: ("seqs", "epochs", "hops", "starts", "counts", "devices"),
}
#: Columns that are as long as the first one of their message, or empty.
_PERHAPS: dict[type[Message], tuple[str, ...]] = {
    Open: ("ahead", "offers"),
    Go: ("turns", "ahead"),
    Pass: ("turns", "ahead"),
    Done: ("turns",),
}
#: Columns of numbers from 0 on.
_NATURAL = {
    Open: ("computed",),
    Go: ("starts", "counts", "generated", "steps", "turns"),
    Pass: ("hops", "starts", "counts", "generated", "turns"),
    Done: ("turns",),
    Verdict: ("turns",),
    Offer: ("hops", "counts"),
    Bid: ("hops",),
    Retract: ("hops",),
    Won: ("hops", "starts", "counts"),
}


def check(message: Message, arrays: Sequence[Array]) -> None:
    """Raises WireError for a message that contradicts itself or what is beside it."""
    kind = type(message)
    if len({len(getattr(message, name)) for name in _COLUMNS.get(kind, ())}) > 1:
        raise WireError(f"columns of a {kind.__name__} differ in length")
    if any(len(getattr(message, name)) not in (0, len(message.epochs)) for name in _PERHAPS.get(kind, ())):  # type: ignore[attr-defined]
        raise WireError(f"columns of a {kind.__name__} differ in length")
    if any(min(getattr(message, name), default=0) < 0 for name in _NATURAL.get(kind, ())):
        raise WireError(f"a {kind.__name__} with negative numbers")
    check_arrays(message, arrays)


def check_arrays(message: Message, arrays: Sequence[Array]) -> None:
    """As `check`, of a message whose columns are known to be right each for itself: they go on from one that was checked."""
    kind = type(message)
    if not _CHECKS.get(kind, _no_arrays)(message, arrays):
        raise WireError(f"a {kind.__name__} and its arrays or columns disagree")


def _no_arrays(message: Message, arrays: Sequence[Array]) -> bool:
    return not arrays


def _go(message: Go, arrays: Sequence[Array]) -> bool:
    return not arrays and sum(message.counts) == len(message.tokens) and len(message.turns) == len(message.ahead)


def _open(message: Open, arrays: Sequence[Array]) -> bool:
    """A predicted hop is one of the path, and not the last; one that is offered is one of the path, and not the first."""
    ahead = zip(message.ahead, message.paths, strict=False)
    offers = zip(message.offers, message.paths, strict=False)
    return (
        not arrays
        and all(each is None or 0 <= each.hop < len(path) - 1 for each, path in ahead)
        and all(0 < hop < len(path) and devices for some, path in offers for hop, devices in some)
    )


def _pass(message: Pass, arrays: Sequence[Array]) -> bool:
    """Hidden states [tokens, width] of one row or several, neither of them 0: no row claims tokens that nobody has sent bytes for."""
    if len(message.turns) != len(message.ahead) or 0 in message.counts:
        return False
    if any(len(each.shape) != 2 or 0 in each.shape for each in arrays):
        return False
    if len(arrays) == 1:
        return arrays[0].shape[0] == sum(message.counts)
    ends = set(accumulate(message.counts, initial=0))
    bounds = list(accumulate((each.shape[0] for each in arrays), initial=0))
    return bounds[-1] == sum(message.counts) and ends.issuperset(bounds)


def _pages(message: Pages, arrays: Sequence[Array]) -> bool:
    """Pages [groups x layers, page bytes], or hidden states [tokens, width], unless it says why not."""
    if message.error:
        return not arrays
    if message.before:
        return (
            len(arrays) == 1 and len(arrays[0].shape) == 2 and 0 < arrays[0].shape[0] == message.hi - message.lo and arrays[0].shape[1] > 0
        )
    return len(arrays) == 1 and arrays[0].dtype == "uint8" and len(arrays[0].shape) == 2


_CHECKS: dict[type[Message], Callable[..., bool]] = {Open: _open, Go: _go, Pass: _pass, Pages: _pages}
