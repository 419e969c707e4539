"""The paged executor: one device, one page pool, any number of models; a step runs all their rows together.

Implements `runtime.types.Engine`. It decides nothing: which rows run, and on which pages, is in the plan.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from runtime.config import AheadChoice, EngineConfig
from runtime.engine.executors.background import Background
from runtime.engine.models.components import ComponentPool
from runtime.engine.models.loaded import LoadedModel
from runtime.engine.models.registry import ModelRegistry
from runtime.engine.recording.graphs import graphs_for
from runtime.engine.sampling.output import Sampling, sampling_of, wanted_of
from runtime.engine.step.batch import Awaited, ModelBatch
from runtime.engine.step.context import RowSpan
from runtime.engine.step.layout import ContextBuilder, lay_out
from runtime.engine.step.runner import StepRun
from runtime.kv.pool import PagePool
from runtime.types import EngineMemory, Launched, ModelSpec, Row, SegmentRun, StepPlan, StepResult
from zoo.store import Store


class PagedEngine:
    """See the top of the file.

    Args:
        store: where the weights are.
        config: device, pool size, page size, dtype.
        names: models to load now; the one with the largest KV per token fixes the bytes of a page.

    Raises:
        NotServable, NotFound, AmbiguousName, DamagedObject: as loading does.
    """

    def __init__(self, store: Store, config: EngineConfig, names: Sequence[str]) -> None:
        self._config = config
        self._residents = ModelRegistry(store, config, "paged")
        self._pool = PagePool(config.kv_cache_memory_bytes, self._residents.half_page(names), config.device)
        # A trace tells which modules ran, and behind a recording none does.
        self._graphs = None if config.trace_segments else graphs_for(config.graphs, self._residents.units, self._pool)
        self._ahead = looks_ahead(config.async_scheduling, self._residents.units.device)
        self._background = (
            Background(self.execute) if self._ahead and self._residents.units.device.type == "cpu" else None
        )
        self._before: Sampling | None = None
        self._over = 0  # when a result was last read
        for name in names:
            self.load(name)

    @property
    def device(self) -> str:
        return self._config.device

    @property
    def page_capacity(self) -> int:
        return self._pool.pages

    def models(self) -> tuple[ModelSpec, ...]:
        return self._residents.specs()

    def load(self, name: str) -> ModelSpec:
        """Make a model ready; one that is loaded already costs nothing. Raises as the constructor."""
        before = len(self._residents.models)
        spec = self._residents.load(name, self._pool).spec
        if len(self._residents.models) > before:
            self._forget()  # adapters came to units that recordings have in them
        return spec

    def unload(self, name: str) -> None:
        """Drop a model; what no other model uses is freed. Raises NotFound."""
        self._forget()
        self._residents.unload(name)

    @property
    def ahead(self) -> bool:
        return self._ahead

    def launch(self, plan: StepPlan) -> Launched:
        """Begin a step; on a CPU, where that is all of it, on another thread."""
        return self._begin(plan) if self._background is None else self._background.launch(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        return self._begin(plan).result()

    @torch.inference_mode()
    def _begin(self, plan: StepPlan) -> Launched:
        begin = time.perf_counter_ns()
        before, self._before = self._before, None
        models, largest = self._residents.models, self._residents.units.operations.largest
        learn(models, plan)
        batches = rows_of(models, self._pool, plan, before)
        logits = None if self._graphs is None else self._graphs.forward(batches)
        segments: list[SegmentRun] = []
        if logits is None:
            run = eager(batches, self._residents.units, self._pool, self._config.trace_segments)
            sampling, segments = run.sample(largest, before), run.segments
        else:
            sampling = sampling_of(
                batches, {name: wanted_of(batch) for name, batch in batches.items()}, logits, largest, before
            )
        self._before = sampling
        return _Begun(self, plan.step, sampling, tuple(segments), begin)

    def busy_since(self, begin: int) -> int:
        """Nanoseconds that a step which is over now has had this device, if it came to it at `begin`."""
        since, self._over = max(begin, self._over), time.perf_counter_ns()
        return self._over - since

    def _forget(self) -> None:
        if self._graphs is not None:
            self._graphs.forget()

    def memory(self) -> EngineMemory:
        return EngineMemory(self._residents.units.nbytes, self._residents.bytes_alone(), self._pool.nbytes)


@dataclass(frozen=True, slots=True)
class _Begun:
    """`Launched`: what it computes is under way."""

    engine: PagedEngine
    step: int
    sampling: Sampling
    segments: tuple[SegmentRun, ...]
    begin: int

    def result(self) -> StepResult:
        outcome = self.sampling.read()
        return StepResult(
            self.step, outcome.sampled, outcome.prompts, self.segments, self.engine.busy_since(self.begin)
        )


def looks_ahead(choice: AheadChoice, device: torch.device) -> bool:
    """Whether steps on this device are launched before the ones before are read."""
    return choice == "on" or (choice == "auto" and device.type != "cpu")


def paged_run(
    models: Mapping[str, LoadedModel], units: ComponentPool, pool: PagePool, plan: StepPlan, trace: bool
) -> StepRun:
    """A step over pages, ready to run. `trace`: record what runs."""
    return eager(rows_of(models, pool, plan), units, pool, trace)


def eager(batches: Mapping[str, ModelBatch], units: ComponentPool, pool: PagePool, trace: bool) -> StepRun:
    """A step that runs its modules one by one."""
    return StepRun(batches, ContextBuilder(batches, lay_out(batches, units.device), units, pool), units.device, trace)


def learn(models: Mapping[str, LoadedModel], plan: StepPlan) -> None:
    """Forget the sequences that a plan releases, and learn those that it opens."""
    for seq in plan.released:
        for model in models.values():
            if seq in model.sequences:
                model.close(seq)
    for opened in plan.opened:
        models[opened.request.model].open(opened.request, opened.output)


def rows_of(
    models: Mapping[str, LoadedModel], pool: PagePool, plan: StepPlan, before: Sampling | None = None
) -> dict[str, ModelBatch]:
    """A plan's rows by model, back to back, their new pages in their tables. `before`: what the step before has
    sampled.

    Raises ValueError for a row that awaits a token where no step was before.
    """
    open_pages(models, pool, plan)
    return laid(models, plan, before)


def laid(models: Mapping[str, LoadedModel], plan: StepPlan, before: Sampling | None = None) -> dict[str, ModelBatch]:
    """As `rows_of`, where the new pages are in the tables already."""
    by_model: dict[str, list[Row]] = {}
    for row in plan.rows:
        by_model.setdefault(row.model, []).append(row)
    return {name: _rows(model, by_model[name], before) for name, model in models.items() if name in by_model}


def _rows(model: LoadedModel, rows: Sequence[Row], before: Sampling | None) -> ModelBatch:
    """Lay a model's rows out back to back."""
    spans: list[RowSpan] = []
    at = 0
    for row in rows:
        end = at + len(row.tokens)
        spans.append(RowSpan(at, end, row.start))
        at = end
    ids = tuple(token for row in rows for token in row.tokens)
    return ModelBatch(model, tuple(rows), tuple(spans), ids, awaited=_awaited(model, rows, spans, before))


def _awaited(
    model: LoadedModel, rows: Sequence[Row], spans: Sequence[RowSpan], before: Sampling | None
) -> Awaited | None:
    seqs = [row.seq for row in rows if row.awaits]
    if not seqs:
        return None
    if before is None:
        raise ValueError(f"{seqs[0]} awaits a token, and no step was before")
    return Awaited(
        [span.hi - 1 for row, span in zip(rows, spans, strict=True) if row.awaits],
        before.tokens_of(model.spec.name, seqs),
    )


def open_pages(models: Mapping[str, LoadedModel], pool: PagePool, plan: StepPlan) -> None:
    """Append each row's new pages to its table. Those that are empty, and not filled by this step, are handed out
    zeroed (see kv.pool).

    What lies before a row's start has been written already, by somebody else.
    """
    new: list[int] = []
    for row in plan.rows:
        if row.new_pages:
            model = models[row.model]
            held = model.sequences[row.seq]
            width = model.spec.page_tokens
            filled = max((row.start + len(row.tokens)) // width, -(-row.start // width)) - held.groups
            model.tables.append(held, row.new_pages)
            new.extend(page for group in row.new_pages[max(filled, 0) :] for page in group)
    if new:
        pool.clear(new)
