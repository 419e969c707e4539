"""Rotary tables looked up instead of computed, for the kinds of scaling with angles that depend on the position alone.

Memory: one row of cos and one of sin per position, for the next power of two of the highest position requested.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: Kinds (transformers' `rope_type`) with angles that do not change with the sequence length.
_FIXED = frozenset({"default", "linear", "llama3", "yarn"})
_FIRST = 256


class RotaryTables(nn.Module):
    """A lookup table in place of transformers' rotary module.

    (like, positions [1, tokens]) -> (cos, sin) [1, tokens, width] in the dtype of `like`.
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
        """Return (cos, sin) [positions, width] for at least `most` positions, in the dtype of `like`."""
        key = (like.dtype, like.device)
        tables = self._tables.get(key)
        if tables is None or most > tables[0].shape[0]:
            size = max(_FIRST, 1 << (most - 1).bit_length())
            cos, sin = self.stock(like, torch.arange(size, device=like.device)[None])
            tables = self._tables[key] = cos[0].contiguous(), sin[0].contiguous()
        return tables


def looked_up(stock: nn.Module) -> nn.Module:
    """Return the module with lookup tables if its angles are fixed, else the module itself."""
    return RotaryTables(stock) if getattr(stock, "rope_type", None) in _FIXED else stock
