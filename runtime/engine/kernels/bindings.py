"""The compiled kernels as functions of tensors: check shapes, pass addresses and strides to C.

Activations are float32 on a CPU; weights, K and V are float32 or bfloat16. One `Kernels` exists per device. It keeps no
state between calls; a call writes to a new tensor, or in place where its name ends with an underscore or it takes
`out`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.engine.kernels.build import PATHS, Build, NoKernels, library


class _Part(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("n", c_int64), ("narrow", c_int64))


class _Pages(ctypes.Structure):
    _fields_ = (
        ("k", c_void_p), ("v", c_void_p), ("page_stride", c_int64), ("page_tokens", c_int64), ("tables", c_void_p),
        ("table_stride", c_int64), ("narrow", c_int64),
    )  # fmt: skip


#: Maximum heads of a layer and width of a head in the kernels' attention, which keeps them on a thread's stack.
MOST_HEADS, MOST_WIDTH = 1024, 1024

#: Maximum number of weights in a group with the same input that an adapter covers at once.
_MOST_PARTS = 4


class _Low(ctypes.Structure):
    _fields_ = (
        ("a", c_void_p), ("ranks", c_int64), ("b", c_void_p * _MOST_PARTS), ("bias", c_void_p * _MOST_PARTS),
        ("rank", c_int64 * _MOST_PARTS),
    )  # fmt: skip


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "zoo_panel": (),
    "zoo_products": (),
    "zoo_multiply_add": (c_int64, c_int, c_int),
    "zoo_read": (c_void_p, c_int64, c_int),
    "zoo_pack": (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_int),
    "zoo_unpack": (c_void_p, c_int64, c_int64, c_void_p, c_int),
    "zoo_pack_narrow": (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_int),
    "zoo_unpack_narrow": (c_void_p, c_int64, c_int64, c_void_p, c_int),
    "zoo_round": (c_void_p, c_int64, c_int),
    "zoo_linear": (c_void_p, c_int64, c_int64, c_void_p, c_int, c_int, c_void_p, c_void_p, c_int),
    "zoo_stored": (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int),
    "zoo_gate": (c_void_p, c_int64, c_int64, c_void_p, c_int),
    "zoo_adapt": (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int, c_void_p, c_int),
    "zoo_norm": (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_float, c_void_p, c_int64, c_int),
    "zoo_rotate": (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int),
    "zoo_keep": (
        c_void_p,
        c_void_p,
        *[c_int64] * 4,
        c_void_p,
        c_void_p,
        c_int64,
        c_void_p,
        c_void_p,
        c_int64,
        c_int,
        c_int,
    ),
    "zoo_decode": (
        c_void_p,
        c_int64,
        c_void_p,
        c_void_p,
        c_void_p,
        *[c_int64] * 4,
        c_void_p,
        c_int64,
        c_float,
        c_float,
        c_void_p,
        c_int,
    ),
    "zoo_chunks": (c_void_p, c_int64, c_void_p, *[c_int64] * 4, c_void_p, c_int64, c_float, c_float, c_void_p, c_int),
    "zoo_layers": (c_void_p, c_void_p, c_int64, c_void_p, c_int),
    "zoo_onward": (c_void_p,),
    "zoo_argmax": (c_void_p, c_int64, c_int64, c_void_p, c_int),
}
_RETURNS: dict[str, Any] = {
    "zoo_panel": c_int64,
    "zoo_products": c_int64,
    "zoo_multiply_add": c_double,
    "zoo_read": c_int64,
    "zoo_linear": c_int,
    "zoo_stored": c_int,
    "zoo_decode": c_int,
    "zoo_chunks": c_int,
    "zoo_adapt": c_int,
    "zoo_layers": c_int,
    "zoo_onward": c_int,
}

_PLAIN, _GATED_SILU = 0, 1

#: Why a path cannot be used.
_MISSING = {
    "avx512": "this processor, or the compiler, has no AVX512-BF16",
    "amx": "this processor or its system has no AMX-BF16",
}
_WRONG = "the tile unit (AMX-BF16) gives other bits than its description"


class Half(ctypes.Structure):
    """`struct half`: half a layer. Only `layer` and the adapters change between calls."""

    _fields_ = (
        ("kind", c_int64),
        ("width", c_int64),
        ("norm", c_void_p),
        ("in_parts", c_void_p),
        ("out_parts", c_void_p),
        ("in_count", c_int64),
        ("in_total", c_int64),
        ("out_inputs", c_int64),
        ("in_sizes", c_void_p),
        ("out_sizes", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("window", c_int64),
        ("layer", c_int64),
        ("in_lows", c_void_p),
        ("out_lows", c_void_p),
        ("eps", c_float),
        ("q_eps", c_float),
        ("k_eps", c_float),
        ("scale", c_float),
        ("narrow", c_int64),
    )


class StepData(ctypes.Structure):
    """`struct step`: what the rows of a step have in common."""

    _fields_ = (
        ("rows", c_int64),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("k_pool", c_void_p),
        ("v_pool", c_void_p),
        ("page_stride", c_int64),
        ("page_tokens", c_int64),
        ("token_pages", c_void_p),
        ("token_offsets", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("layer_stride", c_int64),
        ("lengths", c_void_p),
        ("bounds", c_void_p),
        ("adapters", c_int64),
        ("normed", c_void_p),
        ("wide", c_void_p),
        ("made", c_void_p),
        ("narrow", c_int64),
    )


class OnwardData(ctypes.Structure):
    """`struct onward`: rows of one token each, and where the K, V and angles of their next tokens are."""

    _fields_ = (
        ("lengths", c_void_p),
        ("rows", c_int64),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("layer_stride", c_int64),
        ("layers", c_int64),
        ("groups", c_int64),
        ("page_tokens", c_int64),
        ("pages", c_void_p),
        ("offsets", c_void_p),
        ("cos_of", c_void_p),
        ("sin_of", c_void_p),
        ("positions", c_int64),
        ("dim", c_int64),
        ("cosine", c_void_p),
        ("sine", c_void_p),
    )


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
    """

    token: int
    count: int
    start: int
    row: int


