"""Attend to rows of which other devices hold pages: native calls of a debtor, one a layer (`csrc/exchange.c`).

A call sends a layer's questions, attends to what is here, receives the answers and merges. It runs by itself
(`NativeAway.attend`), or within `zoo_layers`, which goes on with the next layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_char, c_int, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.exchange import SPIN_NS, Decoding, DecodingData, HeadData, SocketData, SpinData, exchange_of
from runtime.engine.kernels.signatures import StepData
from runtime.loans import PacketPlace, PacketQuestion

#: Longest wait for an answer in one call; then Python looks whether its creditor is still there.
_LOOK_MS = 20


class _AskedData(ctypes.Structure):
    """`struct asked`."""

    _fields_ = (
        ("end", c_void_p), ("question", HeadData), ("answer", HeadData), ("rows", c_void_p), ("places", c_void_p),
        ("count", c_int64),
    )  # fmt: skip


class _AwayData(ctypes.Structure):
    """`struct away`."""

    _fields_ = (
        ("asked", c_void_p), ("count", c_int64), ("queries", c_void_p), ("narrow", c_int64), ("some", c_void_p),
        ("wide", c_void_p), ("here", DecodingData), ("places", c_void_p), ("own_values", c_void_p),
        ("own_sums", c_void_p), ("values", c_void_p), ("sums", c_void_p), ("parts", c_int64), ("out", c_void_p),
        ("packet", c_void_p), ("room", c_int64), ("length", c_int64), ("spin", c_void_p), ("ms", c_int64),
        ("threads", c_int64), ("sent", c_int64), ("attended", c_int64), ("received", c_int64),
        ("step_rows", c_void_p), ("step_queries", c_void_p), ("step_out", c_void_p), ("others", c_void_p),
        ("beside", c_int64),
    )  # fmt: skip


class AwayDone(NamedTuple):
    """What a native call has done of a layer's attention.

    Fields:
        sent: Questions that went out, the first ones.
        attended: Whether what is here was attended to.
        received: Answers that came, the first ones, and are in the room.
        packet: Another packet that came instead of the next answer.
        merged: Whether the result is there.
        beside: Whether the step's other rows have been attended to, chunks of prompts too.
    """

    sent: int = 0
    attended: bool = False
    received: int = 0
    packet: bytes | None = None
    merged: bool = False
    beside: bool = False


class RowParts(NamedTuple):
    """The rows of which one holder has a part.

    Fields:
        rows: Their numbers among the rows away.
        numbers: Of its part among the parts of each row.
    """

    rows: tuple[int, ...]
    numbers: tuple[int, ...]


class AskedQuestions:
    """What creditors are asked in one layer, as native code takes it.

    Args:
        parts: The rows of each question.
        ends: The connections, by creditor.
    """

    def __init__(
        self, questions: Sequence[PacketQuestion], parts: Sequence[RowParts], ends: Mapping[str, SocketData]
    ) -> None:
        self.questions = tuple(questions)
        self._alive = [torch.tensor(each, dtype=torch.int64) for each in parts], ends
        self._data = (_AskedData * len(self.questions))(
            *(
                _AskedData(
                    ctypes.addressof(ends[each.creditor]), HeadData.of_head(each.question),
                    HeadData.of_head(each.answer), numbers[0].data_ptr(), numbers[1].data_ptr(), len(numbers[0]),
                )
                for each, numbers in zip(self.questions, self._alive[0], strict=True)
            )
        )  # fmt: skip
        self.address = ctypes.addressof(self._data)


class AwayCall:
    """The native call of one layer.

    Attributes:
        asked: What creditors are asked in it.
        address: Of `struct away`.
    """

    def __init__(self, data: _AwayData, asked: AskedQuestions, alive: object, packet: memoryview) -> None:
        self.data, self.asked, self._alive, self._packet = data, asked, alive, packet
        self.address = ctypes.addressof(data)

    def attend_beside(self, others: StepData) -> None:
        """Within a step, attend to these other rows while the answers are under way."""
        self.data.others, self._others = ctypes.addressof(others), others

    def read_done(self) -> AwayDone:
        """Return what was done by a call that has left the rest."""
        data = self.data
        packet = None if data.length < 0 else bytes(self._packet[: data.length])
        return AwayDone(data.sent, bool(data.attended), data.received, packet, False, bool(data.beside))


class AwayCalls:
    """The native calls of the layers in which the same rows have the same parts away.

    Args:
        data: What is the same in all of them.
        here: Attention to what is here, in any layer.
    """

    def __init__(self, data: _AwayData, here: Decoding, alive: object, packet: memoryview) -> None:
        self._data, self._alive, self._packet = data, (here, alive), packet
        self._tables, self._stride = here.tables.data_ptr(), here.tables.stride(1) * 8
        self._layers = here.tables.shape[1] if here.tables.stride(2) == 1 else 0

    def has(self, layer: int) -> bool:
        """Return whether the page tables have this layer."""
        return 0 <= layer < self._layers

    def at_layer(self, layer: int, asked: AskedQuestions) -> AwayCall:
        """Return the call of a layer that the page tables have."""
        data = _AwayData.from_buffer_copy(self._data)
        data.here.pages.tables = self._tables + layer * self._stride
        data.asked, data.count = asked.address, len(asked.questions)
        return AwayCall(data, asked, self._alive, self._packet)


class NativeAway:
    """Makes native calls, and runs one by itself. For one thread.

    Attributes:
        ends: The connections to creditors, by their names.
    """

    def __init__(self, kernels: Kernels, room: int) -> None:
        self._run = kernels.lib.zoo_attend_away
        self._packet, self._scratch = (c_char * room)(), torch.empty(0, dtype=torch.float64)
        self._view = memoryview(self._packet).cast("B")
        self._spin = SpinData(SPIN_NS, SPIN_NS)
        self.ends: dict[str, SocketData] = {}

    def end_of(self, creditor: str) -> SocketData:
        """Return the connection to a creditor; it is that of all calls."""
        return self.ends.setdefault(creditor, SocketData())

    def point_to(self, places: Mapping[str, PacketPlace]) -> None:
        """Set where the next questions to these creditors go."""
        for creditor, (file, due, following) in places.items():
            end = self.end_of(creditor)
            end.file, end.due, end.next = file, due, following

    def calls(
        self, query: Tensor, here: Decoding, numbers: Sequence[int], rooms: tuple[Tensor, Tensor], rows: Tensor
    ) -> AwayCalls:
        """Return calls with float32 or bfloat16 queries like these [rows, heads, head_dim].

        Args:
            numbers: Of the part that is here, by row.
            rooms: Values and sums of the parts of all rows (`PartialAttention`).
            rows: The rows' numbers in a step [rows].
        """
        (values, sums), count, heads = rooms, query.numel(), query.shape[0] * query.shape[1]
        floats = -(-count // 2)  # in float64
        if self._scratch.numel() < count + 2 * heads + 4 * floats:
            self._scratch = torch.empty(count + 2 * heads + 4 * floats, dtype=torch.float64)
        own = self._scratch.data_ptr()
        first = own + 8 * (count + 2 * heads)
        some, wide, queries, out = range(first, first + 4 * 8 * floats, 8 * floats)
        places = torch.tensor(numbers, dtype=torch.int64)
        data = _AwayData(
            narrow=query.dtype == torch.bfloat16, some=some, wide=wide, here=here.data, places=places.data_ptr(),
            own_values=own, own_sums=own + 8 * count, values=values.data_ptr(), sums=sums.data_ptr(),
            parts=len(values), packet=ctypes.addressof(self._packet), room=len(self._packet),
            spin=ctypes.addressof(self._spin), ms=_LOOK_MS, threads=here.threads, step_rows=rows.data_ptr(),
            step_queries=queries, step_out=out,
        )  # fmt: skip
        return AwayCalls(data, here, (rooms, self._scratch, places, rows), self._view)

    def attend(self, call: AwayCall, query: Tensor, out: Tensor | None) -> AwayDone:
        """Attend in a layer with contiguous queries, after `point_to`.

        `out`: gets the merged result, contiguous float32; None: it is not merged.
        """
        data = call.data
        data.queries, data.out = query.data_ptr(), None if out is None else out.data_ptr()
        if self._run(byref(data)) == 0:
            return AwayDone(data.sent, True, data.received, None, out is not None)
        return call.read_done()


def native_away(kernels: Kernels, room: int) -> NativeAway | None:
    """Return native calls for packets of up to `room` bytes; None if there are none."""
    found = exchange_of(kernels)
    if found is None:
        return None
    found.zoo_attend_away.argtypes, found.zoo_attend_away.restype = (POINTER(_AwayData),), c_int
    return NativeAway(kernels, room)
