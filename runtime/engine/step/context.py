"""Describe the rows of a running segment: their positions, their pages and their adapters.

A `ForwardContext` is current while its segment runs. It is a context variable, because transformers' layers drop
keyword arguments on the way to the attention function (facts, "Cutting transformers models").
`runtime.engine.step.layout` makes contexts; attention and shared linear layers read them.

    tokens   t:  0 1 2 3 4 5 6 ...       rows of all models, back to back; a decode has one token, a chunk several
    tables   [rows, layers, page groups] -> page id       token_pages [layers, tokens] -> page of each token
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
from torch import Tensor

from runtime.kv.pool import Geometry, PagePool, PageView
from runtime.types import SentAway

if TYPE_CHECKING:
    from runtime.engine.attention.interface import Tokens


class RowSpan(msgspec.Struct, frozen=True, gc=False):
    """One row: tokens [lo, hi) of the context, at positions start, start + 1, …"""

    lo: int
    hi: int
    start: int

    @property
    def length(self) -> int:
        """Tokens of the sequence after this row has run."""
        return self.start + self.hi - self.lo

    def moved(self, by: int) -> RowSpan:
        """Return the same row, `by` tokens further on."""
        return RowSpan(self.lo + by, self.hi + by, self.start) if by else self


@dataclass(frozen=True, slots=True)
class AdapterSpan:
    """Tokens [lo, hi) of the context, which use one adapter."""

    adapter: str
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class VirtualSpan:
    """Tokens [lo, hi) of the context, which are an adapter's virtual tokens number start, start + 1, …"""

    adapter: str
    lo: int
    hi: int
    start: int

    @property
    def source(self) -> slice:
        """Which of the adapter's virtual tokens they are."""
        return slice(self.start, self.start + self.hi - self.lo)


