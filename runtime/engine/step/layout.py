"""Compute positions, page tables and page places of a step's tokens once, and cut forward contexts from them.

    StepLayout        all rows of the models with page tables of one shape (tokens per page, attention layers),
                      back to back in model order
    frame(models)     models that are neighbours in a layout are views of it, all other sets are concatenated;
                      made once per set of models and step

Models that share a layer may have it at different depths, and may use different page sizes (composed chains). For
different depths another slice of the same tables is used. For different page sizes only the attention runs apart;
everything else runs once over all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.engine.models.components import ComponentPool, SharedComponent
from runtime.engine.step.batch import ModelBatch, RowChunk, StepProgram, adapter_spans, virtual_spans
from runtime.engine.step.context import (
    AdapterMix,
    AttentionBackend,
    AwayRow,
    ForwardContext,
    Kept,
    PagedMetadata,
    RowSpan,
)
from runtime.kv.pool import PagePool
from runtime.kv.transfers import put
from runtime.types import SentAway


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """Indexes of a model's first token and first row in its layout."""

    token: int
    row: int


@dataclass(slots=True)
class StepLayout:
    """The tokens of several models, back to back.

    Fields:
        members: The models, in order.
        places: First token and row of each model.
        ids, positions: [1, tokens].
        tables: Page ids [rows, layers, groups].
        token_pages: Page that each token is written to [layers, tokens].
        token_offsets: Slot of each token in its page [tokens].
        lengths: Tokens of each row after this step [rows].
        away: What other devices hold of rows, by the number of the row.
        rotaries: (cos, sin) of all tokens, by rotary module and dtype.
    """

    members: tuple[str, ...]
    places: dict[str, TokenPlace]
    page_tokens: int
    ids: Tensor
    positions: Tensor
    tables: Tensor
    token_pages: Tensor
    token_offsets: Tensor
    lengths: Tensor
    away: dict[int, tuple[SentAway, ...]] = field(default_factory=dict)
    rotaries: dict[tuple[str, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def contents(self) -> tuple[Tensor, ...]:
        """All tensors that differ between steps of one shape."""
        return self.ids, self.positions, self.tables, self.token_pages, self.token_offsets, self.lengths


@dataclass(frozen=True, slots=True)
class Filling:
    """How a step is padded to a fixed shape.

    Fields:
        page: Page that the K and V of padding rows go to.
        groups: Maps the page groups needed to those that the tables have room for. All layouts of one page size get the
            same number, because one paging may join them.
    """

    page: int
    groups: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class _Run:
    """A slice of a layout: models that are neighbours in it and in a segment. `shift`: offset of their layers."""

    layout: StepLayout
    tokens: slice
    rows: slice
    shift: int


def lay_out(
    batches: Mapping[str, ModelBatch], device: torch.device, filling: Filling | None = None
) -> list[StepLayout]:
    """Return one layout for each shape of page tables among the models of the step. `filling`: for padded batches."""
    shapes: dict[tuple[int, int], list[str]] = {}
    for name, batch in batches.items():
        shapes.setdefault((batch.model.spec.page_tokens, batch.model.spec.kv_layers), []).append(name)
    return [_layout(names, batches, page_tokens, device, filling) for (page_tokens, _), names in shapes.items()]


def _layout(
    names: Sequence[str],
    batches: Mapping[str, ModelBatch],
    page_tokens: int,
    device: torch.device,
    filling: Filling | None,
) -> StepLayout:
    places: dict[str, TokenPlace] = {}
    token = row = 0
    spans: list[RowSpan] = []
    away: dict[int, tuple[SentAway, ...]] = {}
    for name in names:
        places[name] = TokenPlace(token, row)
        away.update((row + at, loans) for at, loans in batches[name].away.items())
        spans.extend(batches[name].spans)
        token, row = token + batches[name].tokens, row + len(batches[name].spans)
    lengths = [span.length for span in spans]
    groups = _groups(lengths, page_tokens)
    if filling is not None:
        alike = (batch for batch in batches.values() if batch.model.spec.page_tokens == page_tokens)
        groups = filling.groups(_groups([span.length for batch in alike for span in batch.spans], page_tokens))
    tables = [_table(batches[name], groups, filling) for name in names]
    table = tables[0] if len(tables) == 1 else torch.cat(tables)
    ids = put([token for name in names for token in batches[name].ids], device)
    for name in names:
        awaited = batches[name].awaited
        if awaited is not None:
            ids.index_copy_(0, put([places[name].token + at for at in awaited.places], device), awaited.tokens)
    ends = put(lengths, device)
    positions, row_of = _where(spans, ends) if token > row else (ends - 1, torch.arange(row, device=device))
    pages = table[row_of, :, positions // page_tokens].t().contiguous()
    offsets = positions % page_tokens
    return StepLayout(tuple(names), places, page_tokens, ids[None], positions[None], table, pages, offsets, ends, away)


def _where(spans: Sequence[RowSpan], ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return the position of every token, and the index of its row."""
    positions = put([p for span in spans for p in range(span.start, span.length)], ends.device)
    return positions, put([i for i, span in enumerate(spans) for _ in range(span.hi - span.lo)], ends.device)


def _groups(lengths: Sequence[int], page_tokens: int) -> int:
    """Return how many page groups the longest of these rows needs."""
    return -(-max(lengths) // page_tokens)


def _table(batch: ModelBatch, groups: int, filling: Filling | None) -> Tensor:
    """Return the page tables of a model's rows [rows, layers, groups], padding rows included."""
    table = batch.model.pages([row.seq for row in batch.rows], groups)
    more = len(batch.spans) - len(batch.rows)
    if filling is None or not more:
        return table
    return torch.nn.functional.pad(table, (0, 0, 0, 0, 0, more), value=filling.page)


class ContextBuilder:
    """Build the forward contexts of one step over pages.

    In all methods, `models` are in the order of the step, and `adapters` has the key of each model's adapter, or None.
    `kept`, `mix`: of a recorded step (`engine.step.context`); with a mix, adapters given to the methods are ignored.
    """

    def __init__(
        self,
        batches: Mapping[str, ModelBatch],
        layouts: Sequence[StepLayout],
        units: ComponentPool,
        pool: PagePool,
        kept: Kept | None = None,
        mix: AdapterMix | None = None,
    ) -> None:
        self._batches = batches
        self._units = units
        self._pool = pool
        self._kept, self._mix = kept, mix
        self._home = {name: layout for layout in layouts for name in layout.members}
        self._frames: dict[tuple[tuple[str, ...], tuple[str | None, ...]], ForwardContext] = {}
        self._pagings: dict[tuple[tuple[str, ...], tuple[int, ...]], tuple[AttentionBackend, ...]] = {}
        self._rotaries: dict[tuple[tuple[str, ...], str, torch.dtype], tuple[Tensor, Tensor]] = {}

    def ids(self, models: tuple[str, ...]) -> Tensor:
        return _joined([run.layout.ids[:, run.tokens] for run in self._runs(models, (0,) * len(models))], 1)

    def frame(self, models: tuple[str, ...], adapters: tuple[str | None, ...]) -> ForwardContext:
        """Return the context of these models."""
        made = self._frames.get((models, adapters))
        if made is None:
            positions = _joined(
                [run.layout.positions[:, run.tokens] for run in self._runs(models, (0,) * len(models))], 1
            )
            spans = tuple(span for part in self._spans(models) for span in part)
            counts = [self._batches[name].tokens for name in models]
            # Recorded rows are past their virtual tokens; with a mix they have no adapter of their own.
            virtual = () if self._mix is not None else virtual_spans([self._batches[n] for n in models], adapters)
            used = adapter_spans(adapters, counts) if self._mix is None else self._mix.spans
            made = self._frames[models, adapters] = ForwardContext(
                positions, spans, used, virtual, kept=self._kept, mix=self._mix
            )
        return made

    def for_layers(
        self, models: tuple[str, ...], adapters: tuple[str | None, ...], layers: tuple[int, ...]
    ) -> ForwardContext:
        """Return the context, set to the attention layer that is number `layers[i]` of `models[i]`."""
        frame = self.frame(models, adapters)
        frame.layer = min(layers)
        shifts = (0,) * len(layers) if frame.layer == max(layers) else tuple(layer - frame.layer for layer in layers)
        paging = self._pagings.get((models, shifts))
        if paging is None:
            paging = self._pagings[models, shifts] = tuple(
                self._units.attend(paging) for paging in self._page(frame, models, shifts)
            )
        frame.paging = paging
        return frame

    def program(
        self, models: tuple[str, ...], key: tuple[str, ...], units: Sequence[SharedComponent], at: int
    ) -> tuple[StepProgram, int] | None:
        return self._units.programs.get_program(key, units, at)

    def rotary(self, models: tuple[str, ...], key: str, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) [1, tokens, width] for these models' tokens, in the dtype of `like`. Cached."""
        made = self._rotaries.get((models, key, like.dtype))
        if made is None:
            made = self._rotaries[models, key, like.dtype] = self._tables(models, key, like)
        return made

    def pieces(
        self,
        models: tuple[str, ...],
        adapters: tuple[str | None, ...],
        layers: tuple[int, ...],
        rotary: str | None,
        like: Tensor,
    ) -> Iterator[RowChunk]:
        raise RuntimeError(f"{models[0]}: its layers attend by themselves, and here are only pages")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _tables(self, models: Sequence[str], key: str, like: Tensor) -> tuple[Tensor, Tensor]:
        parts = []
        for run in self._runs(models, (0,) * len(models)):
            known, name = run.layout.rotaries, (key, like.dtype)
            if name not in known:
                known[name] = self._units.rotaries[key](like, run.layout.positions)
            parts.append(tuple(table[:, run.tokens] for table in known[name]))
        if len(parts) == 1:
            return parts[0][0], parts[0][1]
        return torch.cat([cos for cos, _ in parts], dim=1), torch.cat([sin for _, sin in parts], dim=1)

    def _runs(self, models: Sequence[str], shifts: Sequence[int]) -> Iterator[_Run]:
        """Yield the models as runs of neighbours with the same shift."""
        first = 0
        for at in range(1, len(models) + 1):
            if at == len(models) or shifts[at] != shifts[first] or not self._follows(models[at - 1], models[at]):
                yield self._run(models[first], models[at - 1], shifts[first])
                first = at

    def _follows(self, before: str, after: str) -> bool:
        """Return whether two models are neighbours in one layout."""
        home = self._home[before]
        return self._home[after] is home and home.members.index(after) == home.members.index(before) + 1

    def _run(self, first: str, last: str, shift: int) -> _Run:
        layout, batch = self._home[first], self._batches[last]
        lo, hi = layout.places[first], layout.places[last]
        return _Run(layout, slice(lo.token, hi.token + batch.tokens), slice(lo.row, hi.row + len(batch.spans)), shift)

    def _spans(self, models: Sequence[str]) -> list[tuple[RowSpan, ...]]:
        """Return the rows of each model, placed in a context of all these models."""
        spans: list[tuple[RowSpan, ...]] = []
        base = 0
        for name in models:
            own = self._batches[name].spans
            spans.append(tuple(span.moved(base) for span in own) if base else own)
            base += self._batches[name].tokens
        return spans

    def _page(self, frame: ForwardContext, models: Sequence[str], shifts: Sequence[int]) -> Iterator[PagedMetadata]:
        """Yield one paging for each page size among the models, almost always one."""
        sizes = [self._home[name].page_tokens for name in models]
        spans = self._spans(models)
        for size in dict.fromkeys(sizes):
            chosen = [at for at, each in enumerate(sizes) if each == size]
            runs = list(self._runs([models[at] for at in chosen], [shifts[at] for at in chosen]))
            rows = [span for at in chosen for span in spans[at]]
            yield self._paging(frame, runs, rows)

    def _paging(self, frame: ForwardContext, runs: Sequence[_Run], spans: Sequence[RowSpan]) -> PagedMetadata:
        """Return the paging of these runs, with as many layers as the run with the fewest has."""
        page_tokens = runs[0].layout.page_tokens
        depth = min(run.layout.tables.shape[1] - run.shift for run in runs)
        layers = [slice(run.shift, run.shift + depth) for run in runs]
        tables = _joined(
            _padded(
                [run.layout.tables[run.rows, some] for run, some in zip(runs, layers, strict=True)], self._pool.padding
            ),
            0,
        )
        lengths = _joined([run.layout.lengths[run.rows] for run in runs], 0)
        everything = len(spans) == len(frame.spans)
        return PagedMetadata(
            pool=self._pool,
            page_tokens=page_tokens,
            tokens=None if everything else _tokens(spans, tables.device),
            spans=tuple(spans),
            tables=tables,
            lengths=lengths,
            token_pages=_joined(
                [run.layout.token_pages[some, run.tokens] for run, some in zip(runs, layers, strict=True)], 1
            ),
            token_offsets=_joined([run.layout.token_offsets[run.tokens] for run in runs], 0),
            away=_away(runs),
        )


def _away(runs: Sequence[_Run]) -> tuple[AwayRow, ...]:
    """Return the rows of these runs of which other devices hold page sets."""
    found, base = [], 0
    for run in runs:
        mine = range(run.rows.start, run.rows.stop)
        for row, loans in run.layout.away.items():
            if row in mine:
                found.append(AwayRow(base + row - mine.start, run.shift, loans))
        base += len(mine)
    return tuple(found)


def _tokens(spans: Sequence[RowSpan], device: torch.device) -> Tensor:
    """Return the tokens of these rows, one range for adjacent rows.

    Made on the device, because a copy from the host cannot be recorded.
    """
    ranges = [[spans[0].lo, spans[0].lo]]
    for span in spans:
        if span.lo != ranges[-1][1]:
            ranges.append([span.lo, span.lo])
        ranges[-1][1] = span.hi
    return _joined([torch.arange(lo, hi, device=device) for lo, hi in ranges], 0)


def _padded(tables: Sequence[Tensor], padding: int) -> list[Tensor]:
    """Return tables [rows, layers, groups] that all have as many groups as the widest."""
    width = max(table.shape[2] for table in tables)
    return [
        t if t.shape[2] == width else torch.nn.functional.pad(t, (0, width - t.shape[2]), value=padding) for t in tables
    ]


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)
