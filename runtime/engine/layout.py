"""Where all tokens of a step stand and lie, computed once; a segment's frame is a slice of it.

    Layout: all rows of the models with one KV shape (geometry, number of attention layers), back to back in model order
    frame(models): neighbours in a layout are views of it, others are picked by index; made once per set of models and step

Models whose depths differ meet in a segment only where chains were composed; then a frame is made for the one layer that runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.engine.frame import AdapterSpan, DecodeGroup, Frame, Paging, RowSpan, VirtualSpan
from runtime.engine.loaded import LoadedModel
from runtime.engine.units import UnitStore
from runtime.kv.pool import Geometry, PagePool, PageView
from runtime.types import Row

#: Decode rows are attended in at most this many groups of similar length; a group is padded to its longest row.
MAX_GROUPS = 4
_GROUP_RATIO = 0.6


@dataclass(frozen=True, slots=True)
class Rows:
    """One model's rows in this step, `tokens` of them, back to back from 0."""

    model: LoadedModel
    rows: tuple[Row, ...]
    spans: tuple[RowSpan, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model stands in its layout: tokens from `token` on, rows from `row` on."""

    token: int
    row: int


@dataclass(slots=True)
class Layout:
    """See the top of the file. positions [1, tokens]; tables [rows, layers, groups]; token_pages [layers, tokens]."""

    members: tuple[str, ...]
    places: dict[str, Place]
    positions: Tensor
    tables: Tensor
    token_pages: Tensor
    token_offsets: Tensor
    lengths: Tensor
    view: PageView
    rotaries: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


def lay_out(batches: Mapping[str, Rows], pool: PagePool, device: torch.device) -> list[Layout]:
    """One layout per KV shape among the models of the step."""
    shapes: dict[tuple[Geometry, int], list[str]] = {}
    for name, batch in batches.items():
        shapes.setdefault((batch.model.geometry, batch.model.spec.kv_layers), []).append(name)
    return [_layout(names, batches, pool.view(shape[0]), device) for shape, names in shapes.items()]


def _layout(names: Sequence[str], batches: Mapping[str, Rows], view: PageView, device: torch.device) -> Layout:
    places: dict[str, Place] = {}
    token = row = 0
    spans: list[RowSpan] = []
    for name in names:
        places[name] = Place(token, row)
        spans.extend(batches[name].spans)
        token, row = token + batches[name].tokens, row + len(batches[name].rows)
    lengths = [span.length for span in spans]
    groups = -(-max(lengths) // view.page_tokens)
    tables = [batches[name].model.pages([r.seq for r in batches[name].rows], groups) for name in names]
    table = tables[0] if len(tables) == 1 else torch.cat(tables)
    positions = torch.tensor([p for span in spans for p in range(span.start, span.length)], device=device)
    row_of = torch.tensor([i for i, span in enumerate(spans) for _ in range(span.hi - span.lo)], device=device)
    pages = table[row_of, :, positions // view.page_tokens].t().contiguous()
    offsets = positions % view.page_tokens
    return Layout(tuple(names), places, positions[None], table, pages, offsets, torch.tensor(lengths, device=device), view)


class FrameMaker:
    """All frames of one step."""

    def __init__(self, batches: Mapping[str, Rows], units: UnitStore, pool: PagePool) -> None:
        self._batches = batches
        self._units = units
        self._pool = pool
        self._layouts = lay_out(batches, pool, units.device)
        self._home = {name: layout for layout in self._layouts for name in layout.members}
        self._frames: dict[tuple[str, ...], Frame] = {}

    def frame(self, models: tuple[str, ...]) -> Frame:
        """The frame of these models, paged when they have one KV shape."""
        made = self._frames.get(models)
        if made is None:
            made = self._frames[models] = self._make(models)
        return made

    def for_layers(self, models: tuple[str, ...], layers: tuple[int, ...]) -> Frame:
        """The frame for an attention layer that is number `layers[i]` of `models[i]`, set to run it."""
        frame = self.frame(models)
        if frame.paging is not None and len(set(layers)) == 1:
            frame.layer = layers[0]
            return frame
        return self._make_unaligned(models, layers)

    def rotary(self, models: tuple[str, ...], key: str, like: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [1, tokens, width] for these models' tokens; computed once per layout."""
        parts = []
        for layout, run in self._runs(models):
            if key not in layout.rotaries:
                layout.rotaries[key] = self._units.rotaries[key](like, layout.positions)
            lo, hi = self._token_range(layout, run)
            parts.append(tuple(table[:, lo:hi] for table in layout.rotaries[key]))
        if len(parts) == 1:
            return parts[0][0], parts[0][1]
        return torch.cat([cos for cos, _ in parts], dim=1), torch.cat([sin for _, sin in parts], dim=1)

    def adapter_spans(self, models: Sequence[str], counts: Sequence[int]) -> tuple[AdapterSpan, ...]:
        """Which tokens use which adapter, when each model has so many tokens."""
        spans, base = [], 0
        for name, count in zip(models, counts, strict=True):
            adapter = self._batches[name].model.adapter
            if adapter is not None and count:
                spans.append(AdapterSpan(adapter, base, base + count))
            base += count
        return tuple(spans)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _runs(self, models: tuple[str, ...]) -> Iterator[tuple[Layout, list[str]]]:
        """The models as runs of neighbours within a layout: each run is a slice."""
        run: list[str] = []
        layout: Layout | None = None
        for name in models:
            home = self._home[name]
            follows = run and home is layout and home.members.index(name) == home.members.index(run[-1]) + 1
            if run and layout is not None and not follows:
                yield layout, run
                run = []
            run.append(name)
            layout = home
        if run and layout is not None:
            yield layout, run

    def _token_range(self, layout: Layout, run: Sequence[str]) -> tuple[int, int]:
        return layout.places[run[0]].token, layout.places[run[-1]].token + self._batches[run[-1]].tokens

    def _row_range(self, layout: Layout, run: Sequence[str]) -> tuple[int, int]:
        return layout.places[run[0]].row, layout.places[run[-1]].row + len(self._batches[run[-1]].rows)

    def _make(self, models: tuple[str, ...]) -> Frame:
        runs = list(self._runs(models))
        tokens = [self._token_range(layout, run) for layout, run in runs]
        positions = _joined([layout.positions[:, lo:hi] for (layout, _), (lo, hi) in zip(runs, tokens, strict=True)], 1)
        adapters = self.adapter_spans(models, [self._batches[name].tokens for name in models])
        frame = Frame(positions, self._spans(models), adapters, self._virtual_spans(models))
        first = runs[0][0]
        if all(layout is first for layout, _ in runs):
            rows = [self._row_range(layout, run) for layout, run in runs]
            frame.paging = self._paging(
                frame,
                first.view,
                _joined([first.tables[lo:hi] for lo, hi in rows], 0),
                _joined([first.token_pages[:, lo:hi] for lo, hi in tokens], 1),
                _joined([first.token_offsets[lo:hi] for lo, hi in tokens], 0),
                _joined([first.lengths[lo:hi] for lo, hi in rows], 0),
            )
        return frame

    def _make_unaligned(self, models: tuple[str, ...], layers: tuple[int, ...]) -> Frame:
        plain = self.frame(models)
        frame = Frame(plain.positions, plain.spans, plain.adapters, plain.virtual)
        tables, pages, offsets, lengths = [], [], [], []
        for name, layer in zip(models, layers, strict=True):
            layout = self._home[name]
            (lo, hi), (top, bottom) = self._token_range(layout, [name]), self._row_range(layout, [name])
            tables.append(layout.tables[top:bottom, layer : layer + 1])
            pages.append(layout.token_pages[layer : layer + 1, lo:hi])
            offsets.append(layout.token_offsets[lo:hi])
            lengths.append(layout.lengths[top:bottom])
        width = max(table.shape[2] for table in tables)
        padded = [torch.nn.functional.pad(t, (0, width - t.shape[2]), value=self._pool.padding) for t in tables]
        view = self._home[models[0]].view
        frame.paging = self._paging(frame, view, torch.cat(padded), torch.cat(pages, 1), torch.cat(offsets), torch.cat(lengths))
        return frame

    def _spans(self, models: Sequence[str]) -> tuple[RowSpan, ...]:
        spans: list[RowSpan] = []
        base = 0
        for name in models:
            spans.extend(span.moved(base) for span in self._batches[name].spans)
            base += self._batches[name].tokens
        return tuple(spans)

    def _virtual_spans(self, models: Sequence[str]) -> tuple[VirtualSpan, ...]:
        """Which tokens stand at virtual positions; none once prompts have begun."""
        found, base = [], 0
        for name in models:
            batch = self._batches[name]
            count = batch.model.spec.virtual_tokens
            for span in batch.spans:
                if span.start < count:
                    hi = min(span.hi, span.lo + count - span.start)
                    found.append(VirtualSpan(name, base + span.lo, base + hi, span.start))
            base += batch.tokens
        return tuple(found)

    def _paging(self, frame: Frame, view: PageView, tables: Tensor, pages: Tensor, offsets: Tensor, lengths: Tensor) -> Paging:
        groups = tuple(_groups(frame.spans, tables, lengths, view.page_tokens))
        chunks = tuple((row, span) for row, span in enumerate(frame.spans) if span.hi - span.lo > 1)
        return Paging(view, self._pool, tables, pages, offsets, groups, chunks)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def _groups(spans: Sequence[RowSpan], tables: Tensor, lengths: Tensor, page_tokens: int) -> Iterator[DecodeGroup]:
    """Decode rows by similar length, so that padding to the longest wastes little."""
    decodes = [row for row, span in enumerate(spans) if span.hi - span.lo == 1]
    for rows in _split(decodes, [spans[row].length for row in decodes]):
        groups = -(-max(spans[row].length for row in rows) // page_tokens)
        everything = len(rows) == len(spans)
        index = None if everything else torch.tensor(rows, device=tables.device)
        chosen = tables if index is None else tables[index]
        yield DecodeGroup(
            tokens=None if everything else torch.tensor([spans[row].lo for row in rows], device=tables.device),
            rows=len(rows),
            width=groups * page_tokens,
            pages=chosen[:, :, :groups].transpose(0, 1).reshape(tables.shape[1], -1),
            lengths=lengths if index is None else lengths[index],
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
