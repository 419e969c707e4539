"""Packets of the side link without Python (`exchange.c`): wait for one, and answer questions that have come before.

A question to lent pages is the same in each step, byte for byte but for its queries and the number of its message. Once
Python has answered it, native code does, until any loan here changes (`NativeQuestions`). Python alone reads and checks
messages: native code compares bytes, and hands over whatever else comes.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char, c_char_p, c_float, c_int, c_int64, c_uint64, c_void_p
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.chains import Array
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.signatures import PagesData
from runtime.kv.pool import PageView
from runtime.loans import AnsweredQuestions, LoanQuery, PacketHead, PacketPlace, PacketQuestion

#: Longest time in ns that a wait for a packet spins.
_SPIN_NS = 200_000
#: Longest wait for an answer in one call; then Python looks whether its creditor is still there.
_LOOK_MS = 20
#: As in `exchange.c`.
_MOST_FILES, _MOST_HEAD = 256, 1024
_PACKET = 2
#: Most questions that are known at a time.
_MOST_KNOWN = 1024


class _Spin(ctypes.Structure):
    _fields_ = (("limit", c_int64), ("most", c_int64))


class _SocketData(ctypes.Structure):
    _fields_ = (("file", c_int64), ("due", c_uint64), ("next", c_uint64), ("answered", c_int64))


class DecodingData(ctypes.Structure):
    """`struct decoding`: attention of rows of one token each."""

    _fields_ = (
        ("lengths", c_void_p), ("rows", c_int64), ("heads", c_int64), ("kv_heads", c_int64), ("dim", c_int64),
        ("pages", PagesData), ("scale", c_float), ("cap", c_float),
    )  # fmt: skip


class _HeadData(ctypes.Structure):
    _fields_ = (("data", c_char_p), ("bytes", c_int64), ("number_at", c_int64))

    @classmethod
    def of_head(cls, head: PacketHead) -> _HeadData:
        return cls(head.data, len(head.data), head.number_at)


class _QuestionData(ctypes.Structure):
    _fields_ = (
        ("end", c_int64),
        ("head", _HeadData),
        ("answer", _HeadData),
        ("narrow", c_int64),
        ("how", DecodingData),
    )


class _AskedData(ctypes.Structure):
    _fields_ = (("end", _SocketData), ("question", _HeadData), ("answer", _HeadData), ("place", c_int64))


class _AwayData(ctypes.Structure):
    _fields_ = (
        ("asked", c_void_p), ("count", c_int64), ("queries", c_void_p), ("narrow", c_int64), ("wide", c_void_p),
        ("here", DecodingData), ("place", c_int64), ("values", c_void_p), ("sums", c_void_p), ("parts", c_int64),
        ("out", c_void_p), ("packet", c_void_p), ("room", c_int64), ("length", c_int64),
        ("spin", c_void_p), ("ms", c_int64), ("threads", c_int64), ("sent", c_int64), ("attended", c_int64),
        ("received", c_int64),
    )  # fmt: skip


class _AnswersData(ctypes.Structure):
    _fields_ = (
        ("ends", c_void_p), ("end_count", c_int64), ("known", c_void_p), ("known_count", c_int64), ("at", c_int64),
        ("others", c_void_p), ("other_count", c_int64), ("stamp", c_void_p), ("expected", c_int64),
        ("packet", c_void_p), ("room", c_int64), ("length", c_int64), ("source", c_int64), ("queries", c_void_p),
        ("made", c_void_p), ("spin", _Spin), ("ms", c_int64), ("threads", c_int64),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decoding:
    """Attention of rows of one token each over pages. Keeps its tensors alive.

    Fields:
        data: As native code takes it, with the tables of one layer.
        tables: Page ids [rows, layers, page sets].
        threads: How many compute it.
    """

    data: DecodingData
    tables: Tensor
    threads: int
    alive: tuple[Tensor, ...]

    @classmethod
    def over_pages(
        cls, view: PageView, tables: Tensor, lengths: Tensor, shape: tuple[int, int], terms: tuple[float, float],
        threads: int,
    ) -> Decoding:  # fmt: skip
        """Return attention to pages, with tokens of each row in `lengths`.

        `shape`: heads and their width; `terms`: the factor on scores, and their soft cap or 0.
        """
        pages = PagesData(
            view.k.data_ptr(), view.v.data_ptr(), view.k.stride(0), view.k.shape[1], tables.data_ptr(),
            tables.stride(0), view.k.dtype == torch.bfloat16,
        )  # fmt: skip
        data = DecodingData(lengths.data_ptr(), lengths.numel(), shape[0], view.k.shape[2], shape[1], pages, *terms)
        return cls(data, tables, threads, (view.k, view.v, lengths))

    def at_layer(self, layer: int) -> Decoding | None:
        """Return the same in another layer; None if the tables have no such layer."""
        if not 0 <= layer < self.tables.shape[1] or self.tables.stride(2) != 1:
            return None
        data = DecodingData.from_buffer_copy(self.data)
        data.pages.tables = self.tables.data_ptr() + layer * self.tables.stride(1) * 8
        return replace(self, data=data)


#: Attention that answers a query of decode steps, with such an array; None if native code cannot answer it.
DecodingOf = Callable[[LoanQuery, Array], Decoding | None]


def exchange_of(kernels: Kernels) -> ctypes.CDLL | None:
    """Return the kernels' library with the functions of `exchange.c`; None where they are missing."""
    found = kernels.lib
    if not hasattr(found, "zoo_receive") or sys.byteorder != "little":
        return None
    found.zoo_receive.argtypes = (c_int, c_void_p, c_int64, POINTER(_Spin), c_int)
    found.zoo_receive.restype = c_int64
    found.zoo_answer.argtypes, found.zoo_answer.restype = (POINTER(_AnswersData),), c_int
    found.zoo_attend_away.argtypes, found.zoo_attend_away.restype = (POINTER(_AwayData),), c_int
    found.zoo_change.argtypes, found.zoo_change.restype = (c_void_p,), None
    return found