class PromptChunks:
    """Prompt chunks in the layout that the kernels read."""

    def __init__(self, chunks: Sequence[PromptChunk]) -> None:
        flat = [value for one in chunks for value in (one.token, one.count, one.start, one.row)]
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
        packed: the weights, all float32 [panels, in, panel] or all bfloat16 [panels, in / 2, panel, 2].
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
        super().__init__(packed[0].shape[1] * (2 if self.narrow else 1), sizes)
        self._alive = (tuple(packed), tuple(biases))
        parts = [
            _Part(weight.data_ptr(), None if bias is None else bias.data_ptr(), size, weight.dtype == torch.bfloat16)
            for weight, size, bias in zip(packed, sizes, biases, strict=True)
        ]
        self.array = (_Part * len(parts))(*parts)
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
        if len(parts) > _MOST_PARTS:
            raise ValueError(f"an adapter lies on {_MOST_PARTS} weights of a group at most")
        self._kernels = kernels
        there = [part for part in parts if part is not None]
        self._a = kernels.pack(torch.cat([a for a, _, _ in there])) if there else None
        self._b = [None if part is None else kernels.pack(part[1]) for part in parts]
        self._biases = [None if part is None or part[2] is None else part[2].contiguous() for part in parts]
        self._ranks = [0 if part is None else part[0].shape[0] for part in parts]
        self.struct = _Low(a=None if self._a is None else self._a.data_ptr(), ranks=sum(self._ranks))
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
        self.array = (_Low * len(lows))(*(low.struct for low in lows))
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


