"""Record decode steps once per shape and replay them, so that a step costs one launch and no Python per module.

    rows --padded to a bucket, tables to a width--> layouts --copied into the recording's own--> replay --> logits,
    padding rows dropped

For a stage that starts from hidden states these are copied too; a stage without a head returns hidden states instead of
logits.

A shape consists of what runs, the bucket of its rows, and the width of their tables. Models that differ in adapters
only run as one (`recording.joint`): one recording serves rows of any of them, and a tensor states which adapter a row
uses. Other models are part of the shape, in order, each with a bucket of its own. A shape is recorded when it occurs
for the second time, or before (`record_next`). A padding row is one token at position 0; its K and V go to a page that
is never read (`kv.pool`).

A step with a prompt's chunk runs without a recording: decode rows add little to its cost, while a replay beside it
would read all weights a second time.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runtime.config import GraphChoice
from runtime.engine.models.components import ComponentPool
from runtime.engine.models.loaded import LoadedModel
from runtime.engine.recording.joint import JOINT, JointModels, join_layout
from runtime.engine.recording.recorder import CudaRecorder, Rerun, StepRecorder, Unrecordable, Work
from runtime.engine.recording.results import Results
from runtime.engine.sampling.row_request import asks_prompt
from runtime.engine.step.batch import ModelBatch
from runtime.engine.step.context import AdapterMix, Kept, RowSpan
from runtime.engine.step.layout import ContextBuilder, Filling, StepLayout, lay_out
from runtime.engine.step.runner import StepRun
from runtime.kv.pool import PagePool

#: Maximum rows of one model; in larger steps the overhead of running the modules one by one does not matter.
MOST_ROWS = 128
#: Maximum number of recordings, and of remembered shapes that have occurred once.
MOST_RECORDED, MOST_MET = 128, 4096
#: Recorded before they occur: shapes with up to so many rows, and tables for sequences of up to so many tokens.
WARM_ROWS, WARM_TOKENS = 64, 1024
_SMALL, _STEP = (1, 2, 4), 8

#: What runs (a model's name, or the chain of joint models) and its padded rows, and the table width of each layout.
_Shape = tuple[tuple[tuple[object, int], ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Padded:
    """A padded step.

    Fields:
        group: What runs, however many rows: the models, or the chain of joint ones.
        batches: Its rows by model; those of joint models by `JOINT`.
        mix: Which adapter each row of joint models uses.
    """

    group: object
    shape: _Shape
    batches: Mapping[str, ModelBatch]
    layouts: Sequence[StepLayout]
    mix: AdapterMix | None

    @property
    def contents(self) -> tuple[Tensor, ...]:
        """All tensors that differ between steps of one shape."""
        tensors = [tensor for layout in self.layouts for tensor in layout.contents]
        tensors += [batch.hidden for batch in self.batches.values() if batch.hidden is not None]
        return tuple(tensors) if self.mix is None else (*tensors, self.mix.index)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recorded step.

    Fields:
        contents: The tensors that it reads.
        replay: Runs it on their current values.
        kept, scratches: Other tensors at addresses that it uses.
    """

    contents: tuple[Tensor, ...]
    replay: Work
    kept: Kept
    scratches: tuple[Tensor, ...]


