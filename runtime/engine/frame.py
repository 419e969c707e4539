"""What one segment's run must know beside its hidden states: who the rows are, where their pages lie, which adapters they use.

A frame is made per step for a tuple of models, from the step's rows in that order, and is current while the segment runs (a context
variable: transformers' layers drop keyword arguments on the way to the attention function; facts, "Cutting transformers models").

    tokens   t:  0 1 2 3 4 5 6 ...       rows of all models, back to back; a decode has one token, a chunk several
    row_of   t:  0 1 2 2 2 2 3 ...
    tables   [rows, attention layers of the segment, page groups] -> page id
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.kv.pool import PagePool, PageView

#: Rows are attended in at most this many groups of similar length; a group is padded to its longest row.
MAX_GROUPS = 4
_GROUP_RATIO = 0.6


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One row: tokens [lo, hi) of the frame at positions start, start + 1, …"""

    lo: int
    hi: int
    start: int

    @property
    def length(self) -> int:
        """Tokens of the sequence once this row has run."""
        return self.start + self.hi - self.lo


@dataclass(frozen=True, slots=True)
class AdapterSpan:
    """Tokens [lo, hi) of the frame that use one adapter."""

    adapter: str
    lo: int
    hi: int


@dataclass(slots=True)
class DecodeGroup:
    """Rows of one token each, attended in one call. `tokens` None: all tokens of the frame, in order."""

    tokens: Tensor | None
    rows: int
    width: int
    pages: Tensor
    lengths: Tensor
    _masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive [rows, 1, 1, width]: 0 where a row may look, minus infinity behind its end and before its window."""
        key = (window, dtype)
        if key not in self._masks:
            at = torch.arange(self.width, device=self.lengths.device)
            hidden = at >= self.lengths[:, None]
            if window is not None:
                hidden |= at < self.lengths[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=self.lengths.device)
            self._masks[key] = mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]
        return self._masks[key]


@dataclass(slots=True)
class Frame:
    """See the top of the file. `layer`: index into `tables` of the attention that runs now; `view` and `pool`: where pages live."""

    positions: Tensor
    spans: tuple[RowSpan, ...]
    adapters: tuple[AdapterSpan, ...] = ()
    view: PageView | None = None
    pool: PagePool | None = None
    tables: Tensor | None = None
    layer: int = 0
    token_pages: Tensor | None = None
    token_offsets: Tensor | None = None
    groups: tuple[DecodeGroup, ...] = ()
    chunks: tuple[tuple[int, RowSpan], ...] = ()
    _adapter_masks: dict[tuple[tuple[str, int], ...], Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return int(self.positions.shape[1])

    def adapter_mask(self, ranks: tuple[tuple[str, int], ...], dtype: torch.dtype) -> Tensor:
        """[tokens, sum of ranks]: one where a token's adapter owns the column. `ranks`: (adapter, rank) in column order."""
        mask = self._adapter_masks.get(ranks)
        if mask is None:
            mask = torch.zeros((self.tokens, sum(rank for _, rank in ranks)), dtype=dtype, device=self.positions.device)
            left = 0
            for adapter, rank in ranks:
                for span in self.adapters:
                    if span.adapter == adapter:
                        mask[span.lo : span.hi, left : left + rank] = 1
                left += rank
            self._adapter_masks[ranks] = mask
        return mask


_CURRENT: ContextVar[Frame | None] = ContextVar("blockzoo_frame", default=None)


def current() -> Frame:
    """The frame of the segment that runs now. Raises RuntimeError outside of one."""
    frame = _CURRENT.get()
    if frame is None:
        raise RuntimeError("the engine's modules run inside a segment only")
    return frame


@contextmanager
def running(frame: Frame) -> Iterator[None]:
    """Make a frame current."""
    token = _CURRENT.set(frame)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def add_pages(frame: Frame, view: PageView, pool: PagePool, tables: Tensor) -> None:
    """Give a frame its pages; called for segments with attention. `tables`: [rows, layers, groups], padded with the zero page."""
    frame.view, frame.pool, frame.tables = view, pool, tables
    device = tables.device
    row_of = torch.repeat_interleave(
        torch.arange(len(frame.spans), device=device),
        torch.tensor([span.hi - span.lo for span in frame.spans], device=device),
        output_size=frame.tokens,
    )
    positions = frame.positions[0]
    frame.token_offsets = positions % view.page_tokens
    frame.token_pages = tables[row_of, :, positions // view.page_tokens].t().contiguous()
    frame.groups = tuple(_groups(frame, view.page_tokens))
    frame.chunks = tuple((row, span) for row, span in enumerate(frame.spans) if span.hi - span.lo > 1)


def _groups(frame: Frame, page_tokens: int) -> Iterator[DecodeGroup]:
    """Decode rows by similar length, so that padding to the longest wastes little."""
    tables = frame.tables
    if tables is None:
        return
    decodes = [row for row, span in enumerate(frame.spans) if span.hi - span.lo == 1]
    for rows in _split(decodes, [frame.spans[row].length for row in decodes]):
        spans = [frame.spans[row] for row in rows]
        lengths = [span.length for span in spans]
        groups = -(-max(lengths) // page_tokens)
        everything = rows == list(range(frame.tokens))
        index = None if everything else torch.tensor(rows, device=tables.device)
        chosen = (tables if index is None else tables[index])[:, :, :groups]
        yield DecodeGroup(
            tokens=None if everything else torch.tensor([span.lo for span in spans], device=tables.device),
            rows=len(rows),
            width=groups * page_tokens,
            pages=chosen.transpose(0, 1).reshape(tables.shape[1], -1),
            lengths=torch.tensor(lengths, device=tables.device),
        )


def _split(rows: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Cut rows, longest first, wherever a row falls below a share of its group's longest; keep the given order inside a group."""
    order = sorted(range(len(rows)), key=lambda i: -lengths[i])
    made = 0
    group: list[int] = []
    for i in order:
        if group and lengths[i] < _GROUP_RATIO * lengths[group[0]] and made < MAX_GROUPS - 1:
            yield [rows[j] for j in sorted(group)]
            group, made = [], made + 1
        group.append(i)
    if group:
        yield [rows[j] for j in sorted(group)]
