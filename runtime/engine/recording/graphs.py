"""Decode steps that are recorded once per shape and then replayed, so that a step costs one launch and no Python per
module.

    rows --filled up to a bucket, tables to a width--> layouts --copied into the recording's own--> replay --> logits,
    fillers dropped

A part of a chain that begins with hidden states has these copied, too; one without a head gives hidden states instead
of logits.

A shape is the models of the step, in order, with the bucket of each one's rows, and the width of their tables. Which
adapter a token uses follows from its model. A shape is recorded when it comes a second time. A row that only fills up
stands alone at position 0; its K and V go to a page that nobody reads (`kv.pool`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runtime.config import GraphChoice
from runtime.engine.models.components import ComponentPool
from runtime.engine.recording.recorder import CudaRecorder, Rerun, StepRecorder, Unrecordable, Work
from runtime.engine.sampling.row_request import asks_prompt
from runtime.engine.step.batch import ModelBatch
from runtime.engine.step.context import Kept, RowSpan
from runtime.engine.step.layout import ContextBuilder, Filling, StepLayout, lay_out
from runtime.engine.step.runner import StepRun
from runtime.kv.pool import PagePool

#: Rows of one model, at most; a step with more of them has enough to do for its modules to be run one by one.
MOST_ROWS = 128
#: Recordings that are kept, and shapes that are known to have come once.
MOST_RECORDED, MOST_MET = 64, 4096
_SMALL, _STEP = (1, 2, 4), 8

#: Models and their rows, and the widths of the tables of each layout.
_Shape = tuple[tuple[tuple[str, int], ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """`layouts`, `hidden` (by part): what it reads. `kept`, `scratches`: what else it has the addresses of."""

    layouts: Sequence[StepLayout]
    hidden: Mapping[str, Tensor]
    replay: Work
    kept: Kept
    scratches: tuple[Tensor, ...]


class Graphs:
    """See the top of the file. `recorded`, `replayed`, `refused`: how often."""

    def __init__(self, recorder: StepRecorder, units: ComponentPool, pool: PagePool, most: int = MOST_RECORDED) -> None:
        self._recorder, self._units, self._pool, self._most = recorder, units, pool, most
        self._filling = Filling(pool.spill, table_width)
        self._recordings: OrderedDict[_Shape, _Recorded] = OrderedDict()
        self._met: set[_Shape] = set()
        self._unfit: set[tuple[str, ...]] = set()
        self.recorded = self.replayed = self.refused = 0

    def __len__(self) -> int:
        return len(self._recordings)

    def clear(self) -> None:
        """Drop everything: models came or went, and adapters with them."""
        self._recordings.clear()
        self._met.clear()
        self._unfit.clear()

    def forward(self, batches: Mapping[str, ModelBatch]) -> Mapping[str, Tensor] | None:
        """Logits [rows, vocabulary] by model, of parts without a head hidden states [1, rows, width], valid until the
        next step; None for a step that is to be run as it is.
        """
        if tuple(batches) in self._unfit or not batches or not all(_decodes(batch) for batch in batches.values()):
            return None
        filled = {name: _filled(batch) for name, batch in batches.items()}
        made = self._find_or_record(filled, lay_out(filled, self._units.device, self._filling))
        return None if made is None else {name: _own(batch, made[name]) for name, batch in batches.items()}

    def _find_or_record(
        self, filled: Mapping[str, ModelBatch], layouts: Sequence[StepLayout]
    ) -> Mapping[str, Tensor] | None:
        shape = _shape(filled, layouts)
        known = self._recordings.get(shape)
        if known is not None:
            self._recordings.move_to_end(shape)
            for layout, new in zip(known.layouts, layouts, strict=True):
                for into, given in zip(layout.contents, new.contents, strict=True):
                    into.copy_(given)
            for name, into in known.hidden.items():
                into.copy_(_hidden(filled)[name])
        elif shape in self._met:
            known = self._record(filled, layouts)
            if known is None:
                return None
            self._store_recording(shape, known)
        else:
            if len(self._met) >= MOST_MET:
                self._met.clear()
            self._met.add(shape)
            return self._work(filled, layouts, None)()
        self.replayed += 1
        return known.replay()

    def _record(self, filled: Mapping[str, ModelBatch], layouts: Sequence[StepLayout]) -> _Recorded | None:
        """These layouts become the recording's own. None where it cannot be; then these models' steps run as they are
        from now on.
        """
        kept: Kept = {}
        try:
            replay = self._recorder.record(self._work(filled, layouts, kept))
        except Unrecordable:
            self._unfit.add(tuple(filled))
            self.refused += 1
            return None
        self.recorded += 1
        return _Recorded(layouts, _hidden(filled), replay, kept, self._pool.scratches)

    def _store_recording(self, shape: _Shape, recorded: _Recorded) -> None:
        """Keep a recording; the one that was not used for longest makes room."""
        self._recordings[shape] = recorded
        if len(self._recordings) > self._most:
            self._recordings.popitem(last=False)

    def _work(self, filled: Mapping[str, ModelBatch], layouts: Sequence[StepLayout], kept: Kept | None) -> Work:
        """A step over what layouts hold: nothing in it depends on the rows but through them."""
        still = {name: _still(filled[name], layout) for layout in layouts for name in layout.members}
        batches = {name: still[name] for name in filled}  # in the step's order
        picks = {name: range(batch.tokens) for name, batch in batches.items()}

        def work() -> Mapping[str, Tensor]:
            fresh = [replace(layout, rotaries={}) for layout in layouts]
            frames = ContextBuilder(batches, fresh, self._units, self._pool, kept)
            run = StepRun(batches, frames, self._units.device, False, picks, kept)
            return {**run.forward(), **run.behind}

        return work


def graphs_for(choice: GraphChoice, units: ComponentPool, pool: PagePool) -> Graphs | None:
    """What an engine on this device records with; None where it does not."""
    cuda = units.device.type == "cuda"
    if choice == "off" or (choice == "auto" and not cuda):
        return None
    return Graphs(CudaRecorder(units.device) if cuda else Rerun(), units, pool)


def bucket(rows: int) -> int:
    """How many rows so many are filled up to: 1, 2, 4, 8, 16, 24, …"""
    return next((size for size in _SMALL if rows <= size), -(-rows // _STEP) * _STEP)


def table_width(groups: int) -> int:
    """How many page groups tables have room for: a power of two."""
    return 1 << (groups - 1).bit_length()


def _decodes(batch: ModelBatch) -> bool:
    """Whether every row of a model is one token behind the virtual ones, of which logits, where there are any, are
    wanted for the next.
    """
    return len(batch.rows) <= MOST_ROWS and all(
        len(row.tokens) == 1
        and row.start >= batch.model.spec.virtual_tokens
        and (not batch.model.has_head or (row.sample and not asks_prompt(batch.model, row)))
        for row in batch.rows
    )


def _filled(batch: ModelBatch) -> ModelBatch:
    """A model's decodes with rows of nobody behind them: token 0, or zeros, at position 0."""
    more = bucket(len(batch.rows)) - len(batch.rows)
    spans = tuple(RowSpan(batch.tokens + i, batch.tokens + i + 1, 0) for i in range(more))
    hidden = None if batch.hidden is None else torch.nn.functional.pad(batch.hidden, (0, 0, 0, more))
    return replace(batch, spans=(*batch.spans, *spans), ids=(*batch.ids, *(0,) * more), hidden=hidden)


def _still(batch: ModelBatch, layout: StepLayout) -> ModelBatch:
    """The same for every step of a shape: rows that could each be as long as the tables are wide."""
    last = layout.tables.shape[2] * layout.page_tokens - 1
    return ModelBatch(
        batch.model, (), tuple(RowSpan(at, at + 1, last) for at in range(batch.tokens)), batch.ids, batch.hidden
    )


def _hidden(batches: Mapping[str, ModelBatch]) -> dict[str, Tensor]:
    """What parts of chains start from."""
    return {name: batch.hidden for name, batch in batches.items() if batch.hidden is not None}


def _own(batch: ModelBatch, made: Tensor) -> Tensor:
    """Without what fills up."""
    return made[: len(batch.rows)] if batch.model.has_head else made[:, : len(batch.rows)]


def _shape(filled: Mapping[str, ModelBatch], layouts: Sequence[StepLayout]) -> _Shape:
    return tuple((name, batch.tokens) for name, batch in filled.items()), tuple(
        layout.tables.shape[2] for layout in layouts
    )
