"""The tensors of a dense batch: K and V of all its rows by layer, in a left-padded ring of columns.

    k, v of a layer    [rows, columns, kv_heads, head_dim]
    places             [rows, columns] -> position of the token there, -1 for a placeholder

The attention mask follows from positions alone (BA-02): a query at position p sees the cells of its row with positions
of at most p. So columns need no order and rows no common start. Placeholders are never seen; they are zero, because
masked NaN is still NaN (BA-04). `kv.columns` keeps track of where columns are. This module does not deal with
sequences or models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.engine.attention.interface import AttentionSettings, Tokens, softmax_attention
from runtime.engine.dense.window import Window
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.dense_attention import NativeOnes, NativeWindow, takes
from runtime.kv.columns import Columns


@dataclass(slots=True)
class SavedKV:
    """K and V of one sequence outside of any batch: per layer [tokens, kv_heads, head_dim]."""

    tokens: int
    k: list[Tensor]
    v: list[Tensor]


class TokenLayout(NamedTuple):
    """K or V of one token in one layer."""

    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.heads * self.head_dim * self.dtype.itemsize


class KVLayout(NamedTuple):
    """K and V of one token in one layer."""

    k: TokenLayout
    v: TokenLayout


class DenseKV:
    """K and V of one dense batch, with at most one open window.

    Call `begin` to open a window, then `write` or `attend` in every layer.
    """

    def __init__(self, layers: int, device: torch.device) -> None:
        self.columns = Columns()
        self._device = device
        self._k: list[Tensor | None] = [None] * layers
        self._v: list[Tensor | None] = [None] * layers
        self._places = torch.empty((0, 0), dtype=torch.int64, device=device)
        self._window: Window | None = None
        self._keys: Tensor | None = None
        self._native: NativeWindow | None = None
        self._ones: NativeOnes | None = None

    @property
    def stored_rows(self) -> int:
        """Rows that there is room for."""
        return int(self._places.shape[0])

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self._k, *self._v) if x is not None)

    @property
    def window(self) -> Window:
        if self._window is None:
            raise RuntimeError("no window runs")
        return self._window

    @property
    def keys(self) -> Tensor:
        """Positions of all stored cells [rows, columns], those of the window included.

        All layers of a window get the same tensor.
        """
        if self._keys is None:
            self._keys = self._places[: self.columns.rows].clone()
        return self._keys

    def layouts(self) -> list[KVLayout]:
        """Return the layout of each layer's K and V. Raises ValueError for a layer that has kept nothing yet."""
        made: list[KVLayout] = []
        for k, v in zip(self._k, self._v, strict=True):
            if k is None or v is None:
                raise ValueError("a layer has kept nothing yet, so its shape is not known")
            made.append(KVLayout(_layout(k), _layout(v)))
        return made

    # -- rows ----------------------------------------------------------------------------------------------------------

    def shape(self, rows: int, columns: int) -> None:
        """Resize the store; its contents move to the beginning. Only one layer at a time is held twice."""
        if (rows, columns) == (self.stored_rows, self.columns.capacity):
            return
        held, length = self.columns.rows, self.columns.length
        old = torch.tensor(self.columns.physical(length), dtype=torch.int64, device=self._device)
        for store in (self._k, self._v):
            for layer, x in enumerate(store):
                if x is not None:
                    store[layer] = x.new_zeros((rows, columns, *x.shape[2:]))
                    _given(store[layer])[:held, :length] = x[:held].index_select(1, old)
        places = torch.full((rows, columns), -1, dtype=torch.int64, device=self._device)
        places[:held, :length] = self._places[:held].index_select(1, old)
        self._places = places
        self.columns.move(columns)

    def enter(self, kept: SavedKV | None) -> int:
        """Add a row with saved K and V, aligned to the end (BA-09), or an empty one. Returns its number.

        The K and V in `kept` are freed layer by layer.
        """
        row = self.columns.enter(0 if kept is None else kept.tokens)
        if kept is not None and kept.tokens:
            at = self._index(self.columns.physical(kept.tokens))
            for layer in range(len(self._k)):
                for store, given in ((self._k, kept.k), (self._v, kept.v)):
                    self._layer_store(store, layer, given[layer])[row, at] = given[layer].to(self._device)
                    given[layer] = given[layer][:0]
            self._places[row, at] = torch.arange(kept.tokens, device=self._device)
        return row

    def copy_row(self, row: int) -> SavedKV:
        """Return a copy of a row's K and V, without placeholders."""
        at = torch.tensor(self.columns.physical(self.columns.span(row)), dtype=torch.int64, device=self._device)
        at = at[self._places[row, at] >= 0]
        k, v = (
            [_given(x)[row].index_select(0, at) for x in store] if at.numel() else [] for store in (self._k, self._v)
        )
        return SavedKV(int(at.numel()), k, v)

    def drain(self) -> list[SavedKV]:
        """Return the K and V of every row, without placeholders. Only one layer at a time is held twice.

        The store is unusable afterwards.
        """
        found = []
        for row in range(self.columns.rows):
            at = torch.tensor(self.columns.physical(self.columns.span(row)), dtype=torch.int64, device=self._device)
            found.append(at[self._places[row, at] >= 0])
        kept = [SavedKV(int(at.numel()), [], []) for at in found]
        for layer in range(len(self._k)):
            for row, at in enumerate(found):
                kept[row].k.append(_given(self._k[layer])[row].index_select(0, at))
                kept[row].v.append(_given(self._v[layer])[row].index_select(0, at))
            self._k[layer] = self._v[layer] = None
        return kept

    def remove_row(self, row: int) -> int:
        """Remove a row; the last row takes its number, and the freed cells become zeroed placeholders.

        Returns the number that the last row had.
        """
        last = self.columns.remove_row(row)
        for x in (*self._k, *self._v, self._places):
            if x is not None:
                if last != row:
                    x[row] = x[last]
                x[last] = -1 if x is self._places else 0
        return last

    # -- a window ------------------------------------------------------------------------------------------------------

    def begin(self, counts: Sequence[int], starts: Sequence[int], filled: Iterable[int] | None = None) -> Window:
        """Open a window: `counts[row]` tokens from position `starts[row]` on; 0 for rows with nothing to run.

        Args:
            filled: rows without tokens that nevertheless have one place computed; None computes every place of the
                window.

        Raises NoRoom.
        """
        fresh = frozenset(row for row in range(self.columns.rows) if not self.columns.span(row))
        width = self.columns.advance(counts)
        at = self._index(self.columns.physical(width))
        positions = [
            [*([-1] * (width - count)), *range(start, start + count)]
            if row in fresh
            else [*range(start, start + count), *([-1] * (width - count))]
            for row, (count, start) in enumerate(zip(counts, starts, strict=True))
        ]
        made = torch.tensor(positions, dtype=torch.int64, device=self._device)
        padding = None if all(count == width for count in counts) else made < 0
        self._places[: len(counts), at] = made
        self._keys = None
        filled = None if filled is None else frozenset(filled)
        self._window = Window(at, made, tuple(counts), fresh, padding, tuple(starts), self.columns.capacity, filled)
        self._native = self._ones = None
        return self._window

    def ones(self) -> NativeOnes | None:
        """Return the open window for kernels that run whole layers; None if it is wider than one place."""
        if self.window.width != 1:
            return None
        if self._ones is None:
            self._ones = NativeOnes(self.window, self._places[: self.columns.rows], self._stores)
        return self._ones

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store K and V of the window and return all of the layer's.

        Takes [rows, kv_heads, width, head_dim] and returns [rows, kv_heads, columns, head_dim], each for K and V.
        """
        window, rows = self.window, self.columns.rows
        out = []
        for store, given in ((self._k, key.transpose(1, 2)), (self._v, value.transpose(1, 2))):
            if window.padding is not None:
                given = given.masked_fill(window.padding[:, :, None, None], 0)
            kept = self._layer_store(store, layer, given)[:rows]
            kept[:, window.columns] = given
            out.append(kept.transpose(1, 2))
        return out[0], out[1]

    def mask(self, sliding: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [rows, 1, width, columns]: 0 where a token may attend, else minus infinity.

        Padding attends to everything: its results are not read, but they must not be NaN.
        """
        window = self.window
        made = window._masks.get((sliding, dtype))
        if made is None:
            keys, mine = self.keys[:, None, :], window.positions[:, :, None]
            hidden = (keys < 0) | (keys > mine)
            if sliding is not None:
                hidden |= keys <= mine - sliding
            if window.padding is not None:
                hidden &= ~window.padding[:, :, None]
            made = torch.zeros(hidden.shape, dtype=dtype, device=self._device).masked_fill_(hidden, float("-inf"))[
                :, None
            ]
            window._masks[sliding, dtype] = made
        return made

    def attend(self, layer: int, now: Tokens, kernels: Kernels | None = None) -> Tensor:
        """Store K and V of the window's tokens, then attend with all computed places, row by row.

        Takes and returns [computed, heads, head_dim]. Results of empty places are finite and meaningless.
        """
        k, v = self._stores(layer, now.key)
        window, rows = self.window, self.columns.rows
        if kernels is not None and takes(now):
            if self._native is None:
                self._native = NativeWindow(kernels, window.places, window.tokens, window.cells, self._places[:rows])
            return self._native.attend(k, v, now)
        for x, given in ((k, now.key), (v, now.value)):
            x.view(-1, *given.shape[1:])[window.cells] = given if window.tokens is None else given[window.tokens]
        query = now.query
        if window.computed is not None:
            query = query.new_zeros((rows * window.width, *query.shape[1:]))
            query[window.computed] = now.query
        k, v = (x[:rows].transpose(1, 2) for x in (k, v))
        out = _grouped(query, k, v, self.mask(now.how.window, query.dtype), now.how)
        return out if window.computed is None else out[window.computed]

    # -- inside --------------------------------------------------------------------------------------------------------

    def _stores(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        return self._layer_store(self._k, layer, like), self._layer_store(self._v, layer, like)

    def _layer_store(self, store: list[Tensor | None], layer: int, like: Tensor) -> Tensor:
        """Return a layer's K or V tensor, created at the first write because layers of one model may differ in heads.

        `like`: [.., kv_heads, head_dim].
        """
        if store[layer] is None:
            shape = (self.stored_rows, self.columns.capacity, *like.shape[-2:])
            store[layer] = torch.zeros(shape, dtype=like.dtype, device=self._device)
        return _given(store[layer])

    def _index(self, columns: list[int]) -> slice | Tensor:
        """Return columns as a slice where they are contiguous, else as an index tensor."""
        if columns and columns[-1] - columns[0] == len(columns) - 1:
            return slice(columns[0], columns[-1] + 1)
        return torch.tensor(columns, dtype=torch.int64, device=self._device)


def _grouped(query: Tensor, k: Tensor, v: Tensor, mask: Tensor, how: AttentionSettings) -> Tensor:
    """Attend with the query heads of a KV head stacked as queries of that head, so K and V are not repeated."""
    rows, kv_heads, columns, head_dim = k.shape
    width = mask.shape[2]
    heads = query.shape[1]
    group = heads // kv_heads
    q = (
        query.view(rows, width, kv_heads, group, head_dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(rows, kv_heads, group * width, head_dim)
    )
    seen = (
        mask if group == 1 else mask[:, :, None].expand(-1, -1, group, -1, -1).reshape(rows, 1, group * width, columns)
    )
    out = softmax_attention(q, k, v, seen, how)
    return (
        out.view(rows, kv_heads, group, width, head_dim).permute(0, 3, 1, 2, 4).reshape(rows * width, heads, head_dim)
    )


def _layout(x: Tensor) -> TokenLayout:
    return TokenLayout(int(x.shape[-2]), int(x.shape[-1]), x.dtype)


def _given(x: Tensor | None) -> Tensor:
    if x is None:
        raise RuntimeError("this layer has kept nothing")
    return x
