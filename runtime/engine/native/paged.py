"""Attention over pages with the kernels: K and V are read where they lie, each row as far as it reaches (float32 on a CPU).

What the kernels do not take goes the way that runs anywhere.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from runtime.engine.attention import Tokens
from runtime.engine.frame import Paged, PagedMaker, Paging
from runtime.engine.gathered import GatheredAttention
from runtime.engine.native.calls import MOST_HEADS, MOST_WIDTH, Chunk, Chunks, Kernels, Pool
from runtime.kv.pool import PageView


class NativeAttention:
    """`engine.frame.Paged`."""

    def __init__(self, kernels: Kernels, paging: Paging) -> None:
        self.paging = paging
        self._kernels = kernels
        spans = paging.spans
        decodes = [row for row, span in enumerate(spans) if span.hi - span.lo == 1]
        everything = len(decodes) == len(spans)
        self._prompts = Chunks([Chunk(span.lo, span.hi - span.lo, span.start, row) for row, span in paging.chunks])
        self._some = len(decodes) > 0
        self._rows = None if everything else torch.tensor(decodes, dtype=torch.int64)
        self._tokens = None if everything and paging.tokens is None else torch.tensor([spans[row].lo for row in decodes], dtype=torch.int64)
        self._lengths = paging.lengths if self._rows is None else paging.lengths[self._rows]

    @cached_property
    def _gathered(self) -> GatheredAttention:
        return GatheredAttention(self.paging)

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        paging = self.paging
        if paging.tokens is not None or not (_fits(key) and _fits(value)):
            self._gathered.keep(layer, key, value)
            return
        self._kernels.keep(self._pool(layer, paging.view(key)), paging.token_pages[layer], paging.token_offsets, key, value)

    def decode(self, layer: int, now: Tokens, out: Tensor) -> None:
        if not self._some:
            return
        if not _fits(now.query) or now.key.dtype != torch.float32:
            self._gathered.decode(layer, now, out)
            return
        how, pool = now.how, self._pool(layer, self.paging.view(now.key))
        scale = now.query.shape[2] ** -0.5 if how.scaling is None else how.scaling
        self._kernels.decode(
            now.query, pool, self._lengths, out, scale, self._tokens, self._rows, how.window or 0, how.softcap or 0.0
        )  # fmt: skip

    def chunks(self, layer: int, now: Tokens, out: Tensor) -> None:
        if not self._prompts.count:
            return
        if not _fits(now.query) or now.key.dtype != torch.float32:
            self._gathered.chunks(layer, now, out)
            return
        how, pool = now.how, self._pool(layer, self.paging.view(now.key))
        scale = now.query.shape[2] ** -0.5 if how.scaling is None else how.scaling
        self._kernels.chunks(now.query, pool, self._prompts, out, scale, how.window or 0, how.softcap or 0.0)

    def _pool(self, layer: int, view: PageView) -> Pool:
        return Pool(view.k, view.v, self.paging.tables[:, layer])


def native_attention(kernels: Kernels) -> PagedMaker:
    """How a device with kernels attends."""

    def made(paging: Paging) -> Paged:
        return NativeAttention(kernels, paging)

    return made


def _fits(heads: Tensor) -> bool:
    """Whether a token's heads lie back to back, in float32, and are not too many or too wide for what the kernels keep on the stack."""
    small = heads.shape[1] <= MOST_HEADS and heads.shape[2] <= MOST_WIDTH
    return small and heads.dtype == torch.float32 and heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
