"""Attention over a dense batch's KV store with the kernels.

Each computed place of a window attends to the cells of its row that hold tokens. To the kernels a cell is a page of one
token, and a row's table maps positions to cells, so placeholders are not read. A row's result depends neither on the
window's width nor on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from runtime.engine.attention.interface import Tokens
from runtime.engine.dense.window import Window, WindowPlace
from runtime.engine.kernels.bindings import Kernels, back_to_back
from runtime.engine.kernels.operands import Pool, PromptChunk, PromptChunks
from runtime.engine.kernels.signatures import MOST_HEADS, MOST_WIDTH, StepData


class NativeWindow:
    """One window, for all layers.

    Args:
        rows: the computed places by row. Empty places attend to all tokens of their row.
        tokens: indices of tokens among the computed places; None for all.
        cells: the cells of these tokens.
        places: [rows, columns], the position of the token in each cell, -1 for placeholders; includes the window.
    """

    def __init__(
        self, kernels: Kernels, rows: Sequence[WindowPlace], tokens: Tensor | None, cells: Tensor, places: Tensor
    ) -> None:
        self._kernels = kernels
        self._tables = _tables(places)
        self._kept, self._cells, self._offsets = tokens, cells, torch.zeros_like(cells)
        lengths = [] if tokens is None else (places.amax(1) + 1).tolist()
        decodes: list[tuple[int, int, int]] = []
        prompts: list[PromptChunk] = []
        for one in rows:
            if one.count == 1:
                decodes.append((one.at, one.row, one.start + 1))
            elif one.count:
                prompts.append(PromptChunk(one.at, one.count, one.start, one.row))
            decodes.extend((one.empty_at + i, one.row, lengths[one.row]) for i in range(one.empty))
        self._prompts = PromptChunks(prompts)
        self._tokens, self._rows, self._lengths = (
            torch.tensor(decodes, dtype=torch.int64).reshape(-1, 3).t().contiguous()
        )

    def attend(self, k: Tensor, v: Tensor, now: Tokens) -> Tensor:
        """Store K and V of the window's tokens in a layer's store [rows, columns, kv_heads, head_dim], then attend.

        Returns:
            [computed, heads, head_dim].
        """
        pool = Pool(k.view(-1, 1, *k.shape[2:]), v.view(-1, 1, *v.shape[2:]), self._tables)
        key, value = (x if self._kept is None else x[self._kept] for x in (now.key, now.value))
        self._kernels.write_kv(pool, self._cells, self._offsets, key, value)
        out = torch.empty(now.query.shape)
        terms = (now.how.factor(now.query.shape[2]), now.how.window or 0, now.how.softcap or 0.0)
        if self._lengths.numel():
            self._kernels.decode(now.query, pool, self._lengths, out, *terms, self._tokens, self._rows)
        if self._prompts.count:
            self._kernels.chunks(now.query, pool, self._prompts, out, *terms)
        return out


class NativeOnes:
    """A window one place wide, for programs of whole layers: `engine.kernels.program.Cells`.

    Each computed row has one place.

    Args:
        places: as for `NativeWindow`.
        stores: returns K and V of a layer, [rows, columns, kv_heads, head_dim], created if necessary.
    """

    def __init__(self, window: Window, places: Tensor, stores: Callable[[int, Tensor], tuple[Tensor, Tensor]]) -> None:
        cells = torch.arange(places.shape[0]) * window.capacity + torch.arange(window.capacity)[window.columns]
        rows = window.computed
        tables, lengths = (
            _tables(places),
            torch.tensor(window.starts) + 1 if window.padding is None else places.amax(1) + 1,
        )
        self._stores = stores
        self._tables, self.lengths, self._cells = (x if rows is None else x[rows] for x in (tables, lengths, cells))
        self._offsets = torch.zeros_like(self._cells)
        self._empty = None if window.tokens is None or window.padding is None else cells[window.padding[:, 0]]

    def put(self, step: StepData, layer: int, like: Tensor) -> None:
        k, v = self._stores(layer, like)
        step.k_pool, step.v_pool, step.page_stride, step.page_tokens = k.data_ptr(), v.data_ptr(), k.stride(1), 1
        step.token_pages, step.token_offsets, step.lengths = (
            self._cells.data_ptr(),
            self._offsets.data_ptr(),
            self.lengths.data_ptr(),
        )
        step.tables, step.table_stride = self._tables.data_ptr(), self._tables.stride(0)

    def clear(self, layers: Iterable[int], like: Tensor) -> None:
        """Zero what the layers wrote to empty places: placeholders must be zero."""
        if self._empty is not None:
            for layer in layers:
                for x in self._stores(layer, like):
                    x.view(-1, *x.shape[2:])[self._empty] = 0


def _tables(places: Tensor) -> Tensor:
    """Return a table [rows, columns] from positions to cells among all [rows * columns]."""
    count, columns = places.shape
    # Position p of a row goes to p + 1, and all placeholders to 0, which is cut off.
    table = torch.empty((count, columns + 1), dtype=torch.int64)
    return table.scatter_(1, places + 1, torch.arange(count * columns).view(count, columns))[:, 1:]


def takes(now: Tokens) -> bool:
    """Return whether the kernels support these heads: memory layout, number, width and scaling."""
    _, heads, width = now.query.shape
    return (
        all(back_to_back(x) for x in now[:3])
        and heads <= MOST_HEADS
        and width <= MOST_WIDTH
        and now.how.factor(width) > 0.0
    )