class NativeReceiver:
    """`runtime.loans.PacketReceiver` with native code."""

    def __init__(self, found: ctypes.CDLL, room: int) -> None:
        self._receive = found.zoo_receive
        self._packet = (c_char * room)()
        self._view = memoryview(self._packet).cast("B")
        self._spin = _Spin(_SPIN_NS, _SPIN_NS)

    def receive(self, file: int, seconds: float) -> memoryview | None:
        length = self._receive(file, self._packet, len(self._packet), byref(self._spin), int(seconds * 1000))
        return None if length == -1 else self._view[: max(length, 0)]


class AwayDone(NamedTuple):
    """What a native call has done of a layer's attention.

    Fields:
        sent: Questions that went out, the first ones.
        attended: Whether what is here was attended to.
        received: Answers that came, the first ones, and are in the room.
        packet: Another packet that came instead of the next answer.
        merged: Whether the result is there.
    """

    sent: int = 0
    attended: bool = False
    received: int = 0
    packet: bytes | None = None
    merged: bool = False


class AskedQuestions:
    """Questions of one layer as native code takes them. `places`: the numbers of their parts in the room."""

    def __init__(self, questions: Sequence[PacketQuestion], places: Sequence[int]) -> None:
        self.questions = tuple(questions)
        self.data = (_AskedData * len(self.questions))(
            *(
                _AskedData(_SocketData(), _HeadData.of_head(each.question), _HeadData.of_head(each.answer), place)
                for each, place in zip(self.questions, places, strict=True)
            )
        )
        self.address, self.ends = ctypes.addressof(self.data), [one.end for one in self.data]


class AwayCalls:
    """The native calls of the layers in which the same rows have the same parts away: what is the same in all of them.

    Args:
        data: As native code takes it.
        here: Attention to what is here, in any layer.
    """

    def __init__(self, data: _AwayData, here: Decoding, alive: tuple[object, ...]) -> None:
        self.data, self._alive = data, (here, *alive)
        self._tables, self._stride = here.tables.data_ptr(), here.tables.stride(1) * 8
        self._layers = here.tables.shape[1] if here.tables.stride(2) == 1 else 0
        self._pages = data.here.pages

    def has(self, layer: int) -> bool:
        """Return whether the page tables have this layer."""
        return 0 <= layer < self._layers

    def point_to(self, layer: int) -> None:
        """Attend to a layer's pages from now on."""
        self._pages.tables = self._tables + layer * self._stride


