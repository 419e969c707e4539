"""Attention over pages with the kernels: K and V are read in place, each row only as far as it reaches.

Queries, K and V are float32 or bfloat16 on a CPU. Layers that the kernels do not support use
`engine.attention.gathered`.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from runtime.engine.attention.gathered import GatheredAttention
from runtime.engine.attention.interface import Tokens
from runtime.engine.kernels.bindings import Kernels, back_to_back, can_be_kept
from runtime.engine.kernels.exchange import Decoding
from runtime.engine.kernels.operands import Pool, PromptChunk, PromptChunks
from runtime.engine.kernels.signatures import MOST_HEADS, MOST_WIDTH
from runtime.engine.step.context import AttentionBackend, PagedMaker, PagedMetadata
from runtime.kv.pool import PageView


class RowKinds:
    """The rows of a paging, by how the kernels attend: chunks of prompts, and rows of one token.

    Attributes:
        prompts: The chunks.
        rows, tokens: Of each row of one token, its index in the page tables and that of its token in the forward
            context; None for 0, 1, ….
        lengths: Tokens that each of these attends to.
    """

    def __init__(self, paging: PagedMetadata) -> None:
        spans = paging.spans
        decodes = [row for row, span in enumerate(spans) if span.hi - span.lo == 1]
        everything = len(decodes) == len(spans)
        self.prompts = PromptChunks(
            [PromptChunk(span.lo, span.hi - span.lo, span.start, row, paging.reach(row)) for row, span in paging.chunks]
        )
        self.rows = None if everything else torch.tensor(decodes, dtype=torch.int64)
        self.tokens = (
            None
            if everything and paging.tokens is None
            else torch.tensor([spans[row].lo for row in decodes], dtype=torch.int64)
        )
        self.lengths = paging.lengths.contiguous() if self.rows is None else paging.lengths[self.rows]


class NativeAttention:
    """`engine.step.context.AttentionBackend` with the kernels.

    Attributes:
        kinds: The rows of its paging.
    """

    def __init__(self, kernels: Kernels, paging: PagedMetadata) -> None:
        self.paging = paging
        self._kernels = kernels
        self.kinds = RowKinds(paging)
        #: What native code was given last, and for which queries, keys and settings.
        self._any_layer: Decoding | None = None
        self._like: object = None

    @cached_property
    def _gathered(self) -> GatheredAttention:
        return GatheredAttention(self.paging)

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        paging = self.paging
        if paging.tokens is not None or not (can_be_kept(key) and can_be_kept(value)):
            paging.write_kv(layer, key, value)
            return
        self._kernels.write_kv(
            self._pool(layer, paging.view(key)), paging.token_pages[layer], paging.token_offsets, key, value
        )

    def decode(self, layer: int, now: Tokens, out: Tensor, sums: Tensor | None = None) -> None:
        kinds = self.kinds
        if not kinds.lengths.numel():
            return
        if not _takes(now):
            self._gathered.decode(layer, _in_one_dtype(now), out, sums)
            return
        pool = self._pool(layer, self.paging.view(now.key))
        query, into = _in_float32(now.query, out)
        self._kernels.decode(query, pool, kinds.lengths, into, *_terms(now), kinds.tokens, kinds.rows, sums)
        if into is not out:
            out.copy_(into)

    def chunks(self, layer: int, now: Tokens, out: Tensor, sums: Tensor | None = None) -> None:
        if not self.kinds.prompts.count:
            return
        if not _takes(now):
            self._gathered.chunks(layer, _in_one_dtype(now), out, sums)
            return
        pool = self._pool(layer, self.paging.view(now.key))
        query, into = _in_float32(now.query, out)
        self._kernels.chunks(query, pool, self.kinds.prompts, into, *_terms(now), sums)
        if into is not out:
            out.copy_(into)

    def decoding(self, layer: int, now: Tokens) -> Decoding | None:
        """Return what `decode` computes, for native code.

        None unless all rows are of one token, without a sliding window, and the kernels take them.
        """
        like = now.query.shape, now.query.dtype, now.key.shape[1:], now.key.dtype, now.how
        if like != self._like:
            self._like, self._any_layer = like, self._decoding(now)
        return None if self._any_layer is None else self._any_layer.at_layer(layer)

    def _decoding(self, now: Tokens) -> Decoding | None:
        kinds = self.kinds
        plain = kinds.tokens is None and kinds.rows is None and now.how.window is None
        if not kinds.lengths.numel() or not plain or not _takes(now):
            return None
        (_, heads, width), (scale, _, cap) = now.query.shape, _terms(now)
        view, threads = self.paging.view(now.key), self._kernels.threads
        return Decoding.over_pages(view, self.paging.tables, kinds.lengths, (heads, width), (scale, cap), threads)

    def _pool(self, layer: int, view: PageView) -> Pool:
        return Pool(view.k, view.v, self.paging.tables[:, layer])


def native_attention(kernels: Kernels) -> PagedMaker:
    """Return the attention backend factory of a device with kernels."""

    def made(paging: PagedMetadata) -> AttentionBackend:
        return NativeAttention(kernels, paging)

    return made


def _takes(now: Tokens) -> bool:
    """Return whether the kernels support these heads: dtype, number, width and scaling."""
    _, heads, width = now.query.shape
    return (
        now.query.dtype in (torch.float32, torch.bfloat16)
        and now.key.dtype in (torch.float32, torch.bfloat16)
        and heads <= MOST_HEADS
        and width <= MOST_WIDTH
        and now.how.factor(width) > 0.0
    )


def _in_float32(query: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return query and output as the kernels take them: float32, output of a part float64, a token's heads contiguous.

    Copied if necessary.
    """
    wide = query if back_to_back(query) else query.float().contiguous()
    return wide, out if out.dtype in (torch.float32, torch.float64) else out.float()


def _in_one_dtype(now: Tokens) -> Tokens:
    return now if now.query.dtype == now.key.dtype else now._replace(query=now.query.to(now.key.dtype))


def _terms(now: Tokens) -> tuple[float, int, float]:
    """Return factor, window and soft cap as the kernels take them: 0 for none."""
    how = now.how
    return how.factor(now.query.shape[2]), how.window or 0, how.softcap or 0.0
