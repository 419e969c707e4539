"""What the kernels read beside x: packed weights, adapters, KV pages, chunks of prompts, rows that advance by a token.

Each keeps alive the tensors whose addresses it passes to C.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.engine.kernels.signatures import MOST_PARTS, LowData, OnwardData, PartData

if TYPE_CHECKING:
    from runtime.engine.kernels.bindings import Kernels


#: `narrow` of `struct part`.
_FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
#: Rows of an int8 panel that hold its scales, behind those of its codes.
SCALE_ROWS = 4


class OnwardRows:
    """Rows of one token each that advance by one token per step.

    Args:
        lengths: tokens of each row [rows]; the kernel increments them.
        page_tokens: tokens in a page.
        layers: attention layers of the page tables.
        dim: values of an angle row.
    """

    def __init__(self, lengths: Tensor, page_tokens: int, layers: int, dim: int) -> None:
        rows = lengths.numel()
        self.lengths, self.pages, self.offsets = (
            lengths,
            torch.empty(layers, rows, dtype=torch.int64),
            torch.empty_like(lengths),
        )
        self.cosine, self.sine = torch.empty(rows, dim), torch.empty(rows, dim)
        self._data = OnwardData(
            lengths=lengths.data_ptr(), rows=rows, layers=layers, page_tokens=page_tokens, pages=self.pages.data_ptr(),
            offsets=self.offsets.data_ptr(), dim=dim, cosine=self.cosine.data_ptr(), sine=self.sine.data_ptr(),
        )  # fmt: skip
        self.address = ctypes.addressof(self._data)
        self._tables: Tensor | None = None
        self._angles: tuple[Tensor, Tensor] | None = None

    def lie(self, tables: Tensor) -> None:
        """Set the page tables [rows, layers, groups] that later steps read."""
        data = self._data
        if tables.shape[:2] != (data.rows, data.layers) or tables.dtype != torch.int64 or tables.stride(2) != 1:
            raise ValueError(f"tables {list(tables.shape)} are not of {data.rows} rows and {data.layers} layers")
        data.tables, data.table_stride, data.layer_stride, data.groups = (
            tables.data_ptr(),
            *tables.stride()[:2],
            tables.shape[2],
        )
        self._tables = tables

    def turn(self, angles: tuple[Tensor, Tensor]) -> None:
        """Set the rotary tables that later steps read: cos and sin [positions, dim]."""
        if angles is self._angles:
            return
        data, (cos, sin) = self._data, angles
        if any(each.shape[1] != data.dim or each.dtype != torch.float32 or not each.is_contiguous() for each in angles):
            raise ValueError(f"angles {list(cos.shape)} are not of {data.dim} values")
        data.cos_of, data.sin_of, data.positions = cos.data_ptr(), sin.data_ptr(), cos.shape[0]
        self._angles = angles


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """`count` tokens of one row.

    Fields:
        token: Index of the first one in the forward context.
        start: Position of the first one in its sequence.
        row: The row in the page tables.
        held: Tokens in the row's pages; None: those up to its last token.
    """

    token: int
    count: int
    start: int
    row: int
    held: int | None = None

    @property
    def length(self) -> int:
        """Tokens that its last token attends to."""
        end = self.start + self.count
        return end if self.held is None else min(end, self.held)


class PromptChunks:
    """Prompt chunks in the layout that the kernels read."""

    def __init__(self, chunks: Sequence[PromptChunk]) -> None:
        flat = [value for one in chunks for value in (one.token, one.count, one.start, one.row, one.length)]
        self._array = (c_int64 * len(flat))(*flat)
        self.address = ctypes.addressof(self._array)
        self.count = len(chunks)


class Widths:
    """The number of inputs and outputs of weights that read the same x."""

    def __init__(self, inputs: int, sizes: Sequence[int]) -> None:
        self.inputs, self.sizes, self.count = inputs, tuple(sizes), len(sizes)
        self.widths = (c_int64 * len(sizes))(*sizes)
        self.outputs = sum(sizes)


class Parts(Widths):
    """Packed weights that one call multiplies side by side. Keeps them alive.

    Args:
        packed: the weights, all float32 [panels, in, panel], all bfloat16 [panels, in / 2, panel, 2] or all int8
            [panels, in + 4, panel].
        sizes: the number of outputs of each.
        biases: [out] or None for each.
    """

    def __init__(self, packed: Sequence[Tensor], sizes: Sequence[int], biases: Sequence[Tensor | None]) -> None:
        if len({(weight.shape[1], weight.dtype) for weight in packed}) != 1 or any(
            bias is not None and bias.numel() != n for bias, n in zip(biases, sizes, strict=True)
        ):
            raise ValueError(
                "weights that are multiplied together read the same input, and a bias has a value per output"
            )
        #: Whether the weights are bfloat16.
        self.narrow = packed[0].dtype == torch.bfloat16
        #: Whether they are int8, which do not say what activations are rounded to.
        self.coded = packed[0].dtype == torch.int8
        rows = packed[0].shape[1]
        super().__init__(rows - SCALE_ROWS if self.coded else 2 * rows if self.narrow else rows, sizes)
        self._alive = (tuple(packed), tuple(biases))
        parts = [
            PartData(weight.data_ptr(), None if bias is None else bias.data_ptr(), size, _FORMS[weight.dtype])
            for weight, size, bias in zip(packed, sizes, biases, strict=True)
        ]
        self.array = (PartData * len(parts))(*parts)
        self.address = ctypes.addressof(self.array)


class Low:
    """One adapter on the weights of one `Parts`, packed. Keeps the packed matrices alive; `nbytes` counts them.

    Args:
        parts: at most four, one per weight: (a [rank, in], b [out, rank], bias [out] or None), or None where the
            adapter does not apply.

    Raises:
        ValueError: more than four.
    """

    def __init__(self, kernels: Kernels, parts: Sequence[tuple[Tensor, Tensor, Tensor | None] | None]) -> None:
        if len(parts) > MOST_PARTS:
            raise ValueError(f"an adapter lies on {MOST_PARTS} weights of a group at most")
        self._kernels = kernels
        there = [part for part in parts if part is not None]
        self._a = kernels.pack(torch.cat([a for a, _, _ in there])) if there else None
        self._b = [None if part is None else kernels.pack(part[1]) for part in parts]
        self._biases = [None if part is None or part[2] is None else part[2].contiguous() for part in parts]
        self._ranks = [0 if part is None else part[0].shape[0] for part in parts]
        self.struct = LowData(a=None if self._a is None else self._a.data_ptr(), ranks=sum(self._ranks))
        for at, (b, bias, rank) in enumerate(zip(self._b, self._biases, self._ranks, strict=True)):
            self.struct.rank[at] = rank
            self.struct.b[at], self.struct.bias[at] = (None if one is None else one.data_ptr() for one in (b, bias))

    @property
    def nbytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in (self._a, *self._b, *self._biases) if one is not None)

    def a(self, at: int) -> Tensor:
        """Return A [rank, in] on weight number `at`, unpacked into a new tensor."""
        if self._a is None:
            raise ValueError("an adapter without anything has no matrices")
        first = sum(self._ranks[:at])
        return self._kernels.unpack(self._a, sum(self._ranks))[first : first + self._ranks[at]]

    def b(self, at: int, outputs: int) -> Tensor:
        """Return B [out, rank] on weight number `at`, unpacked into a new tensor."""
        packed = self._b[at]
        if packed is None:
            raise ValueError("an adapter without anything has no matrices")
        return self._kernels.unpack(packed, outputs)

    def bias(self, at: int) -> Tensor | None:
        return self._biases[at]


class Lows:
    """Adapters in the order of a forward context's spans."""

    def __init__(self, lows: Sequence[Low]) -> None:
        self._alive = tuple(lows)
        self.array = (LowData * len(lows))(*(low.struct for low in lows))
        self.address = ctypes.addressof(self.array)


@dataclass(frozen=True, slots=True)
class Pool:
    """Pages of one geometry, as one layer reads them.

    Fields:
        k, v: [pages, page_tokens, kv_heads, head_dim].
        tables: Page ids of this layer [rows, groups].
    """

    k: Tensor
    v: Tensor
    tables: Tensor