class NativeAway:
    """Sends a layer's questions, attends to what is here, receives the answers and merges, in one native call."""

    def __init__(self, found: ctypes.CDLL, room: int) -> None:
        self._run = found.zoo_attend_away
        self._packet, self._wide = (c_char * room)(), torch.empty(0)
        self._view = memoryview(self._packet).cast("B")
        self._spin = _Spin(_SPIN_NS, _SPIN_NS)

    def calls(self, query: Tensor, here: Decoding, place: int, rooms: tuple[Tensor, Tensor]) -> AwayCalls:
        """Return calls with float32 or bfloat16 queries like these [rows, heads, head_dim].

        Args:
            place: The number of the part that is here.
            rooms: Values and sums of the parts of all rows (`PartialAttention`).
        """
        values, sums = rooms
        wide = self._wide = _at_least(self._wide, query.numel())
        data = _AwayData(
            narrow=query.dtype == torch.bfloat16, wide=wide.data_ptr(), here=here.data, place=place,
            values=values.data_ptr(), sums=sums.data_ptr(), parts=len(values), packet=ctypes.addressof(self._packet),
            room=len(self._packet), spin=ctypes.addressof(self._spin), ms=_LOOK_MS, threads=here.threads,
        )  # fmt: skip
        return AwayCalls(data, here, (rooms, wide))

    def attend(
        self, calls: AwayCalls, layer: int, asked: AskedQuestions, places: Sequence[PacketPlace], query: Tensor,
        out: Tensor | None,
    ) -> AwayDone:  # fmt: skip
        """Attend in a layer with contiguous queries.

        Args:
            places: Where the questions go.
            out: Gets the merged result, contiguous float32; None: it is not merged.
        """
        calls.point_to(layer)
        for end, (file, due, following) in zip(asked.ends, places, strict=True):
            end.file, end.due, end.next = file, due, following
        data = calls.data
        data.asked, data.count = asked.address, len(places)
        data.queries, data.out = query.data_ptr(), None if out is None else out.data_ptr()
        if self._run(byref(data)) == 0:
            return AwayDone(len(places), True, len(places), None, out is not None)
        packet = None if data.length < 0 else bytes(self._view[: data.length])
        return AwayDone(data.sent, bool(data.attended), data.received, packet)


class NativeQuestions:
    """`runtime.loans.KnownQuestions` with native code."""

    def __init__(self, found: ctypes.CDLL, room: int, decoding_of: DecodingOf) -> None:
        self._lib, self._stamp, self._decoding_of = found, c_int64(), decoding_of
        self._packet = (c_char * room)()
        self._known = (_QuestionData * _MOST_KNOWN)()
        self._alive: list[object] = []
        #: The ends and heads of all known questions.
        self._heads: set[tuple[int, bytes]] = set()
        self._queries, self._made = torch.empty(0), torch.empty(0, dtype=torch.float64)
        self._data = _AnswersData(
            known=ctypes.addressof(self._known), stamp=ctypes.addressof(self._stamp), room=room,
            packet=ctypes.addressof(self._packet), spin=_Spin(_SPIN_NS, _SPIN_NS), threads=1,
        )  # fmt: skip

    @property
    def stamp(self) -> int:
        return self._stamp.value

    def invalidate(self) -> None:
        self._lib.zoo_change(byref(self._stamp))

    def clear(self) -> None:
        self._data.known_count = 0
        self._alive.clear()
        self._heads.clear()

    def __len__(self) -> int:
        return int(self._data.known_count)

    def learn(
        self, end: int, question: PacketHead, answer: PacketHead, query: LoanQuery, array: Array, stamp: int
    ) -> None:
        data, decoding = self._data, self._decoding_of(query, array)
        if decoding is None or len(answer.data) > _MOST_HEAD or stamp != self.stamp:
            return
        if data.expected != stamp or len(self) >= _MOST_KNOWN:
            self.clear()
            data.expected = stamp
        if (end, question.data) in self._heads:
            return
        self._heads.add((end, question.data))
        how = decoding.data
        heads = how.rows * how.heads
        self._queries = _at_least(self._queries, heads * how.dim)
        self._made = _at_least(self._made, heads * (how.dim + 2))
        data.queries, data.made, data.threads = self._queries.data_ptr(), self._made.data_ptr(), decoding.threads
        heads_of = _HeadData.of_head(question), _HeadData.of_head(answer)
        self._known[len(self)] = _QuestionData(end, *heads_of, array.dtype == "bfloat16", how)
        self._alive.append((question, answer, decoding))
        data.known_count += 1

    def answer(self, ends: Sequence[PacketPlace], files: Sequence[int], seconds: float) -> AnsweredQuestions | None:
        if len(ends) + len(files) > _MOST_FILES:
            return None
        places = (_SocketData * len(ends))(*(_SocketData(*each) for each in ends))
        beside = (c_int64 * len(files))(*files)
        data = self._data
        data.ends, data.end_count, data.ms = ctypes.addressof(places), len(ends), int(seconds * 1000)
        data.others, data.other_count = ctypes.addressof(beside), len(files)
        status = self._lib.zoo_answer(byref(data))
        counts = tuple(int(each.answered) for each in places)
        if status != _PACKET:
            return AnsweredQuestions(counts)
        return AnsweredQuestions(counts, data.source, bytes(memoryview(self._packet).cast("B")[: data.length]))


def native_away(kernels: Kernels, room: int) -> NativeAway | None:
    """Return native code for packets of up to `room` bytes; None if there is none."""
    found = exchange_of(kernels)
    return None if found is None else NativeAway(found, room)


def _at_least(room: Tensor, count: int) -> Tensor:
    return room if room.numel() >= count else torch.empty(count, dtype=room.dtype)
