"""Record decode steps once per shape and replay them, so that a step costs one launch and no Python per module.

    rows --padded to a bucket, tables to a width--> layouts --copied into the recording's own--> replay --> logits,
    padding rows dropped

For a stage that starts from hidden states these are copied too; a stage without a head returns hidden states instead of
logits.

A shape consists of the step's models in order, the bucket of each one's rows, and the width of their tables; which
adapter a token uses follows from its model. A shape is recorded when it occurs for the second time. A padding row is
one token at position 0; its K and V go to a page that is never read (`kv.pool`).
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

#: Maximum rows of one model; in larger steps the overhead of running the modules one by one does not matter.
MOST_ROWS = 128
#: Maximum number of recordings, and of remembered shapes that have occurred once.
MOST_RECORDED, MOST_MET = 64, 4096
_SMALL, _STEP = (1, 2, 4), 8

#: (model, padded rows) of each model, and the table width of each layout.
_Shape = tuple[tuple[tuple[str, int], ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recorded step.

    Fields:
        layouts, hidden: The tensors that it reads; `hidden` by stage.
        replay: Runs it on their current contents.
        kept, scratches: Other tensors at addresses that it uses.
    """

    layouts: Sequence[StepLayout]
    hidden: Mapping[str, Tensor]
    replay: Work
    kept: Kept
    scratches: tuple[Tensor, ...]


class Graphs:
    """The recorded steps of a device.

    `recorded`, `replayed` and `refused` count recordings, replays and steps that could not be recorded.
    """

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
        """Drop all recordings, because models or adapters were loaded or dropped."""
        self._recordings.clear()
        self._met.clear()
        self._unfit.clear()

    def forward(self, batches: Mapping[str, ModelBatch]) -> Mapping[str, Tensor] | None:
        """Return logits [rows, vocabulary] by model, or hidden states [1, rows, width] for a stage without a head.

        They are valid until the next step. Returns None for a step that must run without a recording.
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
        """Record a step over these layouts, which then belong to the recording.

        Returns None if it cannot be recorded; steps of these models then always run without a recording.
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
        """Store a recording; beyond the limit, drop the least recently used one."""
        self._recordings[shape] = recorded
        if len(self._recordings) > self._most:
            self._recordings.popitem(last=False)

    def _work(self, filled: Mapping[str, ModelBatch], layouts: Sequence[StepLayout], kept: Kept | None) -> Work:
        """Return a function that runs a step over the contents of the layouts.

        Rows affect it only through these contents, so it can be recorded.
        """
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
    """Return the recordings of an engine on this device; None if it does not record."""
    cuda = units.device.type == "cuda"
    if choice == "off" or (choice == "auto" and not cuda):
        return None
    return Graphs(CudaRecorder(units.device) if cuda else Rerun(), units, pool)


def bucket(rows: int) -> int:
    """Return the number of rows that a batch is padded to: 1, 2, 4, 8, 16, 24, …"""
    return next((size for size in _SMALL if rows <= size), -(-rows // _STEP) * _STEP)


def table_width(groups: int) -> int:
    """Return the width of tables in page groups: a power of two."""
    return 1 << (groups - 1).bit_length()


def _decodes(batch: ModelBatch) -> bool:
    """Return whether every row is one token after the virtual ones, without prompt log-probabilities.

    With a head, every row must also be sampled.
    """
    return len(batch.rows) <= MOST_ROWS and all(
        len(row.tokens) == 1
        and row.start >= batch.model.spec.virtual_tokens
        and (not batch.model.has_head or (row.sample and not asks_prompt(batch.model, row)))
        for row in batch.rows
    )


def _filled(batch: ModelBatch) -> ModelBatch:
    """Add padding rows to a model's decode rows: token 0, or zeros, at position 0."""
    more = bucket(len(batch.rows)) - len(batch.rows)
    spans = tuple(RowSpan(batch.tokens + i, batch.tokens + i + 1, 0) for i in range(more))
    hidden = None if batch.hidden is None else torch.nn.functional.pad(batch.hidden, (0, 0, 0, more))
    return replace(batch, spans=(*batch.spans, *spans), ids=(*batch.ids, *(0,) * more), hidden=hidden)


def _still(batch: ModelBatch, layout: StepLayout) -> ModelBatch:
    """Return a batch that is the same for every step of a shape: its rows are as long as the tables are wide."""
    last = layout.tables.shape[2] * layout.page_tokens - 1
    return ModelBatch(
        batch.model, (), tuple(RowSpan(at, at + 1, last) for at in range(batch.tokens)), batch.ids, batch.hidden
    )


def _hidden(batches: Mapping[str, ModelBatch]) -> dict[str, Tensor]:
    """Return the input hidden states of stages without an embedding."""
    return {name: batch.hidden for name, batch in batches.items() if batch.hidden is not None}


def _own(batch: ModelBatch, made: Tensor) -> Tensor:
    """Return the result without the padding rows."""
    return made[: len(batch.rows)] if batch.model.has_head else made[:, : len(batch.rows)]


def _shape(filled: Mapping[str, ModelBatch], layouts: Sequence[StepLayout]) -> _Shape:
    return tuple((name, batch.tokens) for name, batch in filled.items()), tuple(
        layout.tables.shape[2] for layout in layouts
    )
