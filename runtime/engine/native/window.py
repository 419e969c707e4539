"""Attention over a dense batch's store with the kernels: a window's tokens alone, each against the cells of its row that hold its sequence.

To the kernels a cell is a page of one token, and a row's table says in which column each position stands: neither placeholders nor the
window's padding is read or computed. A row's result does not depend on how wide the window is, or who else is in it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from runtime.engine.attention import Tokens
from runtime.engine.native.calls import MOST_HEADS, MOST_WIDTH, Chunk, Chunks, Kernels, Pool, back_to_back


class Windowed(Protocol):
    """What is read of a window (`engine.slab`): by row how many tokens it has there and the position of the first, and all their cells."""

    @property
    def counts(self) -> tuple[int, ...]: ...

    @property
    def starts(self) -> tuple[int, ...]: ...

    @property
    def cells(self) -> Tensor: ...


class NativeWindow:
    """One window, for all layers.

    Args:
        places: [rows, columns], the position of the token in each cell, -1 for placeholders; the window included.
    """

    def __init__(self, kernels: Kernels, window: Windowed, places: Tensor) -> None:
        self._kernels = kernels
        rows, columns = places.shape
        cells = torch.arange(rows * columns).view(rows, columns)
        # Position p of a row goes to p + 1, and all placeholders to 0, which nobody reads.
        table = torch.empty((rows, columns + 1), dtype=torch.int64)
        self._tables = table.scatter_(1, places + 1, cells)[:, 1:]
        self._cells = window.cells
        self._offsets = torch.zeros_like(self._cells)
        decodes: list[tuple[int, int, int]] = []
        prompts: list[Chunk] = []
        at = 0
        for row, (count, start) in enumerate(zip(window.counts, window.starts, strict=True)):
            if count == 1:
                decodes.append((at, row, start + 1))
            elif count:
                prompts.append(Chunk(at, count, start, row))
            at += count
        self._prompts = Chunks(prompts)
        self._tokens, self._rows, self._lengths = torch.tensor(decodes, dtype=torch.int64).reshape(-1, 3).t().contiguous()

    def attend(self, k: Tensor, v: Tensor, now: Tokens) -> Tensor:
        """Keep K and V of the window's tokens in a layer's store [rows, columns, kv_heads, head_dim], then attend.

        Returns:
            [tokens, heads, head_dim].
        """
        pool = Pool(k.view(-1, 1, *k.shape[2:]), v.view(-1, 1, *v.shape[2:]), self._tables)
        self._kernels.keep(pool, self._cells, self._offsets, now.key, now.value)
        out = torch.empty(now.query.shape)
        terms = (now.how.factor(now.query.shape[2]), now.how.window or 0, now.how.softcap or 0.0)
        if self._lengths.numel():
            self._kernels.decode(now.query, pool, self._lengths, out, *terms, self._tokens, self._rows)
        if self._prompts.count:
            self._kernels.chunks(now.query, pool, self._prompts, out, *terms)
        return out


def takes(now: Tokens) -> bool:
    """Whether heads lie as the kernels read them, and are not too many or too wide for what those keep on the stack."""
    _, heads, width = now.query.shape
    return all(back_to_back(x) for x in now[:3]) and heads <= MOST_HEADS and width <= MOST_WIDTH
