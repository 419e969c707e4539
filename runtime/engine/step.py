"""One step: all rows of all models, segment by segment.

    plan.rows --by model--> ids, positions, spans --segments--> hidden states --head, wanted rows only--> logits --> tokens

Hidden states live per model; a segment joins those of its models, runs its units once over the union, and parts them again. Rows of a
model stay together and models keep one order, so joining and parting are slices.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.engine.frame import AdapterSpan, Frame, RowSpan, add_pages, running
from runtime.engine.loaded import LoadedModel
from runtime.engine.sampling import Draw, prompt_logprobs, sample
from runtime.engine.segments import Segment, plan_segments
from runtime.engine.units import Unit, UnitStore
from runtime.kv.pool import PagePool
from runtime.types import Logprob, PromptLogprobs, Row, Sampled, SegmentRun, StepPlan
from surgery.components import Where


@dataclass(frozen=True, slots=True)
class Wanted:
    """A row's claim on logits of its model's tokens [lo, hi): the last one to sample, or all of a chunk for prompt log-probabilities."""

    row: Row
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class ModelBatch:
    """One model's rows in this step, back to back: `tokens` of them, of which `wanted` need logits."""

    model: LoadedModel
    rows: tuple[Row, ...]
    spans: tuple[RowSpan, ...]
    tokens: int
    wanted: tuple[Wanted, ...]

    @property
    def picks(self) -> list[int]:
        """Local indices of the tokens that go through the head."""
        return [index for want in self.wanted for index in range(want.lo, want.hi)]


def model_batch(model: LoadedModel, rows: Sequence[Row]) -> ModelBatch:
    """Lay a model's rows out back to back."""
    spans, wanted, at = [], [], 0
    for row in rows:
        end = at + len(row.tokens)
        spans.append(RowSpan(at, end, row.start))
        asks = model.sequences[row.seq].request.sampling.prompt_logprobs is not None
        if asks and row.start < len(model.sequences[row.seq].request.prompt):
            wanted.append(Wanted(row, at, end))
        elif row.sample:
            wanted.append(Wanted(row, end - 1, end))
        at = end
    return ModelBatch(model, tuple(rows), tuple(spans), at, tuple(wanted))


@functools.lru_cache(maxsize=256)
def _segments(chains: tuple[tuple[str, tuple[str, ...]], ...]) -> tuple[Segment, ...]:
    return plan_segments(dict(chains))


