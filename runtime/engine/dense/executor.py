"""The dense executor (Baton): one left-padded batch per model.

A step runs the batches of all models together, and prompts in batches of their own in the modes that do so. Implements
`runtime.chains.StageEngine` for whole chains.

A plan's rows are the rows that may run. `runtime.policy.batching.dense` decides which of them have a slot, get one,
lose theirs or wait, because that depends on the shapes of the batches, which only the executor has. Rows that wait are
named in the result's `deferred`. Memory is counted in the device's pages, as the plan does, padding included.

K and V are kept by sequence, not in pages: a sequence that begins with a prefix of another one gets a copy of that
one's first tokens (`StepPlan.copied`), and no sequence moves to another device.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from runtime.chains import Array, Lack, Likeness, Stage, StageResult
from runtime.config import EngineConfig
from runtime.engine.dense.batch import DenseBatch, rows_by_model
from runtime.engine.dense.context import DenseContexts, PaddedBatch
from runtime.engine.dense.padding_stats import IdleCounts
from runtime.engine.models.registry import ModelRegistry
from runtime.engine.sampling.output import Outcome
from runtime.engine.sampling.sampler import Largest
from runtime.engine.step.runner import StepRun
from runtime.engine.tensors.convert import likeness
from runtime.kv.pool import PageSizes
from runtime.policy.batching.dense import LaneDecision, decide_lane
from runtime.types import Copied, EngineMemory, ModelSpec, Row, SegmentRun, StepPlan, StepResult
from zoo.errors import NotServable
from zoo.store import Store


class DenseEngine:
    """`runtime.chains.StageEngine` over dense batches, for one device.

    Since its start, `idle` counts the places of all windows, useful or idle, computed or skipped (BA-18), and
    `peak_pages` is the highest number of pages in use.

    Args:
        store: the store that holds the weights.
        config: device, memory for K and V, dtype; `dense` sets how slots are filled.
        half_page: bytes of K (and of V) in a page (`engine.models.registry.half_page`).
        device: the device's name in paths; empty means the name of the hardware.
    """

    lacks: frozenset[Lack] = frozenset(("parts", "pages"))

    def __init__(self, store: Store, config: EngineConfig, half_page: int, device: str = "") -> None:
        self._config = config
        self._device = device or config.device
        self._registry = ModelRegistry(store, config, "dense")
        self._sizes = PageSizes(config.kv_cache_memory_bytes, half_page)
        self._lanes: dict[str, DenseBatch] = {}
        self.idle = IdleCounts()
        self.peak_pages = 0

    @property
    def device(self) -> str:
        return self._device

    @property
    def page_capacity(self) -> int:
        return self._sizes.count

    @property
    def page_bytes(self) -> int:
        return 2 * self._sizes.half_bytes

    @property
    def pages_used(self) -> int:
        """Pages that the batches and the saved sequences take now, padding included."""
        return sum(lane.pages for lane in self._lanes.values())

    @property
    def largest(self) -> Largest:
        """The device's function for the most likely tokens, with which greedy rows are sampled."""
        return self._registry.units.operations.largest

    def load(self, stage: Stage) -> ModelSpec:
        """Load a chain and return its spec; return at once if it is loaded already.

        Raises NotServable for a part of a chain, else as `ModelRegistry.load`.
        """
        model = self._registry.load(stage.model, self._sizes, stage)
        if not (model.has_embedding and model.has_head):
            self._registry.unload(stage.id)
            raise NotServable(f"{stage.id}: the dense executor runs whole chains only")
        if stage.id not in self._lanes:
            self._lanes[stage.id] = DenseBatch(model, self._registry.units.device, self._config.dense)
        return model.spec

    def unload(self, stage: Stage) -> None:
        """Drop a chain and free what no other one uses. Raises NotFound."""
        self._registry.unload(stage.id)
        del self._lanes[stage.id]

    def memory(self) -> EngineMemory:
        return EngineMemory(
            self._registry.units.nbytes, self._registry.bytes_alone(), self._sizes.count * self.page_bytes
        )

    @torch.inference_mode()
    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        begin = time.perf_counter_ns()
        self._release(plan)
        for opened in plan.opened:
            self._registry.models[opened.request.model].open(opened.request, opened.output)
        step = _DenseStep(self, self._lanes, rows_by_model(plan.rows))
        step.run()
        self.idle = self.idle.plus(step.idle)
        deferred = tuple(row.seq for row in plan.rows if row.seq not in step.ran)
        outcome = step.outcome
        busy = time.perf_counter_ns() - begin
        segments = tuple(step.segments)
        return StageResult(
            StepResult(plan.step, outcome.sampled, outcome.prompts, segments, busy, deferred, step.idle.wasted), {}
        )

    def second_lane(self) -> None:
        """Return None: a second lane runs stand-ins, which are parts of chains."""

    def read_pages(self, pages: Sequence[int]) -> Array:
        """Raise NotServable: there are no pages to read."""
        raise NotServable("the dense executor keeps K and V by sequence, not in pages")

    def return_pages(self, pages: Sequence[int]) -> None:
        """Do nothing: batches give memory back themselves."""

    def write_pages(self, pages: Sequence[int], data: Array) -> None:
        """Raise NotServable, as `read_pages`."""
        self.read_pages(pages)

    def alike(self, a: Array, b: Array) -> Likeness:
        return likeness(a, b)

    def decide(self, lane: DenseBatch, rows: Sequence[Row], others: int, must: bool) -> LaneDecision:
        """Return the policy's decision for a batch with these rows of the plan."""
        return decide_lane(lane.view(rows, others, self._sizes.count, must), self._config.dense)

    def spare(self, pages: int) -> int:
        """Return the pages that a batch may take for growth when `pages` are in use."""
        return max(0, int(self._config.dense.low * self._sizes.count) - pages)

    def step_run(self, batches: Mapping[str, PaddedBatch]) -> StepRun:
        """Return a run over batches with open windows."""
        units = self._registry.units
        rows = {name: batch.rows for name, batch in batches.items()}
        return StepRun(rows, DenseContexts(batches, units), units.device, self._config.trace_segments)

    def _release(self, plan: StepPlan) -> None:
        """Release the plan's sequences and make its copies, each release as soon as no later copy needs it.

        The order matters because a copy may need the memory of a sequence that the same plan releases.
        """
        left = [(one.source, one.opened.request.seq) for one in plan.copied]
        involved = {name for names in left for name in names}
        self._release_rows([seq for seq in plan.released if seq not in involved])
        for one in plan.copied:
            names = left.pop(0)
            over = [seq for seq in plan.released if seq in names and not any(seq in later for later in left)]
            self._copy(one, one.source in over)
            self._release_rows(over)

    def _copy(self, one: Copied, leaves: bool) -> None:
        """Open a sequence that begins as a copy of another one.

        `leaves`: the source is released in the same plan; its K and V are moved instead of copied if memory is too
        small for both.
        """
        lane, request = self._lanes[one.opened.request.model], one.opened.request
        lane.model.open(request, one.opened.output)
        if self.pages_used + lane.cost(one.tokens) > self.page_capacity:
            for each in self._lanes.values():
                each.park()
        lane.copy(
            request.seq,
            one.source,
            one.tokens,
            moves=leaves and self.pages_used + lane.cost(one.tokens) > self.page_capacity,
        )
        self.peak_pages = max(self.peak_pages, self.pages_used)

    def _release_rows(self, released: Sequence[str]) -> None:
        """Drop finished sequences; in modes that run batches to completion, their rows stay until the batch is done."""
        stays = self._config.dense.mode in ("run-to-completion", "pd")
        for seq in released:
            for lane in self._lanes.values():
                if seq in lane.model.sequences:
                    lane.model.close(seq)
                    lane.release(seq, stays=stays)