class Kernels:
    """The compiled kernels. Raises NoKernels where they cannot be compiled or loaded, or the processor lacks the path.

    Args:
        threads: threads per call; None uses torch's current number at every call.
        build: what they are compiled for.
    """

    def __init__(self, threads: int | None = None, build: Build = Build()) -> None:
        found = library(build)
        if isinstance(found, NoKernels):
            raise found
        for name, arguments in _SIGNATURES.items():
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, _RETURNS.get(name)
        self._lib = found
        self._threads = threads
        self._adapt, self._gate, self._stored = found.zoo_adapt, found.zoo_gate, found.zoo_stored
        self._linear, self._norm, self._rotate = found.zoo_linear, found.zoo_norm, found.zoo_rotate
        self._keep, self._decode, self._chunks, self._argmax = (
            found.zoo_keep,
            found.zoo_decode,
            found.zoo_chunks,
            found.zoo_argmax,
        )
        self._layers, self._onward = found.zoo_layers, found.zoo_onward
        self.panel = int(found.zoo_panel())
        number = int(found.zoo_products())
        if number <= 0:
            raise NoKernels(_MISSING[build.path] if number == 0 else _WRONG)
        #: How products with bfloat16 weights are computed: one of `PATHS`.
        self.path = PATHS[number]

    @property
    def threads(self) -> int:
        return self._threads or torch.get_num_threads()

    # -- limits of the processor ---------------------------------------------------------------------------------------

    def multiply_add(self, count: int, narrow: bool) -> float:
        """Multiply and add in registers, `count` rounds per thread's share, and return the number of operations.

        `narrow`: pairs of bfloat16, as products do on this path; else float32.
        """
        return float(self._lib.zoo_multiply_add(count, narrow, self.threads))

    def read_(self, memory: Tensor) -> None:
        """Read a contiguous tensor once, in whole MiB."""
        self._lib.zoo_read(memory.data_ptr(), memory.numel() * memory.element_size(), self.threads)

    # -- products ------------------------------------------------------------------------------------------------------

    def pack(self, weight: Tensor) -> Tensor:
        """Pack a weight [out, in] of any strides into [panels, in, panel], zeros after the last output.

        A bfloat16 weight becomes [panels, in / 2, panel, 2]. Raises RuntimeError if its `in` is odd.
        """
        out, inputs = weight.shape
        if weight.dtype == torch.bfloat16:
            if inputs % 2:
                raise RuntimeError("bfloat16 weights are packed in pairs of inputs")
            pairs = torch.empty(-(-out // self.panel), inputs // 2, self.panel, 2, dtype=torch.bfloat16)
            self._lib.zoo_pack_narrow(
                weight.data_ptr(), out, inputs, weight.stride(0), weight.stride(1), pairs.data_ptr(), self.threads
            )
            return pairs
        packed = torch.empty(-(-out // self.panel), inputs, self.panel)
        self._lib.zoo_pack(
            weight.data_ptr(), out, inputs, weight.stride(0), weight.stride(1), packed.data_ptr(), self.threads
        )
        return packed

    def unpack(self, packed: Tensor, out: int) -> Tensor:
        """Return the weight [out, in] of its packed form."""
        if packed.dtype == torch.bfloat16:
            narrow = torch.empty(out, 2 * packed.shape[1], dtype=torch.bfloat16)
            self._lib.zoo_unpack_narrow(packed.data_ptr(), out, narrow.shape[1], narrow.data_ptr(), self.threads)
            return narrow
        weight = torch.empty(out, packed.shape[1])
        self._lib.zoo_unpack(packed.data_ptr(), out, packed.shape[1], weight.data_ptr(), self.threads)
        return weight

    def linear(self, x: Tensor, parts: Parts, add: Tensor | None = None) -> Tensor:
        """Return x [.., in] times each weight, side by side: [.., sum of outputs]; plus `add` of that shape."""
        x = _rows_of(x, parts.inputs)
        out = torch.empty((*x.shape[:-1], parts.outputs))
        extra = None if add is None else _rows_of(add, parts.outputs)
        if extra is not None and extra.shape != out.shape:
            raise ValueError(f"{list(extra.shape)} cannot be added to {list(out.shape)}")
        failed = self._linear(
            x.data_ptr(), x.numel() // parts.inputs, parts.inputs, parts.address, parts.count, _PLAIN,
            None if extra is None else extra.data_ptr(), out.data_ptr(), self.threads,
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for a product")
        return out

    def stored(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [.., in] times a weight [out, in] as it is stored: [.., out], the same bits as with a packed weight.

        The weight is float32 or bfloat16; its rows are contiguous, and may be further apart than they are long.
        """
        outputs, inputs = weight.shape
        x, narrow = _rows_of(x, inputs), weight.dtype == torch.bfloat16
        if not (can_be_read(weight) and (narrow or weight.dtype == torch.float32)) or (
            bias is not None and _rows_of(bias, outputs).numel() != outputs
        ):
            raise ValueError("a weight is read where it lies, and a bias has a value per output")
        out = torch.empty((*x.shape[:-1], outputs))
        failed = self._stored(
            x.data_ptr(), x.numel() // inputs, inputs, weight.data_ptr(), weight.stride(0), narrow,
            None if bias is None else bias.data_ptr(), outputs, out.data_ptr(), self.threads,
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for a product")
        return out

    def adapt_(self, out: Tensor, x: Tensor, parts: Widths, lows: Lows, bounds: ctypes.Array[c_int64]) -> None:
        """Add the adapters' outputs for x [1, tokens, in] to the contiguous `out` [1, tokens, sum of outputs].

        Args:
            bounds: first token and end of each adapter's span.

        Raises:
            MemoryError: no memory for the values between A and B.
        """
        x, bottom = _rows_of(x, parts.inputs), _rows_of(out, parts.outputs)
        if (
            bottom.data_ptr() != out.data_ptr()
            or x.shape[:-1] != out.shape[:-1]
            or max(bounds, default=0) > x.numel() // parts.inputs
        ):
            raise ValueError("adapters are added to the outputs of the same tokens, where they lie")
        failed = self._adapt(
            x.data_ptr(),
            parts.inputs,
            lows.address,
            ctypes.addressof(bounds),
            len(lows.array),
            ctypes.addressof(parts.widths),
            parts.count,
            out.data_ptr(),
            self.threads,
        )
        if failed:
            raise MemoryError("no memory for adapters")

    def gated(self, x: Tensor, parts: Parts) -> Tensor:
        """Return silu(x W0^T) * (x W1^T), [.., outputs of one weight], for x [.., in]."""
        if parts.count != 2 or parts.sizes[0] != parts.sizes[1]:
            raise ValueError("a gate and what it lets through have one size")
        x = _rows_of(x, parts.inputs)
        out = torch.empty((*x.shape[:-1], parts.sizes[0]))
        failed = self._linear(
            x.data_ptr(),
            x.numel() // parts.inputs,
            parts.inputs,
            parts.address,
            parts.count,
            _GATED_SILU,
            None,
            out.data_ptr(),
            self.threads,
        )
        if failed:
            raise MemoryError("no memory for a product")
        return out

    def round_(self, x: Tensor) -> Tensor:
        """Round contiguous float32 values to bfloat16, in place; returns x."""
        if x.dtype != torch.float32 or not x.is_contiguous():
            raise ValueError(f"contiguous float32 is rounded in place, not {x.dtype}")
        self._lib.zoo_round(x.data_ptr(), x.numel(), self.threads)
        return x

    def gate(self, both: Tensor) -> Tensor:
        """Return silu(gate) * up, [.., n], from both side by side in [.., 2 n]; equals `gated` on the same products."""
        both = _rows_of(both, both.shape[-1])
        width = both.shape[-1] // 2
        if both.shape[-1] != 2 * width:
            raise ValueError("a gate and what it lets through have one size")
        out = torch.empty((*both.shape[:-1], width))
        self._gate(both.data_ptr(), both.numel() // (2 * width), width, out.data_ptr(), self.threads)
        return out

    # -- norms and rotary positions ------------------------------------------------------------------------------------

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the RMSNorm over the last dimension."""
        x = _rows_of(x, weight.numel())
        out, width = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // width
        self._norm(x.data_ptr(), rows, 1, width, width, weight.data_ptr(), eps, out.data_ptr(), width, self.threads)
        return out

    def norm_heads_(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """Apply RMSNorm in place to each head of x [tokens, heads, head_dim]; a token's heads are contiguous."""
        tokens, heads, width = x.shape
        _rows_of(weight, width)
        stride = x.stride(0)
        self._norm(
            x.data_ptr(), tokens, heads, width, stride, weight.data_ptr(), eps, x.data_ptr(), stride, self.threads
        )

    def rotate_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Apply rotary positions in place to x [tokens, heads, head_dim]; a token's heads are contiguous.

        cos, sin: [tokens, head_dim].
        """
        tokens, heads, width = x.shape
        if cos.shape != (tokens, width) or sin.shape != cos.shape or width % 2:
            raise ValueError(f"tables {list(cos.shape)} are not for heads {list(x.shape)}")
        self._rotate(x.data_ptr(), tokens, x.stride(0), heads, width, cos.data_ptr(), sin.data_ptr(), self.threads)

    # -- pages ---------------------------------------------------------------------------------------------------------

    def write_kv(self, pool: Pool, pages: Tensor, offsets: Tensor, key: Tensor, value: Tensor) -> None:
        """Write K and V [tokens, kv_heads, head_dim] to (pages[i], offsets[i]); a token's heads are contiguous.

        Raises ValueError if K, V and the pool are not of one dtype.
        """
        tokens, heads, width = key.shape
        if not key.dtype == value.dtype == pool.k.dtype:
            raise ValueError(f"{key.dtype} cannot be written to pages of {pool.k.dtype}")
        self._keep(
            key.data_ptr(),
            value.data_ptr(),
            key.stride(0),
            value.stride(0),
            tokens,
            heads * width,
            pool.k.data_ptr(),
            pool.v.data_ptr(),
            pool.k.stride(0),
            pages.data_ptr(),
            offsets.data_ptr(),
            key.element_size(),
            0,
            self.threads,
        )

    def decode(
        self, query: Tensor, pool: Pool, lengths: Tensor, out: Tensor, scale: float, window: int = 0, cap: float = 0.0,
        tokens: Tensor | None = None, rows: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Attend with one query token per row over its pages; the results go to its places in `out`.

        Args:
            query, out: [all tokens, heads, head_dim], a token's heads contiguous; `out` contiguous.
            lengths: tokens of each row [rows], this one included.
            window: attend to the last `window` tokens only; 0 for all.
            cap: soft cap on the scores; 0 for none.
            tokens, rows: index of each row's token and of its table; None for 0, 1, ….

        Raises:
            MemoryError: no memory for partial results.
        """
        heads, kv_heads, width = _heads_of(query, pool, out)
        pages = _pages(pool)
        failed = self._decode(
            query.data_ptr(),
            query.stride(0),
            None if tokens is None else tokens.data_ptr(),
            None if rows is None else rows.data_ptr(),
            lengths.data_ptr(),
            lengths.numel(),
            heads,
            kv_heads,
            width,
            ctypes.addressof(pages),
            window,
            scale,
            cap,
            out.data_ptr(),
            self.threads,
        )
        if failed:
            raise MemoryError("no memory for attention's parts")

    def chunks(
        self,
        query: Tensor,
        pool: Pool,
        chunks: PromptChunks,
        out: Tensor,
        scale: float,
        window: int = 0,
        cap: float = 0.0,
    ) -> None:
        """Attend with chunks of prompts over their pages, which already hold the chunks' own K and V.

        Otherwise as `decode`.
        """
        heads, kv_heads, width = _heads_of(query, pool, out)
        pages = _pages(pool)
        failed = self._chunks(
            query.data_ptr(),
            query.stride(0),
            chunks.address,
            chunks.count,
            heads,
            kv_heads,
            width,
            ctypes.addressof(pages),
            window,
            scale,
            cap,
            out.data_ptr(),
            self.threads,
        )
        if failed:
            raise MemoryError("no memory for prompts' attention")

    def layers_(
        self, hidden: Tensor, halves: ctypes.Array[Half], step: StepData, lo: int = 0, hi: int | None = None
    ) -> None:
        """Run half layers [lo, hi) in order on hidden [1, rows, width], in place.

        Raises:
            MemoryError: no memory for intermediate values.
        """
        _rows_of(hidden, halves[0].width)
        count = (len(halves) if hi is None else hi) - lo
        first = ctypes.addressof(halves) + lo * ctypes.sizeof(Half)
        if self._layers(hidden.data_ptr(), first, count, ctypes.addressof(step), self.threads):
            raise MemoryError("no memory for a layer")

    def onward_(self, rows: OnwardRows) -> None:
        """Advance rows of one token each by one token.

        Raises IndexError, with nothing changed, if a row has no page or no angle for its next token.
        """
        if self._onward(rows.address):
            raise IndexError("a row has no page for its next token")

    def argmax(self, x: Tensor) -> Tensor:
        """Return the index of the first maximum of each row of x [rows, width]; in a row with NaN, of the first NaN."""
        x = _rows_of(x, x.shape[-1])
        out = torch.empty(x.shape[0], dtype=torch.int64)
        self._argmax(x.data_ptr(), x.shape[0], x.shape[1], out.data_ptr(), self.threads)
        return out


def can_be_read(weight: Tensor) -> bool:
    """Return whether `Kernels.stored` can read a weight [out, in]: rows that are contiguous and do not overlap."""
    return weight.dim() == 2 and weight.stride(1) == 1 and weight.stride(0) >= weight.shape[1]


def back_to_back(heads: Tensor) -> bool:
    """Return whether each token's heads in [tokens, heads, head_dim] are contiguous and float32."""
    return heads.dtype == torch.float32 and _contiguous(heads)


def can_be_kept(heads: Tensor) -> bool:
    """Return whether K or V [tokens, kv_heads, head_dim] can be written to pages: contiguous float32 or bfloat16."""
    return heads.dtype in (torch.float32, torch.bfloat16) and _contiguous(heads)


def _contiguous(heads: Tensor) -> bool:
    return heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]


def _pages(pool: Pool) -> _Pages:
    return _Pages(
        pool.k.data_ptr(),
        pool.v.data_ptr(),
        pool.k.stride(0),
        pool.k.shape[1],
        pool.tables.data_ptr(),
        pool.tables.stride(0),
        pool.k.dtype == torch.bfloat16,
    )


def _heads_of(query: Tensor, pool: Pool, out: Tensor) -> tuple[int, int, int]:
    """Return heads, KV heads and the width of a head. Raises ValueError if query, pages and output do not match."""
    (_, heads, width), (_, _, kv_heads, kv_width) = query.shape, pool.k.shape
    if width != kv_width or heads % kv_heads or out.shape != query.shape or not out.is_contiguous():
        raise ValueError(
            f"heads {list(query.shape)} cannot attend to pages {list(pool.k.shape)} into {list(out.shape)}"
        )
    return heads, kv_heads, width


def _rows_of(x: Tensor, width: int) -> Tensor:
    """Return x as contiguous float32 [.., width]; C code cannot check that.

    Raises ValueError for another dtype or width.
    """
    if x.dtype != torch.float32 or x.shape[-1] != width:
        raise ValueError(f"the kernels were to read float32 [.., {width}], not {x.dtype} {list(x.shape)}")
    return x.contiguous()
