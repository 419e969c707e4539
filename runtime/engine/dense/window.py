"""What runs of a dense batch in one step: a rectangle of columns, some of whose places hold tokens, and which of them
are computed.

Whoever opens a window says that: all of it, as in the paper, or its tokens, padding then being there in shape only.
Knows positions and counts; nothing of K and V.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class WindowPlace:
    """Of a row of a window, among what is computed: its `count` tokens, from number `at` on and from position `start`,
    and `empty` places beside them, from number `empty_at` on.
    """

    row: int
    at: int
    count: int
    start: int
    empty_at: int
    empty: int


@dataclass
class Window:
    """The tokens that run now: `columns` of the store, and positions [rows, width], -1 where a row has nothing there.

    `fresh`: rows whose first tokens these are; theirs stand at the window's end, others' at its beginning. `filled`:
    rows that have nothing to run, and one place of which is computed; None where every place of the window is.
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
        """Which of the places [rows * width] are computed; None for all."""
        if self.filled is None or self.padding is None:
            return None
        wanted = ~self.padding
        wanted[sorted(self.filled), 0] = True
        return wanted.reshape(-1).nonzero()[:, 0]

    @cached_property
    def tokens(self) -> Tensor | None:
        """Which of what is computed are tokens; None for all."""
        if not any(place.empty for place in self.places):
            return None
        return torch.tensor(
            [at for one in self.places for at in range(one.at, one.at + one.count)], device=self.positions.device
        )

    @cached_property
    def cells(self) -> Tensor:
        """Where tokens are kept, among all cells [rows * columns] of a layer's store."""
        rows = torch.arange(len(self.counts), device=self.positions.device)[:, None] * self.capacity
        columns = torch.arange(self.capacity, device=self.positions.device)[self.columns]
        cells = (rows + columns).reshape(-1)
        return cells if self.padding is None else cells[~self.padding.reshape(-1)]
