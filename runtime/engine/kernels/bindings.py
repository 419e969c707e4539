"""The compiled kernels as functions of tensors: check shapes, pass addresses and strides to C.

Activations are float32 on a CPU; weights, K and V are float32 or bfloat16. One `Kernels` exists per device. It keeps no
state between calls; a call writes to a new tensor, or in place where its name ends with an underscore or it takes
`out`.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64

import torch
from torch import Tensor

from runtime.engine.kernels.build import PATHS, Build, NoKernels, library
from runtime.engine.kernels.logits import LogitKernels
from runtime.engine.kernels.operands import SCALE_ROWS, Lows, OnwardRows, Parts, Pool, PromptChunks, Widths
from runtime.engine.kernels.signatures import RETURNS, SIGNATURES, Half, PagesData, StepData

_PLAIN, _GATED_SILU = 0, 1

#: Why a path cannot be used.
_MISSING = {
    "avx512": "this processor, or the compiler, has no AVX512-BF16",
    "amx": "this processor or its system has no AMX-BF16",
}
_WRONG = "the tile unit (AMX-BF16) gives other bits than its description"


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
        for name, arguments in SIGNATURES.items():
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, RETURNS.get(name)
        self.lib = found
        self._threads = threads
        self._adapt, self._gate, self._stored = found.zoo_adapt, found.zoo_gate, found.zoo_stored
        self._linear, self._norm, self._rotate = found.zoo_linear, found.zoo_norm, found.zoo_rotate
        self._keep, self._decode, self._chunks = found.zoo_keep, found.zoo_decode, found.zoo_chunks
        self._merge = found.zoo_merge
        #: On rows of logits.
        self.logits = LogitKernels(found, lambda: self.threads)
        self._layers, self._onward = found.zoo_layers, found.zoo_onward
        self.panel, self.coded_panel = int(found.zoo_panel()), int(found.zoo_coded_panel())
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
        return float(self.lib.zoo_multiply_add(count, narrow, self.threads))

    def read_(self, memory: Tensor) -> None:
        """Read a contiguous tensor once, in whole MiB."""
        self.lib.zoo_read(memory.data_ptr(), memory.numel() * memory.element_size(), self.threads)

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
            self.lib.zoo_pack_narrow(
                weight.data_ptr(), out, inputs, weight.stride(0), weight.stride(1), pairs.data_ptr(), self.threads
            )
            return pairs
        packed = torch.empty(-(-out // self.panel), inputs, self.panel)
        self.lib.zoo_pack(
            weight.data_ptr(), out, inputs, weight.stride(0), weight.stride(1), packed.data_ptr(), self.threads
        )
        return packed

    def pack_coded(self, codes: Tensor, inputs: int, scale: Tensor) -> Tensor:
        """Pack an int8 weight with the scale of each output into [panels, in + 4, panel], the scales behind the codes.

        Args:
            codes: [out, in] int8, or int32 of four codes each, offset by 128.
            scale: [out] float32.
        """
        out, packed = codes.shape[0], codes.dtype == torch.int32
        width = codes.shape[1] * codes.element_size()
        if codes.dtype not in (torch.int8, torch.int32) or width < inputs or scale.shape != (out,):
            raise ValueError(f"{codes.dtype} {list(codes.shape)} are no codes of {inputs} inputs")
        codes, scale = codes.contiguous(), scale.float().contiguous()
        made = torch.empty(-(-out // self.coded_panel), inputs + SCALE_ROWS, self.coded_panel, dtype=torch.int8)
        self.lib.zoo_pack_coded(
            codes.data_ptr(), out, inputs, width, 128 if packed else 0, scale.data_ptr(), made.data_ptr(), self.threads
        )
        return made

    def unpack(self, packed: Tensor, out: int) -> Tensor:
        """Return the weight [out, in] of its packed form; that of an int8 one in float32."""
        if packed.dtype == torch.int8:
            values = torch.empty(out, packed.shape[1] - SCALE_ROWS)
            self.lib.zoo_unpack_coded(packed.data_ptr(), out, values.shape[1], values.data_ptr(), self.threads)
            return values
        if packed.dtype == torch.bfloat16:
            narrow = torch.empty(out, 2 * packed.shape[1], dtype=torch.bfloat16)
            self.lib.zoo_unpack_narrow(packed.data_ptr(), out, narrow.shape[1], narrow.data_ptr(), self.threads)
            return narrow
        weight = torch.empty(out, packed.shape[1])
        self.lib.zoo_unpack(packed.data_ptr(), out, packed.shape[1], weight.data_ptr(), self.threads)
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
            x.data_ptr(), x.numel() // parts.inputs, parts.inputs, parts.address, parts.count, _GATED_SILU, None,
            out.data_ptr(), self.threads,
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for a product")
        return out

    def round_(self, x: Tensor) -> Tensor:
        """Round contiguous float32 values to bfloat16, in place; returns x."""
        if x.dtype != torch.float32 or not x.is_contiguous():
            raise ValueError(f"contiguous float32 is rounded in place, not {x.dtype}")
        self.lib.zoo_round(x.data_ptr(), x.numel(), self.threads)
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
            key.data_ptr(), value.data_ptr(), key.stride(0), value.stride(0), tokens, heads * width, pool.k.data_ptr(),
            pool.v.data_ptr(), pool.k.stride(0), pages.data_ptr(), offsets.data_ptr(), key.element_size(), 0,
            self.threads,
        )  # fmt: skip

    def decode(
        self, query: Tensor, pool: Pool, lengths: Tensor, out: Tensor, scale: float, window: int = 0, cap: float = 0.0,
        tokens: Tensor | None = None, rows: Tensor | None = None, sums: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Attend with one query token per row over its pages; the results go to its places in `out`.

        Args:
            query, out: [all tokens, heads, head_dim], a token's heads contiguous; `out` contiguous.
            lengths: tokens of each row [rows], this one included; a row of none gives zeros.
            window: attend to the last `window` tokens only; 0 for all.
            cap: soft cap on the scores; 0 for none.
            tokens, rows: index of each row's token and of its table; None for 0, 1, ….
            sums: gets sum and exponent of each head [all tokens, heads, 2]; `out` gets values that are not divided.
                Both are float64 then (`engine.attention.partial`).

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
            _sums_of(query, out, sums),
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
        sums: Tensor | None = None,
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
            _sums_of(query, out, sums),
            self.threads,
        )
        if failed:
            raise MemoryError("no memory for prompts' attention")

    def layers_(
        self, hidden: Tensor, halves: ctypes.Array[Half], step: StepData, lo: int = 0, hi: int | None = None, *,
        resumes: bool = False,
    ) -> int | None:  # fmt: skip
        """Run half layers [lo, hi) in order on hidden [1, rows, width], in place.

        `resumes`: the attention of the first one is in `made` of the step already. Returns None at the end, or the
        number of a half whose attention is left to the caller: K and V are written, its queries are in `wide`.

        Raises:
            MemoryError: no memory for intermediate values.
        """
        _rows_of(hidden, halves[0].width)
        count = (len(halves) if hi is None else hi) - lo
        first = ctypes.addressof(halves) + lo * ctypes.sizeof(Half)
        found = self._layers(hidden.data_ptr(), first, count, ctypes.addressof(step), resumes, self.threads)
        if found == 1:
            raise MemoryError("no memory for a layer")
        return lo + found - 2 if found else None

    def merge(self, values: Tensor, sums: Tensor, out: Tensor, total: Tensor | None) -> None:
        """Merge attention to parts of the tokens: float64 values [parts, …, width] and sums [parts, …, 2].

        Into contiguous `out` and `total`, as `decode` writes them.
        """
        shape = len(values), sums[0].numel() // 2, values.shape[-1]
        if out.shape != values.shape[1:] or out.dtype != (torch.float32 if total is None else torch.float64):
            raise ValueError(f"parts {list(values.shape)} do not go into {list(out.shape)} of {out.dtype}")
        into = None if total is None else total.data_ptr()
        self._merge(values.data_ptr(), sums.data_ptr(), *shape, out.data_ptr(), into)

    def onward_(self, rows: OnwardRows) -> None:
        """Advance rows of one token each by one token.

        Raises IndexError, with nothing changed, if a row has no page or no angle for its next token.
        """
        if self._onward(rows.address):
            raise IndexError("a row has no page for its next token")


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


def _pages(pool: Pool) -> PagesData:
    return PagesData(
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


def _sums_of(query: Tensor, out: Tensor, sums: Tensor | None) -> int | None:
    """Return where sums and exponents go. Raises ValueError if they or `out` do not match."""
    if out.dtype != (torch.float32 if sums is None else torch.float64):
        raise ValueError(f"attention does not go into {out.dtype}")
    if sums is None:
        return None
    if sums.shape != (*query.shape[:2], 2) or sums.dtype != torch.float64 or not sums.is_contiguous():
        raise ValueError(f"sums {list(sums.shape)} are not of heads {list(query.shape)}")
    return sums.data_ptr()


def _rows_of(x: Tensor, width: int) -> Tensor:
    """Return x as contiguous float32 [.., width]; C code cannot check that.

    Raises ValueError for another dtype or width.
    """
    if x.dtype != torch.float32 or x.shape[-1] != width:
        raise ValueError(f"the kernels were to read float32 [.., {width}], not {x.dtype} {list(x.shape)}")
    return x.contiguous()
