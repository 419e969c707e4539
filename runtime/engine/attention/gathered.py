"""Attention over pages with torch's own operations, on any device.

Pages are gathered into scratch and attended in few calls. Decode rows of similar length are attended together, padded
to the longest of them. A chunk of a prompt is attended alone, over its earlier pages and itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.engine.attention.interface import Tokens, softmax_attention, softmax_attention_with_sums
from runtime.engine.step.context import PagedMetadata, RowSpan
from runtime.kv.transfers import put

#: Decode rows are attended in at most this many groups of similar length.
MAX_GROUPS = 4
_GROUP_RATIO = 0.6


@dataclass(slots=True)
class DecodeGroup:
    """Rows of one token each and of similar length, attended in one call.

    Fields:
        tokens: Indices of the rows' tokens in the forward context; None for all, in order.
        rows: Number of rows.
        width: Tokens that each row is padded to.
        pages: Page ids [layers, rows * groups].
        lengths: Tokens of each row [rows].
    """

    tokens: Tensor | None
    rows: int
    width: int
    pages: Tensor
    lengths: Tensor
    _masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [rows, 1, 1, width]: minus infinity outside a row's tokens and window, else 0."""
        key = (window, dtype)
        if key not in self._masks:
            at = torch.arange(self.width, device=self.lengths.device)
            hidden = at >= self.lengths[:, None]
            if window is not None:
                hidden |= at < self.lengths[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=self.lengths.device)
            self._masks[key] = mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]
        return self._masks[key]


class GatheredAttention:
    """`engine.step.context.AttentionBackend` with gathered pages."""

    def __init__(self, paging: PagedMetadata) -> None:
        self.paging = paging
        self._groups = tuple(_groups(paging))

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.paging.write_kv(layer, key, value)

    def decode(self, layer: int, now: Tokens, out: Tensor, sums: Tensor | None = None) -> None:
        for group in self._groups:
            made, weights = self._attend(layer, group, now, sums is not None)
            for into, value in ((out, made), (sums, weights)):
                if into is None or value is None:
                    continue
                if group.tokens is None:
                    into.copy_(value)
                else:
                    into[group.tokens] = value.to(into.dtype)

    def chunks(self, layer: int, now: Tokens, out: Tensor, sums: Tensor | None = None) -> None:
        for row, span in self.paging.chunks:
            table = self.paging.tables[row, layer]
            out[span.lo : span.hi], weights = _chunk(self.paging, table, row, now, sums is not None)
            if sums is not None and weights is not None:
                sums[span.lo : span.hi] = weights

    def _attend(self, layer: int, group: DecodeGroup, now: Tokens, sums: bool) -> tuple[Tensor, Tensor | None]:
        """Attend with one token per row over its pages.

        Returns [rows, heads, head_dim]; with `sums`, also [rows, heads, 2].
        """
        query = now.query if group.tokens is None else now.query[group.tokens]
        heads, (kv_heads, head_dim) = query.shape[1], now.key.shape[1:]
        k, v = self.paging.view(now.key).gather(group.pages[layer], self.paging.pool)
        shape = (group.rows, group.width, kv_heads, head_dim)
        k, v = k.view(shape).transpose(1, 2), v.view(shape).transpose(1, 2)
        # Query heads that share a KV head are stacked as queries of that head, so that K and V are not repeated.
        grouped = query.reshape(group.rows, kv_heads, heads // kv_heads, head_dim)
        mask = group.mask(now.how.window, query.dtype)
        mask = mask.expand(-1, -1, grouped.shape[2], -1)
        if not sums:
            out = softmax_attention(grouped, k, v, mask, now.how)
            return out.reshape(group.rows, heads, head_dim), None
        out, weights = softmax_attention_with_sums(grouped, k, v, mask, now.how)
        return out.reshape(group.rows, heads, head_dim), weights.reshape(group.rows, heads, 2)


def _chunk(paging: PagedMetadata, table: Tensor, row: int, now: Tokens, sums: bool) -> tuple[Tensor, Tensor | None]:
    """Attend with a chunk of one prompt over the pages in `table`.

    Returns [tokens of the chunk, heads, head_dim]; with `sums`, also [tokens of the chunk, heads, 2].
    """
    how, span, held = now.how, paging.spans[row], paging.reach(row)
    q = now.query[span.lo : span.hi].transpose(0, 1)[None]
    whole = (
        not sums
        and paging.held is None
        and span.start == 0
        and how.softcap is None
        and (how.window is None or span.length <= how.window)
    )
    if whole:
        k, v = (x[span.lo : span.hi].transpose(0, 1)[None] for x in (now.key, now.value))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=how.scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out[0].transpose(0, 1), None
    pages = table[: -(-held // paging.page_tokens)].contiguous()
    k, v = (x[:held].transpose(0, 1)[None] for x in paging.view(now.key).gather(pages, paging.pool))
    mask = _chunk_mask(span, held, how.window, now.query)
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    if not sums:
        return softmax_attention(q, k, v, mask, how)[0].transpose(0, 1), None
    out, weights = softmax_attention_with_sums(q, k, v, mask, how)
    return out[0].transpose(0, 1), weights[0].transpose(0, 1)


def _chunk_mask(span: RowSpan, held: int, window: int | None, like: Tensor) -> Tensor:
    """Return the additive mask [chunk, held]: causal from the chunk's first position on, within the window."""
    at = torch.arange(held, device=like.device)
    mine = torch.arange(span.start, span.length, device=like.device)[:, None]
    hidden = at > mine
    if window is not None:
        hidden |= at <= mine - window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))


def _groups(paging: PagedMetadata) -> Iterator[DecodeGroup]:
    """Group decode rows by similar length, so that padding to the longest wastes little."""
    spans, tables = paging.spans, paging.tables
    decodes = [row for row, span in enumerate(spans) if span.hi - span.lo == 1]
    for rows in _split(decodes, [paging.reach(row) for row in decodes]):
        groups = -(-max(paging.reach(row) for row in rows) // paging.page_tokens)
        everything = len(rows) == len(spans)
        index = None if everything else put(rows, tables.device)
        whole = everything and paging.tokens is None
        chosen = tables if index is None else tables[index]
        some = paging.tokens if everything else put([spans[row].lo for row in rows], tables.device)
        yield DecodeGroup(
            tokens=None if whole else some,
            rows=len(rows),
            width=groups * paging.page_tokens,
            pages=chosen[:, :, :groups].transpose(0, 1).reshape(tables.shape[1], -1),
            lengths=paging.lengths if index is None else paging.lengths[index],
        )


def _split(rows: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Split rows by length, longest first, wherever a row is much shorter than its group's longest.

    A group keeps the given order.
    """
    order = sorted(range(len(rows)), key=lambda i: -lengths[i])
    made = 0
    group: list[int] = []
    for i in order:
        if group and lengths[i] < _GROUP_RATIO * lengths[group[0]] and made < MAX_GROUPS - 1:
            yield [rows[j] for j in sorted(group)]
            group, made = [], made + 1
        group.append(i)
    if group:
        yield [rows[j] for j in sorted(group)]
