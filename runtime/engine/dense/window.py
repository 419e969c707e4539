"""The window of a dense batch: the rectangle of columns that one step runs, and which of its places are computed.

Either all places are computed, as in the paper, or only tokens, and padding exists in the shape only; the caller that
opens a window chooses. This module deals with positions and counts only, not with K and V.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class WindowPlace:
    """One row's part of a window.

    Fields:
        row: The row.
        at: Index of its first token among the computed places.
        count: Its tokens.
        start: Position of its first token.
        empty_at: Index of its first empty place among the computed places.
        empty: Its empty places that are computed.
    """

    row: int
    at: int
    count: int
    start: int
    empty_at: int
    empty: int


@dataclass
class Window:
    """The tokens that run in this step.

    Fields:
        columns: The columns of the KV store that they take.
        positions: Positions [rows, width]; -1 where a row has no token.
        counts: Tokens of each row.
        fresh: Rows that run their first tokens. Their tokens are at the window's end, those of other rows at its
            beginning.
        padding: Mask [rows, width] of places without a token; None if there are none.
        starts: Position of the first token of each row.
        capacity: Columns of the KV store.
        filled: Rows without tokens that have one place computed; None if every place of the window is computed.
    """

    columns: slice | Tensor
    positions: Tensor
    counts: tuple[int, ...]
    fresh: frozenset[int]
    padding: Tensor | None
    starts: tuple[int, ...]
    capacity: int
    filled: frozenset[int] | None = None
    _masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return int(self.positions.shape[1])

    @cached_property
    def places(self) -> tuple[WindowPlace, ...]:
        """What is computed, row by row."""
        found, at = [], 0
        for row, (count, start) in enumerate(zip(self.counts, self.starts, strict=True)):
            empty = self.width - count if self.filled is None else int(row in self.filled)
            front = empty if row in self.fresh else 0
            found.append(WindowPlace(row, at + front, count, start, at if front else at + count, empty))
            at += count + empty
        return tuple(found)

    @cached_property
    def computed(self) -> Tensor | None:
        """Indices of the computed places among all places [rows * width]; None for all."""
        if self.filled is None or self.padding is None:
            return None
        wanted = ~self.padding
        wanted[sorted(self.filled), 0] = True
        return wanted.reshape(-1).nonzero()[:, 0]

    @cached_property
    def tokens(self) -> Tensor | None:
        """Indices of tokens among the computed places; None for all."""
        if not any(place.empty for place in self.places):
            return None
        return torch.tensor(
            [at for one in self.places for at in range(one.at, one.at + one.count)], device=self.positions.device
        )

    @cached_property
    def cells(self) -> Tensor:
        """Indices of the tokens' cells among all cells [rows * columns] of a layer's store."""
        rows = torch.arange(len(self.counts), device=self.positions.device)[:, None] * self.capacity
        columns = torch.arange(self.capacity, device=self.positions.device)[self.columns]
        cells = (rows + columns).reshape(-1)
        return cells if self.padding is None else cells[~self.padding.reshape(-1)]
