"""Attention on CUDA in one call for all rows of a step: torch's kernel for rows of unequal length over their pages.

Uses `torch.nn.attention.varlen`. Nothing is gathered, and a prompt's chunk attends in the same call as the decode rows.
Layers that the kernel does not support use `engine.attention.gathered`. The kernel is called through one function
(`Kernel.call`), which tests on a CPU replace by one of the same signature.

The kernels, as of torch 2.13, support half precision, head dimensions that are multiples of 8 up to 256, and no soft
cap. Flash Attention 2, which is part of torch, requires pages of a multiple of 256 tokens and the cumulated lengths of
K besides the lengths. Flash Attention 3, a separate package for compute capability 9, supports pages of any size and
rejects the cumulated lengths.
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
_FA2_PAGE = 256
_FA3_PACKAGE, _FA3_MAJOR = "flash_attn_interface", 9


class VarlenCall(Protocol):
    """The signature of `torch.nn.attention.varlen.varlen_attn`, as far as it is used here.

    query: [tokens, heads, head_dim]; key, value: [pages, page_tokens, kv_heads, head_dim]; cu_seq_q, cu_seq_k: int32
    [rows + 1]; seqused_k: int32 [rows]; block_table: int32 [rows, page groups]. Causal and windowed masks end at a
    row's last token. Returns the shape of the query.
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
        block_table: Tensor,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel and what it supports.

    Fields:
        page_multiple: Tokens of a page must be a multiple of this.
        ends: Whether it requires `cu_seq_k`.
    """

    call: VarlenCall
    page_multiple: int
    ends: bool
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)

    def takes(self, now: Tokens, page_tokens: int) -> bool:
        """Return whether it supports this layer."""
        width = now.query.shape[2]
        return (
            now.how.softcap is None
            and now.query.dtype in self.dtypes
            and now.key.dtype == now.query.dtype
            and width % _HEAD_STEP == 0
            and width <= _HEAD_MOST
            and page_tokens % self.page_multiple == 0
        )


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
        self._tables = paging.tables.to(torch.int32)
        self._lengths = paging.lengths.to(torch.int32)
        self._ends = F.pad(self._lengths.cumsum(0, dtype=torch.int32), (1, 0)) if kernel.ends else None

    @cached_property
    def _gathered(self) -> GatheredAttention:
        return GatheredAttention(self.paging)

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.paging.write_kv(layer, key, value)

    def decode(self, layer: int, now: Tokens, out: Tensor) -> None:
        if not self._kernel.takes(now, self.paging.page_tokens):
            self._gathered.decode(layer, now, out)
            return
        tokens = self.paging.tokens
        if tokens is None:
            out.copy_(self._call(layer, now.query, now))
        else:
            out[tokens] = self._call(layer, now.query[tokens], now)

    def chunks(self, layer: int, now: Tokens, out: Tensor) -> None:
        if not self._kernel.takes(now, self.paging.page_tokens):
            self._gathered.chunks(layer, now, out)

    def _call(self, layer: int, query: Tensor, now: Tokens) -> Tensor:
        view = self.paging.view(now.key)
        window = now.how.window
        return self._kernel.call(
            query,
            view.k,
            view.v,
            self._starts,
            self._ends,
            self._longest,
            self._reach,
            scale=now.how.scaling,
            window_size=(-1 if window is None else window - 1, 0),  # tokens before the query's own
            enable_gqa=query.shape[1] != now.key.shape[1],
            seqused_k=self._lengths,
            block_table=self._tables[:, layer],
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


@cache
def _kernel(device: torch.device) -> Kernel | None:
    """Return torch's kernel for this device; None if torch's has no paged attention (before 2.12)."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return None
    call = cast("VarlenCall", varlen.varlen_attn)  # returns one tensor unless log-sum-exp is requested
    if "block_table" not in inspect.signature(call).parameters:
        return None
    if torch.cuda.get_device_capability(device)[0] == _FA3_MAJOR and _activates_fa3():
        return Kernel(call, 1, ends=False)
    return Kernel(call, _FA2_PAGE, ends=True)


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
