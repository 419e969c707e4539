"""Rotary tables looked up instead of computed: an angle depends on its position alone, in all but a few kinds of
scaling.

Memory: one row of cos and one of sin per position that was ever asked for, and at most twice as many.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: Kinds (transformers' `rope_type`) whose angles do not change with the length of what is run.
_FIXED = frozenset({"default", "linear", "llama3", "yarn"})
_FIRST = 256


class RotaryTables(nn.Module):
    """(like, positions [1, tokens]) -> (cos, sin) [1, tokens, width] in the dtype of `like`, as transformers' module
    gives them.
    """

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.stock = stock
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def forward(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        tables = self.upto(like, int(positions.max()) + 1)
        flat = positions.reshape(-1)
        shape = (*positions.shape, tables[0].shape[1])
        return tables[0].index_select(0, flat).view(shape), tables[1].index_select(0, flat).view(shape)

    def upto(self, like: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) [positions, width] of `most` positions or more, in the dtype of `like`."""
        key = (like.dtype, like.device)
        tables = self._tables.get(key)
        if tables is None or most > tables[0].shape[0]:
            size = max(_FIRST, 1 << (most - 1).bit_length())
            cos, sin = self.stock(like, torch.arange(size, device=like.device)[None])
            tables = self._tables[key] = cos[0].contiguous(), sin[0].contiguous()
        return tables


def looked_up(stock: nn.Module) -> nn.Module:
    """The module with tables where its angles are fixed; itself where they are not."""
    return RotaryTables(stock) if getattr(stock, "rope_type", None) in _FIXED else stock