class _DenseStep:
    """One step over the dense batches of all models, while it runs."""

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
        """Run the separate batches of prompts, model by model, then the windows of all models together."""
        for name, rows in self._rows.items():
            self._turn(self._lanes[name], rows)
        if self._windows:
            self._execute(self._windows)
        for lane in self._lanes.values():
            if not lane.seats and lane.kv_store.stored_rows:
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
            lane.fit(len(lane.seats), lane.kv_store.columns.needed, spare)
        for batch in decision.apart:
            try:
                made = lane.apart([named[seq] for seq in batch])
                self._execute({lane.model.spec.name: made})
                lane.save_kv(made)
            finally:
                lane.close_prompts()
        if decision.window:
            self._windows[lane.model.spec.name] = lane.window([named[seq] for seq in decision.window], spare)
        self.ran |= decision.runs

    def _decision(self, lane: DenseBatch, rows: Sequence[Row]) -> LaneDecision:
        """Return the policy's decision for a batch.

        If even the minimum that must run exceeds the device's memory, park the other models' batches and decide again.
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
        run = self._engine.step_run(batches)
        self._outcomes.append(run.execute(self._engine.largest))
        self.segments.extend(run.segments)
        for name, batch in batches.items():
            self.idle = self.idle.plus(self._lanes[name].counts(batch))