@dataclass(frozen=True, slots=True)
class AwayRow:
    """A row of which other devices hold page sets (IL-04).

    Fields:
        row: Its index in the paging.
        shift: Number of its attention layers before the first one of the paging.
        loans: What they hold, the first tokens first.
    """

    row: int
    shift: int
    loans: tuple[SentAway, ...]

    def at_layer(self, layer: int) -> AwayRow:
        """Return it with what other devices hold of a layer of the paging alone."""
        at = layer + self.shift
        return replace(self, loans=tuple(loan for loan in self.loans if loan.layers[0] <= at < loan.layers[1]))

    @property
    def tokens(self) -> int:
        """How many of its tokens are on other devices: all before those that it computes."""
        return sum(loan.last - loan.first for loan in self.loans)

    def groups_here(self, groups: int, width: int) -> list[int]:
        """Return the numbers of those of its first page sets, of `width` tokens each, that are here."""
        away = {at for loan in self.loans for at in range(loan.first // width, loan.last // width)}
        return [at for at in range(groups) if at not in away]


@dataclass(frozen=True, slots=True)
class PagedMetadata:
    """The pages of a context's tokens, for those of its models that share one page size.

    Fields:
        page_tokens: Tokens in a page.
        tokens: Indexes of the tokens in the context; None for all of them.
        spans: The rows, in the order of `tables` and `lengths`.
        tables: Page ids [rows, layers, page groups].
        lengths: Tokens of each row after this step [rows].
        token_pages: Page that each token is written to [layers, tokens].
        token_offsets: Slot of each token in its page [tokens].
        held: Tokens in the pages of each row, where that is not all of them up to the span's end: a token of a row
            attends to these as far as they come before it or are its own (IL-01).
        away: The rows of which other devices hold page sets; these have padding in `tables`.
    """

    pool: PagePool
    page_tokens: int
    tokens: Tensor | None
    spans: tuple[RowSpan, ...]
    tables: Tensor
    lengths: Tensor
    token_pages: Tensor
    token_offsets: Tensor
    held: tuple[int, ...] | None = None
    away: tuple[AwayRow, ...] = ()

    def is_away(self, layer: int) -> bool:
        """Return whether other devices hold page sets of any row in this layer."""
        return any(row.at_layer(layer).loans for row in self.away)

    def reach(self, row: int) -> int:
        """Return how many tokens of its pages a row's last token attends to; as in `lengths`."""
        length = self.spans[row].length
        return length if self.held is None else min(length, self.held[row])

    @property
    def chunks(self) -> Iterator[tuple[int, RowSpan]]:
        """Rows with more than one token: (index in the tables, span)."""
        return ((row, span) for row, span in enumerate(self.spans) if span.hi - span.lo > 1)

    def view(self, like: Tensor) -> PageView:
        """Return the pool's pages in the geometry of a layer with K shaped like `like`.

        Layers of one model may differ in geometry.
        """
        _, heads, width = like.shape
        return self.pool.view(Geometry(heads, width, like.dtype), self.page_tokens)

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write K and V to a layer's pages. `key`, `value`: [tokens of the context, kv_heads, head_dim]."""
        if self.tokens is not None:
            key, value = key[self.tokens], value[self.tokens]
        self.view(key).write(self.token_pages[layer], self.token_offsets, key, value)


class AttentionBackend(Protocol):
    """One implementation of attention over pages, for one paging. `engine.attention.gathered` runs on any device."""

    @property
    def paging(self) -> PagedMetadata: ...

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write K and V of the paging's tokens [tokens, kv_heads, head_dim] to a layer's pages."""
        ...

    def decode(self, layer: int, now: Tokens, out: Tensor, sums: Tensor | None = None) -> None:
        """Compute attention of all rows with one token, into their places of `out` [tokens, heads, head_dim].

        `sums`, if given, float64 [tokens, heads, 2], gets their sums and exponents, and `out`, float64, what is not
        divided by them (`engine.attention.partial`).
        """
        ...

    def chunks(self, layer: int, now: Tokens, out: Tensor, sums: Tensor | None = None) -> None:
        """Compute attention of the tokens of all other rows, into their places of `out` and `sums`."""
        ...


#: Makes the attention over pages of a device.
PagedMaker = Callable[[PagedMetadata], AttentionBackend]


class Dense(Protocol):
    """The dense batches of a context's models, set to the layer that runs now."""

    def attend(self, now: Tokens) -> Tensor:
        """Store K and V of the context's tokens and compute attention; return [tokens, heads, head_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterMix:
    """Which adapter each token uses, as a tensor: for a recorded step over rows of any models with the same chain.

    Fields:
        names: Adapters that a token may use.
        index: For each token [tokens] the index of its adapter in `names`; their number if it uses none.
    """

    names: tuple[str, ...]
    index: Tensor

    @property
    def spans(self) -> tuple[AdapterSpan, ...]:
        """Empty spans that only name the adapters."""
        return tuple(AdapterSpan(name, 0, 0) for name in self.names)

    def among(self, adapters: tuple[str, ...]) -> Tensor:
        """Return for each token the index of its adapter in `adapters`; their number if it is none of them."""
        places = torch.full((len(self.names) + 1,), len(adapters), device=self.index.device)
        for at, name in enumerate(self.names):
            if name in adapters:
                places[at].fill_(adapters.index(name))  # on the device: a copy from the host cannot be recorded
        return places[self.index]


#: Joined adapters that a recorded step keeps, by cache and adapter names (`engine.adapters.stack_cache`).
Kept = dict[tuple[object, tuple[str, ...]], Any]


@dataclass(slots=True)
class ForwardContext:
    """The rows of a running segment (see the top of the file).

    Fields:
        positions: Position of each token [1, tokens].
        spans: The rows.
        adapters: Tokens that use an adapter.
        virtual: Tokens at virtual positions.
        paging: Attention over pages, one for each page size; empty if nothing attends, or if `dense` is set.
        layer: Number of the attention layer in `paging` that runs now.
        dense: Attention over dense batches.
        prefixes: K and V [virtual tokens, kv width] by adapter, of the layer that runs now. They replace what `virtual`
            tokens compute.
        kept: What the recorded step keeps that this context belongs to; None without a recording.
        mix: Which adapter each token uses, where `adapters` only names them; None where `adapters` has their tokens.
        notes: Values that readers have derived from this context, by type.
    """

    positions: Tensor
    spans: tuple[RowSpan, ...]
    adapters: tuple[AdapterSpan, ...] = ()
    virtual: tuple[VirtualSpan, ...] = ()
    paging: tuple[AttentionBackend, ...] = ()
    layer: int = 0
    dense: Dense | None = None
    prefixes: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    kept: Kept | None = None
    mix: AdapterMix | None = None
    notes: dict[type, Any] = field(default_factory=dict)
    _foreign: dict[tuple[tuple[str, int], ...], Tensor] = field(default_factory=dict)
    _adapter_indices: dict[tuple[str, ...], Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return int(self.positions.shape[1])

    @property
    def covered_by_one(self) -> bool:
        """Whether one adapter's span covers all tokens."""
        return len(self.adapters) == 1 and self.adapters[0].hi - self.adapters[0].lo == self.tokens

    def adapter_index(self, adapters: tuple[str, ...]) -> Tensor:
        """Return for each token [tokens] the index of its adapter in `adapters`; their number if it uses none."""
        index = self._adapter_indices.get(adapters)
        if index is None and self.mix is not None:
            index = self._adapter_indices[adapters] = self.mix.among(adapters)
        if index is None:
            # Filled on the device instead of copied from a list: a copy from the host cannot be recorded.
            index = torch.full((self.tokens,), len(adapters), device=self.positions.device)
            for span in self.adapters:
                if span.adapter in adapters:
                    index[span.lo : span.hi].fill_(adapters.index(span.adapter))
            self._adapter_indices[adapters] = index
        return index

    def foreign(self, ranks: tuple[tuple[str, int], ...]) -> Tensor:
        """Return a mask [tokens, sum of ranks] that is true where a column belongs to another adapter than the token's.

        For `masked_fill`: a product with zero would not do, because another adapter's matrix may give infinite values.

        Args:
            ranks: (adapter, rank), in the order of the columns.
        """
        mask = self._foreign.get(ranks)
        if mask is None and self.mix is not None:
            own = self.mix.among(tuple(adapter for adapter, _ in ranks))
            parts = [(own != at)[:, None].expand(-1, rank) for at, (_, rank) in enumerate(ranks)]
            mask = self._foreign[ranks] = torch.cat(parts, dim=1)
        if mask is None:
            mask = torch.ones(
                (self.tokens, sum(rank for _, rank in ranks)), dtype=torch.bool, device=self.positions.device
            )
            left = 0
            for adapter, rank in ranks:
                for span in self.adapters:
                    if span.adapter == adapter:
                        mask[span.lo : span.hi, left : left + rank].fill_(False)
                left += rank
            self._foreign[ranks] = mask
        return mask


_CURRENT: ContextVar[ForwardContext | None] = ContextVar("blockzoo_frame", default=None)


def current() -> ForwardContext:
    """Return the context of the segment that runs now. Raises RuntimeError outside of one."""
    frame = _CURRENT.get()
    if frame is None:
        raise RuntimeError("the engine's modules run inside a segment only")
    return frame


@contextmanager
def running(frame: ForwardContext) -> Iterator[None]:
    """Make a context current within a `with` block."""
    token = _CURRENT.set(frame)
    try:
        yield
    finally:
        _CURRENT.reset(token)
