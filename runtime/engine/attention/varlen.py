"""Attention on CUDA in one call for all rows of a step: torch's kernel for rows of unequal length over their pages.

A prompt's chunk attends in the same call as the decode rows. The kernel reads the pages where it can (`block_table`);
else the pages of all rows are gathered into scratch, back to back, and it attends over those. Layers that the kernel
does not support (float32, soft caps) use `engine.attention.gathered`. The kernel is called through one function
(`Kernel.call`), which tests on a CPU replace by one of the same signature.

What torch's kernels take (torch/nn/attention/varlen.py; `mha_varlen_fwd` in
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp): half precision, head dimensions in multiples of 8
up to 256, no soft cap, compute capability 8 or higher.

| torch | implementation | reads pages |
|---|---|---|
| from 2.12 | Flash Attention 2, part of torch; requires the cumulated lengths of K | of a multiple of 256 tokens |
| from 2.12 | Flash Attention 3, a package for compute capability 9; rejects the cumulated lengths | of any size |
| 2.11 | Flash Attention 2; `varlen_attn` has no `seqused_k`, the operator below it has | no |
"""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.engine.attention.gathered import GatheredAttention
from runtime.engine.attention.interface import Tokens
from runtime.engine.step.context import AttentionBackend, PagedMaker, PagedMetadata
from runtime.kv.transfers import put

_HEAD_STEP, _HEAD_MOST = 8, 256
_HALF = (torch.float16, torch.bfloat16)
_FA2_PAGE, _FA2_MAJOR = 256, 8
_FA3_PACKAGE, _FA3_MAJOR = "flash_attn_interface", 9
#: Tokens of a page that is gathered: large enough for few widths of page tables, small enough to pad little.
_GATHERED_PAGE = 64


class VarlenCall(Protocol):
    """The signature of `torch.nn.attention.varlen.varlen_attn`, as far as it is used here.

    query: [tokens, heads, head_dim]; key, value: [pages, page_tokens, kv_heads, head_dim] with a block_table, else
    [slots, kv_heads, head_dim], each row's from cu_seq_k on; cu_seq_q, cu_seq_k: int32 [rows + 1]; seqused_k: int32
    [rows]; block_table: int32 [rows, page groups]. Causal and windowed masks end at a row's last token. Returns the
    shape of the query.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        scale: float | None,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: Tensor,
        block_table: Tensor | None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel and what it supports.

    Fields:
        page_multiple: Tokens of a page that it reads must be a multiple of this; 0: it reads no pages.
        ends: Whether it requires `cu_seq_k` beside a `block_table`.
    """

    call: VarlenCall
    page_multiple: int
    ends: bool
    dtypes: tuple[torch.dtype, ...] = _HALF

    def takes(self, now: Tokens) -> bool:
        """Return whether it supports this layer."""
        width = now.query.shape[2]
        return (
            now.how.softcap is None
            and now.query.dtype in self.dtypes
            and now.key.dtype == now.query.dtype
            and width % _HEAD_STEP == 0
            and width <= _HEAD_MOST
        )

    def reads_pages(self, page_tokens: int) -> bool:
        """Return whether it reads pages of this many tokens."""
        return self.page_multiple > 0 and page_tokens % self.page_multiple == 0


class VarlenAttention:
    """`engine.step.context.AttentionBackend` with a kernel for rows of unequal length.

    Where the kernel supports the layer, `decode` attends for all rows, and `chunks` has nothing left to do.
    """

    def __init__(self, kernel: Kernel, paging: PagedMetadata) -> None:
        self.paging = paging
        self._kernel = kernel
        counts = [span.hi - span.lo for span in paging.spans]
        self._longest = max(counts)
        self._reach = paging.tables.shape[2] * paging.page_tokens
        self._starts = _starts(counts, paging.tables.device)
        self._lengths = paging.lengths.to(torch.int32)
        self._paged = kernel.reads_pages(paging.page_tokens)
        if self._paged:
            self._tables = paging.tables.to(torch.int32)
            self._k_starts = F.pad(self._lengths.cumsum(0, dtype=torch.int32), (1, 0)) if kernel.ends else None
        else:
            self._tables, self._k_starts = _row_pages(paging)

    @cached_property
    def _gathered(self) -> GatheredAttention:
        return GatheredAttention(self.paging)

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.paging.write_kv(layer, key, value)

    def decode(self, layer: int, now: Tokens, out: Tensor, sums: Tensor | None = None) -> None:
        if self._apart(now, sums):
            self._gathered.decode(layer, now, out, sums)
            return
        tokens = self.paging.tokens
        if tokens is None:
            out.copy_(self._call(layer, now.query, now))
        else:
            out[tokens] = self._call(layer, now.query[tokens], now)

    def chunks(self, layer: int, now: Tokens, out: Tensor, sums: Tensor | None = None) -> None:
        if self._apart(now, sums):
            self._gathered.chunks(layer, now, out, sums)

    def _apart(self, now: Tokens, sums: Tensor | None) -> bool:
        """Whether the kernel does not do it: heads it does not take, logarithms of sums, pages that hold a part."""
        return sums is not None or self.paging.held is not None or not self._kernel.takes(now)

    def _call(self, layer: int, query: Tensor, now: Tokens) -> Tensor:
        view, window = self.paging.view(now.key), now.how.window
        if self._paged:
            key, value, table = view.k, view.v, self._tables[:, layer]
        else:
            (key, value), table = view.gather(self._tables[layer], self.paging.pool), None
        # (tokens before the query's own, none behind it); a decode row without a window sees all, and only then do the
        # kernels read K and V once for all heads that share them.
        reach = (-1, -1) if window is None and self._longest == 1 else (-1 if window is None else window - 1, 0)
        return self._kernel.call(
            query,
            key,
            value,
            self._starts,
            self._k_starts,
            self._longest,
            self._reach,
            scale=now.how.scaling,
            window_size=reach,
            enable_gqa=query.shape[1] != now.key.shape[1],
            seqused_k=self._lengths,
            block_table=table,
        )