class Graphs:
    """The recorded steps of a device.

    `recorded`, `replayed` and `refused` count recordings, replays and steps that could not be recorded.
    """

    def __init__(self, recorder: StepRecorder, units: ComponentPool, pool: PagePool, most: int = MOST_RECORDED) -> None:
        self._recorder, self._units, self._pool, self._most = recorder, units, pool, most
        self._recordings: OrderedDict[_Shape, _Recorded] = OrderedDict()
        self._met: set[_Shape] = set()
        self._unfit: set[object] = set()
        self._joint = JointModels()
        self._kept: Kept = {}  # of joint models, shared by their recordings: it holds all their adapters
        self._results = Results(MOST_ROWS)
        self._next: deque[tuple[LoadedModel, int, int]] | None = None
        self.recorded = self.replayed = self.refused = 0

    def __len__(self) -> int:
        return len(self._recordings)

    def clear(self) -> None:
        """Drop all recordings, because models or adapters were loaded or dropped."""
        for each in (self._recordings, self._met, self._unfit, self._joint, self._kept, self._results):
            each.clear()
        self._next = None

    def forward(self, batches: Mapping[str, ModelBatch]) -> Mapping[str, Tensor] | None:
        """Return logits [rows, vocabulary] by model, or hidden states [1, rows, width] for a stage without a head.

        They are valid until the next step. Returns None for a step that must run without a recording.
        """
        if not batches or not all(_decodes(batch) for batch in batches.values()):
            return None
        for pad in (self._pad_joint, self._pad_apart):
            padded = pad(batches)
            made = None if padded is None else self._find_or_record(padded)
            if made is not None:
                return _own(batches, made)
        return None

    def record_next(self, models: Mapping[str, LoadedModel]) -> bool:
        """Record one shape that decode steps of these models may have; return whether there are more.

        Each chain is recorded with up to `WARM_ROWS` rows, and tables for up to `WARM_TOKENS` tokens of a sequence;
        many chains for fewer tokens, so that half of the room for recordings stays free.
        """
        if self._next is None:
            self._next = deque(itertools.islice(_shapes_ahead(models.values()), self._most // 2))
        while self._next:
            model, rows, width = self._next.pop()  # the largest first: smaller recordings then reuse its memory
            batches = {model.spec.name: ModelBatch(model, (), (), (), _no_hidden(model, self._units.device))}
            padded = self._pad_joint(batches, rows, width) or self._pad_apart(batches, rows, width)
            if padded is not None and padded.shape not in self._recordings:
                self._record(padded)
                return bool(self._next)
        return False

    def _pad_joint(self, batches: Mapping[str, ModelBatch], rows: int = 0, width: int = 0) -> _Padded | None:
        """Pad the rows of models that differ in adapters only, as one; None if they differ in more, or cannot run so.

        `rows`, `width`: at least so many rows and page groups.
        """
        if self._units.kernels is not None:  # which read the rows of each adapter from the host
            return None
        names = self._joint.adapters_of([batch.model for batch in batches.values()])
        count = sum(len(batch.rows) for batch in batches.values())
        model = next(iter(batches.values())).model
        group = model.chain, names
        if names is None or count > MOST_ROWS or group in self._unfit:
            return None
        total = bucket(max(count, rows))
        last = list(batches)[-1]
        filled = {
            name: _filled(batch, total - count + len(batch.rows) if name == last else len(batch.rows))
            for name, batch in batches.items()
        }
        layouts = self._lay_out(filled, width)
        if len(layouts) > 1:
            return None
        layout = join_layout(layouts[0])
        hidden = [batch.hidden for batch in filled.values() if batch.hidden is not None]
        spans = tuple(RowSpan(at, at + 1, 0) for at in range(total))
        whole = ModelBatch(model, (), spans, (0,) * total, torch.cat(hidden, dim=1) if hidden else None)
        mix = self._joint.mix_of(names, filled.values(), self._units.device)
        return _Padded(group, _shape([(group, total)], [layout]), {JOINT: whole}, [layout], mix)

    def _pad_apart(self, batches: Mapping[str, ModelBatch], rows: int = 0, width: int = 0) -> _Padded | None:
        """Pad each model's rows by themselves; None if a step of these models cannot be recorded."""
        group = tuple(batches)
        if group in self._unfit:
            return None
        filled = {name: _filled(batch, bucket(max(len(batch.rows), rows))) for name, batch in batches.items()}
        layouts = self._lay_out(filled, width)
        shape = _shape([(name, batch.tokens) for name, batch in filled.items()], layouts)
        return _Padded(group, shape, filled, layouts, None)

    def _lay_out(self, filled: Mapping[str, ModelBatch], width: int) -> list[StepLayout]:
        filling = Filling(self._pool.spill, lambda groups: table_width(max(groups, width)))
        return lay_out(filled, self._units.device, filling)

    def _find_or_record(self, padded: _Padded) -> Mapping[str, Tensor] | None:
        known = self._recordings.get(padded.shape)
        if known is not None:
            self._recordings.move_to_end(padded.shape)
            for into, given in zip(known.contents, padded.contents, strict=True):
                into.copy_(given)
        elif padded.shape in self._met:
            known = self._record(padded)
            if known is None:
                return None
        else:
            if len(self._met) >= MOST_MET:
                self._met.clear()
            self._met.add(padded.shape)
            return self._work(padded, None)()
        self.replayed += 1
        return known.replay()

    def _record(self, padded: _Padded) -> _Recorded | None:
        """Record a step over these tensors, which then belong to the recording.

        Returns None if it cannot be recorded; steps of these models then always run without a recording. Beyond the
        limit, the least recently used recording is dropped.
        """
        kept: Kept = {} if padded.mix is None else self._kept
        try:
            replay = self._recorder.record(self._work(padded, kept))
        except Unrecordable:
            self._unfit.add(padded.group)
            self.refused += 1
            return None
        self.recorded += 1
        made = self._recordings[padded.shape] = _Recorded(padded.contents, replay, kept, self._pool.scratches)
        if len(self._recordings) > self._most:
            self._recordings.popitem(last=False)
        return made

    def _work(self, padded: _Padded, kept: Kept | None) -> Work:
        """Return a function that runs a step over the contents of its tensors.

        Rows affect it only through these contents, so it can be recorded.
        """
        still = {name: _still(padded.batches[name], layout) for layout in padded.layouts for name in layout.members}
        batches = {name: still[name] for name in padded.batches}  # in the step's order
        picks = {name: range(batch.tokens) for name, batch in batches.items()}

        def work() -> Mapping[str, Tensor]:
            fresh = [replace(layout, rotaries={}) for layout in padded.layouts]
            frames = ContextBuilder(batches, fresh, self._units, self._pool, kept, padded.mix)
            run = StepRun(batches, frames, self._units.device, False, picks, kept, padded.mix)
            return self._results.store({**run.forward(), **run.behind})

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

    With a head, every row must also be sampled. No row has hidden states saved or read by a probe.
    """
    return len(batch.rows) <= MOST_ROWS and all(
        len(row.tokens) == 1
        and not (row.saves or row.probed)
        and row.start >= batch.model.spec.virtual_tokens
        and (not batch.model.has_head or (row.sample and not asks_prompt(batch.model, row)))
        for row in batch.rows
    )


def _filled(batch: ModelBatch, count: int) -> ModelBatch:
    """Add padding rows up to `count` to a model's decode rows: token 0, or zeros, at position 0."""
    more = count - len(batch.rows)
    spans = tuple(RowSpan(batch.tokens + i, batch.tokens + i + 1, 0) for i in range(more))
    hidden = None if batch.hidden is None else torch.nn.functional.pad(batch.hidden, (0, 0, 0, more))
    return replace(batch, spans=(*batch.spans, *spans), ids=(*batch.ids, *(0,) * more), hidden=hidden)


def _still(batch: ModelBatch, layout: StepLayout) -> ModelBatch:
    """Return a batch that is the same for every step of a shape: its rows are as long as the tables are wide."""
    last = layout.tables.shape[2] * layout.page_tokens - 1
    return ModelBatch(
        batch.model, (), tuple(RowSpan(at, at + 1, last) for at in range(batch.tokens)), batch.ids, batch.hidden
    )


def _own(batches: Mapping[str, ModelBatch], made: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return each model's own rows of the results: those of joint models are back to back, padding rows last."""
    own: dict[str, Tensor] = {}
    at = 0
    for name, batch in batches.items():
        lo, whole = (at, made[JOINT]) if JOINT in made else (0, made[name])
        at = lo + len(batch.rows)
        own[name] = whole[lo:at] if batch.model.has_head else whole[:, lo:at]
    return own


def _shape(runs: Sequence[tuple[object, int]], layouts: Sequence[StepLayout]) -> _Shape:
    return tuple(runs), tuple(layout.tables.shape[2] for layout in layouts)


def _no_hidden(model: LoadedModel, device: torch.device) -> Tensor | None:
    """Return the input of a stage without rows: hidden states [1, 0, width]; None for one that starts from ids."""
    return None if model.has_embedding else torch.empty((1, 0, model.width), dtype=model.inside, device=device)


def _shapes_ahead(models: Iterable[LoadedModel]) -> Iterator[tuple[LoadedModel, int, int]]:
    """Yield (model, rows, page groups) of models that do not run as one, those with few page groups first."""
    kinds = {(model.chain, model.adapters[0] is None): model for model in models}.values()
    rows = sorted({bucket(count) for count in range(1, WARM_ROWS + 1)})
    for power in range(WARM_TOKENS.bit_length()):
        for model in kinds:
            tokens = min(model.spec.max_model_len, WARM_TOKENS)
            if 1 << power <= table_width(-(-tokens // model.spec.page_tokens)):
                yield from ((model, count, 1 << power) for count in rows)
