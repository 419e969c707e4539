"""What one segment's run must know beside its hidden states: who the rows are, where their pages lie, which adapters
they use.

A frame is current while its segment runs (a context variable: transformers' layers drop keyword arguments on the way to
the attention function; facts, "Cutting transformers models"). `runtime.engine.step.layout` makes frames; attention and
shared linear layers read them.

    tokens   t:  0 1 2 3 4 5 6 ...       rows of all models, back to back; a decode has one token, a chunk several
    tables   [rows, layers, page groups] -> page id       token_pages [layers, tokens] -> page of each token
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
from torch import Tensor

from runtime.kv.pool import Geometry, PagePool, PageView

if TYPE_CHECKING:
    from runtime.engine.attention.interface import Tokens


class RowSpan(msgspec.Struct, frozen=True, gc=False):
    """One row: tokens [lo, hi) of the frame at positions start, start + 1, …"""

    lo: int
    hi: int
    start: int

    @property
    def length(self) -> int:
        """Tokens of the sequence once this row has run."""
        return self.start + self.hi - self.lo

    def moved(self, by: int) -> RowSpan:
        """The same row in a frame where it stands elsewhere."""
        return RowSpan(self.lo + by, self.hi + by, self.start) if by else self


@dataclass(frozen=True, slots=True)
class AdapterSpan:
    """Tokens [lo, hi) of the frame that use one adapter."""

    adapter: str
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class VirtualSpan:
    """Tokens [lo, hi) of the frame that are an adapter's virtual tokens number start, start + 1, …"""

    adapter: str
    lo: int
    hi: int
    start: int

    @property
    def source(self) -> slice:
        """Which of the adapter's virtual tokens these are."""
        return slice(self.start, self.start + self.hi - self.lo)


@dataclass(frozen=True, slots=True)
class PagedMetadata:
    """Where tokens of a frame are kept and found: those of its models that put as many tokens into a page.

    `tokens`: which of the frame's they are, None for all. `spans`: its rows, in the order of `tables` and `lengths`
    [rows], the tokens of each once this step has run. `tables` [rows, layers, page groups]; `token_pages` [layers,
    tokens]; `token_offsets` [tokens].
    """

    pool: PagePool
    page_tokens: int
    tokens: Tensor | None
    spans: tuple[RowSpan, ...]
    tables: Tensor
    lengths: Tensor
    token_pages: Tensor
    token_offsets: Tensor

    @property
    def chunks(self) -> Iterator[tuple[int, RowSpan]]:
        """Rows with more than one token: (row of the tables, span)."""
        return ((row, span) for row, span in enumerate(self.spans) if span.hi - span.lo > 1)

    def view(self, like: Tensor) -> PageView:
        """The pages through the geometry of what is shaped `like` a layer's K: layers of one model may differ in it."""
        _, heads, width = like.shape
        return self.pool.view(Geometry(heads, width, like.dtype), self.page_tokens)

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Put K and V of its tokens, among the frame's [tokens, kv_heads, head_dim], into a layer's pages."""
        if self.tokens is not None:
            key, value = key[self.tokens], value[self.tokens]
        self.view(key).write(self.token_pages[layer], self.token_offsets, key, value)


class AttentionBackend(Protocol):
    """One way to attend over pages, made for one paging (`engine.attention.gathered` is the one that runs anywhere)."""

    @property
    def paging(self) -> PagedMetadata: ...

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep K and V of the paging's tokens [tokens, kv_heads, head_dim] in a layer's pages."""
        ...

    def decode(self, layer: int, now: Tokens, out: Tensor) -> None:
        """Attend with every row of one token, into its place of `out` [the frame's tokens, heads, head_dim]."""
        ...

    def chunks(self, layer: int, now: Tokens, out: Tensor) -> None:
        """Attend with the tokens of every other row, into theirs."""
        ...


#: How a device attends over pages.
PagedMaker = Callable[[PagedMetadata], AttentionBackend]


class Dense(Protocol):
    """The dense batches of a frame's models, set to the layer that runs now."""

    def attend(self, now: Tokens) -> Tensor:
        """Keep K and V of the frame's tokens, and attend. Returns [tokens, heads, head_dim]."""
        ...


#: What a recorded step keeps of joined adapters, by who joined them and which (`engine.adapters.stack_cache`).
Kept = dict[tuple[object, tuple[str, ...]], Any]


@dataclass(slots=True)
class ForwardContext:
    """See the top of the file. `layer`: which attention layer of `paging` runs now; no `paging` where nothing attends,
    or `dense` does.

    `prefixes`: K and V [virtual tokens, kv width] by adapter, of the layer that runs now; they stand in for what
    `virtual` tokens compute.
    `kept`: of the recorded step that this is a frame of; None in all others. `notes`: what its readers made of it once,
    by its type.
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
    notes: dict[type, Any] = field(default_factory=dict)
    _foreign: dict[tuple[tuple[str, int], ...], Tensor] = field(default_factory=dict)
    _adapter_indices: dict[tuple[str, ...], Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return int(self.positions.shape[1])

    @property
    def covered_by_one(self) -> bool:
        """Whether one adapter's span is the whole frame."""
        return len(self.adapters) == 1 and self.adapters[0].hi - self.adapters[0].lo == self.tokens

    def adapter_index(self, adapters: tuple[str, ...]) -> Tensor:
        """[tokens]: which of these adapters a token uses; their number where it uses none of them."""
        index = self._adapter_indices.get(adapters)
        if index is None:
            # Filled where it is, not copied from a list: a copy from the host cannot be recorded.
            index = torch.full((self.tokens,), len(adapters), device=self.positions.device)
            for span in self.adapters:
                if span.adapter in adapters:
                    index[span.lo : span.hi].fill_(adapters.index(span.adapter))
            self._adapter_indices[adapters] = index
        return index

    def foreign(self, ranks: tuple[tuple[str, int], ...]) -> Tensor:
        """[tokens, sum of ranks]: whether a column is of another adapter than a token's. `ranks`: (adapter, rank) in
        column order.

        For `masked_fill`: what a stranger's matrix makes of a row may be infinite, and a product with zero would not be
        zero then.
        """
        mask = self._foreign.get(ranks)
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
    """The frame of the segment that runs now. Raises RuntimeError outside of one."""
    frame = _CURRENT.get()
    if frame is None:
        raise RuntimeError("the engine's modules run inside a segment only")
    return frame


@contextmanager
def running(frame: ForwardContext) -> Iterator[None]:
    """Make a frame current."""
    token = _CURRENT.set(frame)
    try:
        yield
    finally:
        _CURRENT.reset(token)
