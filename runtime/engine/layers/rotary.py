"""Rotary tables looked up instead of computed, for the kinds of scaling with angles that depend on the position alone.

Memory: one row of cos and one of sin per position, for the next power of two of the highest position requested.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Kinds (transformers' `rope_type`) with angles that do not change with the sequence length.
_FIXED = frozenset({"default", "linear", "llama3", "yarn"})
#: Positions of one call. Torch's cosine and sine depend on where a value stands in a large tensor.
_PIECE = 256


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
            size = max(_PIECE, 1 << (most - 1).bit_length())
            tables = self._tables[key] = _angles(self.stock, like, torch.arange(size, device=like.device))
        return tables


class PiecewiseRotary(nn.Module):
    """transformers' rotary module on a CPU, called on pieces of one size: a token's angles do not depend on the others.

    For kinds of scaling with angles that depend on the highest position. They are served up to the length from which on
    the angles change.
    """

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.stock = stock

    def forward(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = _angles(self.stock, like, positions.reshape(-1))
        shape = (*positions.shape, cos.shape[1])
        return cos.view(shape), sin.view(shape)


def _angles(stock: nn.Module, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), each [positions, width], from calls with `_PIECE` positions, the last filled up with zeros."""
    count = positions.numel()
    pieces = torch.split(F.pad(positions, (0, -count % _PIECE)), _PIECE)
    made = [stock(like, piece[None]) for piece in pieces]
    cos, sin = (torch.cat([angles[at][0] for angles in made])[:count].contiguous() for at in (0, 1))
    return cos, sin


def looked_up(stock: nn.Module) -> nn.Module:
    """Return the module with lookup tables if its angles are fixed, else in pieces."""
    return RotaryTables(stock) if getattr(stock, "rope_type", None) in _FIXED else PiecewiseRotary(stock)