def varlen_attention(kernel: Kernel) -> PagedMaker:
    """Return the attention backend factory of a device with such a kernel."""

    def made(paging: PagedMetadata) -> AttentionBackend:
        return VarlenAttention(kernel, paging)

    return made


def device_attention(device: torch.device) -> PagedMaker:
    """Return the attention backend factory of a device without native kernels."""
    kernel = _kernel(device) if device.type == "cuda" else None
    return GatheredAttention if kernel is None else varlen_attention(kernel)


def device_page_tokens(device: torch.device, dtype: torch.dtype) -> int:
    """Return the tokens that pages on a device should have for models of this dtype. Does not touch the device."""
    if device.type != "cuda":
        return 16
    return _FA2_PAGE if dtype in _HALF and _paged_call() is not None else _GATHERED_PAGE


def page_multiple(device: torch.device) -> int:
    """Return the number whose multiples the tokens of a page on this device should be, where a page holds as many."""
    return _FA2_PAGE if device.type == "cuda" and _paged_call() is not None else 1


@cache
def _kernel(device: torch.device) -> Kernel | None:
    """Return torch's kernel for this device; None for GPUs before Ampere."""
    major, _ = torch.cuda.get_device_capability(device)
    if major < _FA2_MAJOR:
        return None
    paged = _paged_call()
    if paged is None:
        return Kernel(flash_attention, 0, ends=True)
    if major == _FA3_MAJOR and _activates_fa3():
        return Kernel(paged, 1, ends=False)
    return Kernel(paged, _FA2_PAGE, ends=True)


@cache
def _paged_call() -> VarlenCall | None:
    """Return torch's `varlen_attn` if it reads pages (from torch 2.12), else None."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return None
    if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
        return None
    return cast("VarlenCall", varlen.varlen_attn)  # returns one tensor unless log-sum-exp is requested


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor | None,
) -> Tensor:
    """`VarlenCall` without pages, by the operator below torch 2.11's `varlen_attn`, which does not pass `seqused_k` on.

    Raises ValueError for a block_table.
    """
    if block_table is not None:
        raise ValueError("this torch reads no pages: gather them")
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, window_size == (-1, 0), False,
        scale=scale, window_size_left=window_size[0], window_size_right=window_size[1], seqused_k=seqused_k,
    )[0]  # fmt: skip
    return out


def _activates_fa3() -> bool:
    """Make torch use Flash Attention 3 in the whole process; return whether its package is installed and fits."""
    if importlib.util.find_spec(_FA3_PACKAGE) is None:
        return False
    from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

    try:
        if current_flash_attention_impl() != "FA3":
            activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, ValueError):
        return False
    return True


def _starts(counts: list[int], device: torch.device) -> Tensor:
    """Return the first token of each row and the end of the last one: int32 [rows + 1].

    For decode rows alone this needs no copy from the host.
    """
    if max(counts) == 1:
        return torch.arange(len(counts) + 1, dtype=torch.int32, device=device)
    return F.pad(put(counts, device).cumsum(0, dtype=torch.int32), (1, 0))


def _row_pages(paging: PagedMetadata) -> tuple[Tensor, Tensor]:
    """Return the pages of all rows back to back [layers, pages], and each row's first slot there, int32 [rows + 1]."""
    width, device = paging.tables.shape[2], paging.tables.device
    pages = paging.tables.transpose(0, 1).flatten(1)
    counts = [-(-span.length // paging.page_tokens) for span in paging.spans]
    if all(count == width for count in counts):  # in a recording, which allows no copy from the host
        starts = torch.arange(0, (len(counts) + 1) * width, width, dtype=torch.int32, device=device)
    else:
        pages = pages[:, put([row * width + at for row, count in enumerate(counts) for at in range(count)], device)]
        starts = F.pad(put(counts, device).cumsum(0, dtype=torch.int32), (1, 0))
    return pages.contiguous(), starts * paging.page_tokens
