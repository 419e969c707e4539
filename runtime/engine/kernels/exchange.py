"""Packets of the side link without Python (`csrc/exchange.c`): wait for one, answer questions that have come before.

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

import torch
from torch import Tensor

from runtime.chains import Array
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.signatures import PagesData
from runtime.kv.pool import PageView
from runtime.loans import MOST_HEAD_BYTES, AnsweredQuestions, LoanQuery, PacketHead, PacketPlace

#: Longest time in ns that a wait for a packet spins.
SPIN_NS = 200_000
#: As in `csrc/exchange.c`.
_MOST_FILES = 256
_PACKET = 2
#: Most questions that are known at a time.
_MOST_KNOWN = 1024


class SpinData(ctypes.Structure):
    """`struct spin`."""

    _fields_ = (("limit", c_int64), ("most", c_int64))


class SocketData(ctypes.Structure):
    """`struct end`."""

    _fields_ = (("file", c_int64), ("due", c_uint64), ("next", c_uint64), ("answered", c_int64))


class DecodingData(ctypes.Structure):
    """`struct decoding`: attention of rows of one token each."""

    _fields_ = (
        ("lengths", c_void_p), ("rows", c_int64), ("heads", c_int64), ("kv_heads", c_int64), ("dim", c_int64),
        ("pages", PagesData), ("scale", c_float), ("cap", c_float),
    )  # fmt: skip


class HeadData(ctypes.Structure):
    """`struct head`."""

    _fields_ = (("data", c_char_p), ("bytes", c_int64), ("number_at", c_int64))

    @classmethod
    def of_head(cls, head: PacketHead) -> HeadData:
        return cls(head.data, len(head.data), head.number_at)


class _QuestionData(ctypes.Structure):
    _fields_ = (
        ("end", c_int64),
        ("head", HeadData),
        ("answer", HeadData),
        ("narrow", c_int64),
        ("how", DecodingData),
    )


class _AnswersData(ctypes.Structure):
    _fields_ = (
        ("ends", c_void_p), ("end_count", c_int64), ("known", c_void_p), ("known_count", c_int64), ("at", c_int64),
        ("others", c_void_p), ("other_count", c_int64), ("stamp", c_void_p), ("expected", c_int64),
        ("packet", c_void_p), ("room", c_int64), ("length", c_int64), ("source", c_int64), ("queries", c_void_p),
        ("made", c_void_p), ("spin", SpinData), ("ms", c_int64), ("threads", c_int64),
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
    """Return the kernels' library with the functions of `csrc/exchange.c`; None where they are missing."""
    found = kernels.lib
    if not hasattr(found, "zoo_receive") or sys.byteorder != "little":
        return None
    found.zoo_receive.argtypes = (c_int, c_void_p, c_int64, POINTER(SpinData), c_int)
    found.zoo_receive.restype = c_int64
    found.zoo_answer.argtypes, found.zoo_answer.restype = (POINTER(_AnswersData),), c_int
    found.zoo_change.argtypes, found.zoo_change.restype = (c_void_p,), None
    return found


class NativeReceiver:
    """`runtime.loans.PacketReceiver` with native code."""

    def __init__(self, found: ctypes.CDLL, room: int) -> None:
        self._receive = found.zoo_receive
        self._packet = (c_char * room)()
        self._view = memoryview(self._packet).cast("B")
        self._spin = SpinData(SPIN_NS, SPIN_NS)

    def receive(self, file: int, seconds: float) -> memoryview | None:
        length = self._receive(file, self._packet, len(self._packet), byref(self._spin), int(seconds * 1000))
        return None if length == -1 else self._view[: max(length, 0)]


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
            packet=ctypes.addressof(self._packet), spin=SpinData(SPIN_NS, SPIN_NS), threads=1,
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
        if decoding is None or len(answer.data) > MOST_HEAD_BYTES or stamp != self.stamp:
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
        heads_of = HeadData.of_head(question), HeadData.of_head(answer)
        self._known[len(self)] = _QuestionData(end, *heads_of, array.dtype == "bfloat16", how)
        self._alive.append((question, answer, decoding))
        data.known_count += 1

    def answer(self, ends: Sequence[PacketPlace], files: Sequence[int], seconds: float) -> AnsweredQuestions | None:
        if len(ends) + len(files) > _MOST_FILES:
            return None
        places = (SocketData * len(ends))(*(SocketData(*each) for each in ends))
        beside = (c_int64 * len(files))(*files)
        data = self._data
        data.ends, data.end_count, data.ms = ctypes.addressof(places), len(ends), int(seconds * 1000)
        data.others, data.other_count = ctypes.addressof(beside), len(files)
        status = self._lib.zoo_answer(byref(data))
        counts = tuple(int(each.answered) for each in places)
        if status != _PACKET:
            return AnsweredQuestions(counts)
        return AnsweredQuestions(counts, data.source, bytes(memoryview(self._packet).cast("B")[: data.length]))


def _at_least(room: Tensor, count: int) -> Tensor:
    return room if room.numel() >= count else torch.empty(count, dtype=room.dtype)