class StepRun:
    """The state of one step while it runs. `execute` gives its tokens; `segments` records what ran, when asked to."""

    def __init__(self, models: Mapping[str, LoadedModel], units: UnitStore, pool: PagePool, plan: StepPlan, trace: bool) -> None:
        self._units = units
        self._pool = pool
        self._device = units.device
        self._trace = trace
        self.segments: list[SegmentRun] = []
        by_model: dict[str, list[Row]] = {}
        for row in plan.rows:
            by_model.setdefault(row.model, []).append(row)
        self._open_pages(models, plan)
        self._batches = {name: model_batch(model, by_model[name]) for name, model in models.items() if name in by_model}
        self._hidden: dict[str, Tensor] = {}
        self._logits: dict[str, Tensor] = {}
        self._frames: dict[tuple[tuple[str, ...], tuple[int, ...] | None], Frame] = {}
        self._rotaries: dict[tuple[tuple[str, ...], str], tuple[Tensor, Tensor]] = {}

    def execute(self) -> tuple[tuple[Sampled, ...], tuple[PromptLogprobs, ...]]:
        """Run every segment, then sample. Tokens come in the plan's order by model."""
        for segment in _segments(tuple((name, batch.model.chain) for name, batch in self._batches.items())):
            self._run(segment)
        sampled: list[Sampled] = []
        prompts: list[PromptLogprobs] = []
        for name, batch in self._batches.items():
            if batch.wanted:
                self._finish(batch, self._logits[name], sampled, prompts)
        return tuple(sampled), tuple(prompts)

    def _open_pages(self, models: Mapping[str, LoadedModel], plan: StepPlan) -> None:
        """Append each row's new pages to its table; hand them out zeroed (see kv.pool)."""
        new: list[int] = []
        for row in plan.rows:
            if row.new_pages:
                model = models[row.model]
                model.tables.append(model.sequences[row.seq], row.new_pages)
                new.extend(page for group in row.new_pages for page in group)
        if new:
            self._pool.clear(torch.tensor(new, device=self._device))

    def _run(self, segment: Segment) -> None:
        batches = [self._batches[name] for name in segment.models]
        first = batches[0].model
        units = first.units[segment.starts[0] : segment.starts[0] + len(segment.units)]
        hidden = self._joined(segment, units[0])
        for step, unit in enumerate(units):
            if unit.kind == "lm_head":
                self._run_head(unit, segment, batches, hidden)
                break
            hidden = self._run_unit(unit, segment, [start + step for start in segment.starts], hidden)
        else:
            parts = torch.split(hidden, [batch.tokens for batch in batches], dim=1)
            self._hidden.update(zip(segment.models, parts, strict=True))
        if self._trace:
            self._record(segment, units, batches)

    def _joined(self, segment: Segment, first: Unit) -> Tensor:
        """What the segment starts from: token ids for an embedding, else its models' hidden states. [1, tokens(, width)]."""
        if first.kind == "embedding":
            ids = [token for name in segment.models for row in self._batches[name].rows for token in row.tokens]
            return torch.tensor([ids], device=self._device)
        parts = [self._hidden[name] for name in segment.models]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _run_unit(self, unit: Unit, segment: Segment, places: Sequence[int], hidden: Tensor) -> Tensor:
        frame = self._frame(unit, segment.models, places)
        rotary = None if unit.rotary is None else self._rotary(unit.rotary, segment.models, hidden, frame)
        with running(frame):
            out: Tensor = unit.module(hidden, Where(frame.positions, rotary))
        return out

    def _run_head(self, unit: Unit, segment: Segment, batches: Sequence[ModelBatch], hidden: Tensor) -> None:
        """The head runs over the rows that need logits, not over every token."""
        picks: list[int] = []
        counts: list[int] = []
        base = 0
        for batch in batches:
            own = batch.picks
            picks.extend(base + index for index in own)
            counts.append(len(own))
            base += batch.tokens
        if not picks:
            return
        if len(picks) != hidden.shape[1]:
            hidden = hidden[:, torch.tensor(picks, device=self._device)]
        frame = Frame(torch.zeros((1, len(picks)), dtype=torch.int64, device=self._device), (), _adapter_spans(batches, counts))
        with running(frame):
            logits: Tensor = unit.module(hidden)
        self._logits.update(zip(segment.models, torch.split(logits[0], counts), strict=True))

    def _frame(self, unit: Unit, models: tuple[str, ...], places: Sequence[int]) -> Frame:
        """The frame of these models; with tables when the unit attends. Models at one depth share a frame for all their layers."""
        if not unit.attends:
            return next((f for (names, _), f in self._frames.items() if names == models), None) or self._plain_frame(models)
        indices = tuple(self._batches[name].model.kv_index[place] for name, place in zip(models, places, strict=True))
        numbers = tuple(index for index in indices if index is not None)
        layers = {self._batches[name].model.spec.kv_layers for name in models}
        aligned = len(set(numbers)) == 1 and len(layers) == 1
        key = (models, None if aligned else numbers)
        if key not in self._frames or self._frames[key].view is None:
            self._frames[key] = self._paged_frame(models, None if aligned else numbers)
        frame = self._frames[key]
        frame.layer = numbers[0] if aligned else 0
        return frame

    def _plain_frame(self, models: tuple[str, ...]) -> Frame:
        batches = [self._batches[name] for name in models]
        spans: list[RowSpan] = []
        base = 0
        for batch in batches:
            spans.extend(RowSpan(s.lo + base, s.hi + base, s.start) for s in batch.spans)
            base += batch.tokens
        positions = torch.tensor([[p for s in spans for p in range(s.start, s.length)]], device=self._device)
        frame = Frame(positions, tuple(spans), _adapter_spans(batches, [batch.tokens for batch in batches]))
        self._frames[models, None] = frame
        return frame

    def _paged_frame(self, models: tuple[str, ...], layers: tuple[int, ...] | None) -> Frame:
        """A frame with page tables: of all layers, or of one given layer per model where chains differ in depth."""
        plain = self._frames.get((models, None)) if layers is None else None
        frame = plain if plain is not None else self._plain_frame(models)
        batches = [self._batches[name] for name in models]
        view = self._pool.view(batches[0].model.geometry)
        groups = max(-(-span.length // view.page_tokens) for span in frame.spans)
        tables = [batch.model.pages([row.seq for row in batch.rows], groups) for batch in batches]
        if layers is not None:
            frame = Frame(frame.positions, frame.spans, frame.adapters)
            tables = [table[:, layer : layer + 1] for table, layer in zip(tables, layers, strict=True)]
        add_pages(frame, view, self._pool, torch.cat(tables))
        return frame

    def _rotary(self, key: str, models: tuple[str, ...], hidden: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
        if (models, key) not in self._rotaries:
            self._rotaries[models, key] = self._units.rotaries[key](hidden, frame.positions)
        return self._rotaries[models, key]

    def _record(self, segment: Segment, units: Sequence[Unit], batches: Sequence[ModelBatch]) -> None:
        start = segment.starts[0]
        placed = batches[0].model.manifest.components[start : start + len(units)]
        self.segments.append(
            SegmentRun(
                components=segment.units,
                kind=units[0].kind if len(units) == 1 else "segment",
                layers=tuple(p.layer for p in placed),
                models=segment.models,
                seqs=sum(len(batch.rows) for batch in batches),
                tokens=sum(batch.tokens for batch in batches),
            )
        )

    def _finish(self, batch: ModelBatch, logits: Tensor, sampled: list[Sampled], prompts: list[PromptLogprobs]) -> None:
        """Sample a model's rows; prompt log-probabilities come from the same logits."""
        chosen, draws, at = [], [], 0
        for want in batch.wanted:
            count = want.hi - want.lo
            if count > 1 or not want.row.sample or _asks(batch, want):
                prompts.extend(_prompt_part(batch, want, logits[at : at + count]))
            at += count
            if want.row.sample:
                chosen.append(at - 1)
                draws.append(_draw(batch.model, want.row))
        if not draws:
            return
        rows = logits if len(chosen) == logits.shape[0] else logits[torch.tensor(chosen, device=logits.device)]
        results = sample(rows, draws)
        for result in results:
            batch.model.sequences[result.seq].output.append(result.token)
        sampled.extend(results)


def _asks(batch: ModelBatch, want: Wanted) -> bool:
    request = batch.model.sequences[want.row.seq].request
    return request.sampling.prompt_logprobs is not None and want.row.start < len(request.prompt)


def _prompt_part(batch: ModelBatch, want: Wanted, logits: Tensor) -> list[PromptLogprobs]:
    """Log-probabilities of the prompt tokens that this chunk's positions predict."""
    request = batch.model.sequences[want.row.seq].request
    first = want.row.start + 1
    targets = request.prompt[first : want.row.start + logits.shape[0] + 1]
    if not targets:
        return []
    rows = prompt_logprobs(logits[: len(targets)], targets, request.sampling.prompt_logprobs or 0)
    chosen = tuple(Logprob(token, row.chosen) for token, row in zip(targets, rows, strict=True))
    return [PromptLogprobs(want.row.seq, first, chosen, tuple(row.top for row in rows))]


def _draw(model: LoadedModel, row: Row) -> Draw:
    held = model.sequences[row.seq]
    params = held.request.sampling
    stops = tuple(dict.fromkeys((*model.spec.eos_token_ids, *params.stop_token_ids)))
    return Draw(row.seq, params, row.generated, held.request.prompt, held.output, stops)


def _adapter_spans(batches: Sequence[ModelBatch], counts: Sequence[int]) -> tuple[AdapterSpan, ...]:
    """Which tokens use which adapter, when each batch has so many tokens."""
    spans, base = [], 0
    for batch, count in zip(batches, counts, strict=True):
        if batch.model.adapter is not None and count:
            spans.append(AdapterSpan(batch.model.adapter, base, base + count))
        base += count
    return tuple(spans)
