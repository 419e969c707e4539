"""The dense executor (Baton): one left-padded batch per model; a step runs all of them together, and prompts apart
where that is asked for.

Implements `runtime.types.Engine`. A plan's rows are what may run. Who of them sits in a slot, comes in, goes out or
waits is decided by `runtime.policy.batching.dense`, for it depends on the shapes of batches, which only the executor
has; who waits is named in the result's `deferred`. Memory is counted in the pages of the device that the plan's maker
counts in, padding included.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from runtime.config import EngineConfig
from runtime.engine.dense.batch import DenseBatch, rows_by_model
from runtime.engine.dense.context import DenseContexts, PaddedBatch
from runtime.engine.dense.padding_stats import IdleCounts
from runtime.engine.models.registry import ModelRegistry
from runtime.engine.sampling.output import Outcome
from runtime.engine.sampling.sampler import Largest
from runtime.engine.step.runner import StepRun
from runtime.kv.pool import PageSizes
from runtime.policy.batching.dense import LaneDecision, decide_lane
from runtime.types import EngineMemory, Finished, Launched, ModelSpec, Row, SegmentRun, StepPlan, StepResult
from zoo.store import Store


class DenseEngine:
    """See the top of the file. Since the engine began: `idle` counts what windows held, useful or not, computed or not
    (BA-18); `peak_pages`, the most pages that were in use at once.

    Args:
        store: where the weights are.
        config: device, memory for K and V, page size, dtype; `dense` says how slots are filled.
        names: models to load now; the one with the largest KV per token fixes the bytes of a page.

    Raises:
        NotServable, NotFound, AmbiguousName, DamagedObject: as loading does.
    """

    def __init__(self, store: Store, config: EngineConfig, names: Sequence[str]) -> None:
        self._config = config
        self._residents = ModelRegistry(store, config, "dense")
        self._sizes = PageSizes(config.kv_cache_memory_bytes, self._residents.half_page(names))
        self._lanes: dict[str, DenseBatch] = {}
        self.idle = IdleCounts()
        self.peak_pages = 0
        for name in names:
            self.load(name)

    @property
    def device(self) -> str:
        return self._config.device

    @property
    def page_capacity(self) -> int:
        return self._sizes.count

    @property
    def pages_used(self) -> int:
        """Pages that batches and what is kept beside them take now, padding included."""
        return sum(lane.pages for lane in self._lanes.values())

    def models(self) -> tuple[ModelSpec, ...]:
        return self._residents.specs()

    @property
    def largest(self) -> Largest:
        """How this device finds greedy rows' tokens."""
        return self._residents.units.operations.largest

    def load(self, name: str) -> ModelSpec:
        """Make a model ready; one that is loaded already costs nothing. Raises as the constructor."""
        model = self._residents.load(name, self._sizes)
        if model.spec.name not in self._lanes:
            self._lanes[model.spec.name] = DenseBatch(model, self._residents.units.device, self._config.dense)
        return model.spec

    def unload(self, name: str) -> None:
        """Drop a model; what no other model uses is freed. Raises NotFound."""
        self._residents.unload(name)
        del self._lanes[name]

    def memory(self) -> EngineMemory:
        return EngineMemory(
            self._residents.units.nbytes, self._residents.bytes_alone(), 2 * self._sizes.count * self._sizes.half_bytes
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter_ns()
        self._forget(plan.released)
        for opened in plan.opened:
            self._residents.models[opened.request.model].open(opened.request, opened.output)
        step = _DenseStep(self, self._lanes, rows_by_model(plan.rows))
        step.run()
        self.idle = self.idle.plus(step.idle)
        deferred = tuple(row.seq for row in plan.rows if row.seq not in step.ran)
        outcome = step.outcome
        busy = time.perf_counter_ns() - begin
        return StepResult(
            plan.step, outcome.sampled, outcome.prompts, tuple(step.segments), busy, deferred, step.idle.wasted
        )

    @property
    def ahead(self) -> bool:
        """Never: who of a plan runs is decided with the batches at hand, so what the next one may be is not known
        before.
        """
        return False

    def launch(self, plan: StepPlan) -> Launched:
        return Finished(self.execute(plan))

    def decide(self, lane: DenseBatch, rows: Sequence[Row], others: int, must: bool) -> LaneDecision:
        """What a lane does with these rows of the plan."""
        return decide_lane(lane.view(rows, others, self._sizes.count, must), self._config.dense)

    def spare(self, pages: int) -> int:
        """Pages that a batch may take to grow into, when so many are in use."""
        return max(0, int(self._config.dense.low * self._sizes.count) - pages)

    def run(self, batches: Mapping[str, PaddedBatch]) -> StepRun:
        """A run over open windows."""
        units = self._residents.units
        rows = {name: batch.rows for name, batch in batches.items()}
        return StepRun(rows, DenseContexts(batches, units), units.device, self._config.trace_segments)

    def _forget(self, released: Sequence[str]) -> None:
        """Finished rows stay in their slots until their batch is done in the modes that run batches to completion."""
        stays = self._config.dense.mode in ("run-to-completion", "pd")
        for seq in released:
            for lane in self._lanes.values():
                if seq in lane.model.sequences:
                    lane.model.close(seq)
                    lane.release(seq, stays=stays)


class _DenseStep:
    """One step over all lanes while it runs."""

    def __init__(self, engine: DenseEngine, lanes: Mapping[str, DenseBatch], rows: Mapping[str, list[Row]]) -> None:
        self._engine = engine
        self._lanes = lanes
        self._rows = rows
        self._outcomes: list[Outcome] = []
        self._windows: dict[str, PaddedBatch] = {}
        self.segments: list[SegmentRun] = []
        self.ran: set[str] = set()
        self.idle = IdleCounts()

    @property
    def outcome(self) -> Outcome:
        sampled = tuple(one for outcome in self._outcomes for one in outcome.sampled)
        return Outcome(sampled, tuple(one for outcome in self._outcomes for one in outcome.prompts))

    def run(self) -> None:
        """Lanes one after the other, prompts apart as they come; then the windows of all of them together."""
        for name, rows in self._rows.items():
            self._turn(self._lanes[name], rows)
        if self._windows:
            self._execute(self._windows)
        for lane in self._lanes.values():
            if not lane.seats and lane.slab.stored_rows:
                lane.fit(0, 0, 0)

    def _turn(self, lane: DenseBatch, rows: Sequence[Row]) -> None:
        decision = self._decision(lane, rows)
        named = {row.seq: row for row in rows}
        if decision.clear:
            lane.clear()
        for seq in decision.leaving:
            lane.save(seq)
        spare = self._engine.spare(decision.pages)
        if decision.apart or not decision.window:
            lane.fit(len(lane.seats), lane.slab.columns.needed, spare)
        for batch in decision.apart:
            try:
                made = lane.apart([named[seq] for seq in batch])
                self._execute({lane.model.spec.name: made})
                lane.keep(made)
            finally:
                lane.close_prompts()
        if decision.window:
            self._windows[lane.model.spec.name] = lane.window([named[seq] for seq in decision.window], spare)
        self.ran |= decision.runs

    def _decision(self, lane: DenseBatch, rows: Sequence[Row]) -> LaneDecision:
        """The policy's; where even the least that must run is more than there is, the other lanes' rows go out and make
        room.
        """
        others = [each for each in self._lanes.values() if each is not lane]
        must = not self.ran
        decision = self._engine.decide(lane, rows, sum(each.pages for each in others), must)
        if must and decision.pages > self._engine.page_capacity:
            for each in others:
                each.park()
            decision = self._engine.decide(lane, rows, sum(each.pages for each in others), must)
        return decision

    def _execute(self, batches: Mapping[str, PaddedBatch]) -> None:
        self._engine.peak_pages = max(self._engine.peak_pages, self._engine.pages_used)
        run = self._engine.run(batches)
        self._outcomes.append(run.execute(self._engine.largest))
        self.segments.extend(run.segments)
        for name, batch in batches.items():
            self.idle = self.idle.plus(self._lanes[name].counts(batch))
