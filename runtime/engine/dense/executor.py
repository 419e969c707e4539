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
from runtime.engine.dense.kv_store import SavedKV
from runtime.engine.dense.padding_stats import IdleCounts
from runtime.engine.dense.prompt_thread import PromptThread
from runtime.engine.dense.saved_pages import as_pages, from_pages
from runtime.engine.models.registry import ModelRegistry
from runtime.engine.sampling.choice import TokenChoice
from runtime.engine.sampling.output import Outcome
from runtime.engine.step.runner import StepRun
from runtime.engine.tensors.convert import array_of, joined, likeness
from runtime.kv.pool import PageSizes
from runtime.policy.batching.dense import LaneDecision, decide_lane
from runtime.types import Copied, EngineMemory, ModelSpec, Opened, Row, SegmentRun, StepPlan, StepResult
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
        beside = config.dense.prompts == "beside"
        self.prompts = PromptThread(self._registry.units, config.trace_segments) if beside else None
        self.idle = IdleCounts()
        self.peak_pages = 0
        self._coming: list[tuple[Opened, SavedKV]] = []

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
    def choice(self) -> TokenChoice:
        """How the device chooses tokens."""
        return self._registry.units.operations

    def load(self, stage: Stage) -> ModelSpec:
        """Load a chain and return its spec; return at once if it is loaded already.

        Raises NotServable for a part of a chain, else as `ModelRegistry.load`.
        """
        self._finish_prompts()
        model = self._registry.load(stage.model, self._sizes, stage)
        if not (model.has_embedding and model.has_head):
            self._registry.unload(stage.id)
            raise NotServable(f"{stage.id}: the dense executor runs whole chains only")
        if stage.id not in self._lanes:
            self._lanes[stage.id] = DenseBatch(model, self._registry.units.device, self._config.dense)
        return model.spec

    def unload(self, stage: Stage) -> None:
        """Drop a chain and free what no other one uses. Raises NotFound."""
        self._finish_prompts()
        self._registry.unload(stage.id)
        del self._lanes[stage.id]

    def memory(self) -> EngineMemory:
        return EngineMemory(
            self._registry.units.nbytes, self._registry.bytes_alone(), self._sizes.count * self.page_bytes
        )

    @torch.inference_mode()
    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        begin = time.perf_counter_ns()
        if self.prompts is not None:
            self.prompts.finish(wait=self.prompts.runs((*plan.released, *(one.source for one in plan.copied))))
            self.prompts.remove_sequences(plan.released)
        self._release(plan)
        self._open_coming(plan.released)
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

    @property
    def host_weights(self) -> int:
        return self._registry.units.idle.held

    def share_host_memory(self, kv: int) -> None:
        self._registry.units.share_idle(kv)

    @torch.inference_mode()
    def copy_out(self, key: str, tokens: int, pages: Sequence[int]) -> Array:
        """Return a sequence's K and V as pages (BA-15). Raises ValueError if it has fewer tokens."""
        if self.prompts is not None:
            self.prompts.finish(wait=self.prompts.runs((key,)))
        lane = next((each for each in self._lanes.values() if key in each.model.sequences), None)
        if lane is None:
            raise ValueError(f"{key} is not here")
        return array_of(as_pages(lane.read(key, tokens), lane.model.spec.page_tokens, self._sizes.half_bytes))

    @torch.inference_mode()
    def copy_in(self, opened: Opened, tokens: int, pages: Sequence[int], data: Array) -> None:
        """Open a sequence with K and V that `copy_out` returned, with the next plan: after what that releases.

        Raises ValueError for data of another shape, and before the model has run any sequence since it was loaded.
        """
        lane = self._lanes[opened.request.model]
        given = joined([data], (len(pages), self.page_bytes), torch.uint8, torch.device("cpu"))
        saved = from_pages(given, tokens, lane.model.spec.page_tokens, lane.kv_store.layouts())
        self._coming.append((opened, saved))

    def _open_coming(self, released: Sequence[str]) -> None:
        """Open the sequences that came back since the last plan, but for those that left again."""
        coming, self._coming = self._coming, []
        for opened, saved in coming:
            if opened.request.seq in released:
                continue
            lane = self._lanes[opened.request.model]
            self._make_room(lane.cost(saved.tokens))
            lane.model.open(opened.request, opened.output)
            lane.write(opened.request.seq, saved)
            self.peak_pages = max(self.peak_pages, self.pages_used)

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

    def _finish_prompts(self) -> None:
        """Wait for prompts that run beside the windows: their components must not change meanwhile."""
        if self.prompts is not None:
            self.prompts.finish(wait=True)

    def _copy(self, one: Copied, leaves: bool) -> None:
        """Open a sequence that begins as a copy of another one.

        `leaves`: the source is released in the same plan; its K and V are moved instead of copied if memory is too
        small for both.
        """
        lane, request = self._lanes[one.opened.request.model], one.opened.request
        lane.model.open(request, one.opened.output)
        self._make_room(lane.cost(one.tokens))
        lane.copy(
            request.seq,
            one.source,
            one.tokens,
            moves=leaves and self.pages_used + lane.cost(one.tokens) > self.page_capacity,
        )
        self.peak_pages = max(self.peak_pages, self.pages_used)

    def _make_room(self, pages: int) -> None:
        """Park all batches if so many pages do not fit beside them."""
        if self.pages_used + pages > self.page_capacity:
            for each in self._lanes.values():
                each.park()

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
        #: Batches of prompts that are decided and have not started.
        self._apart: list[tuple[DenseBatch, list[Row]]] = []
        self.segments: list[SegmentRun] = []
        self.ran: set[str] = set()
        self.idle = IdleCounts()

    @property
    def outcome(self) -> Outcome:
        sampled = tuple(one for outcome in self._outcomes for one in outcome.sampled)
        return Outcome(sampled, tuple(one for outcome in self._outcomes for one in outcome.prompts))

    def run(self) -> None:
        """Run the separate batches of prompts, model by model, then the windows of all models together.

        With a thread for prompts: start one of these batches on it, run the windows beside it, and defer the rest. A
        step without windows waits for the prompts.
        """
        prompts = self._engine.prompts
        if prompts is not None:
            self._report(prompts)
        self._turns(prompts)
        if prompts is not None and not self._windows and prompts.busy:
            prompts.finish(wait=True)
            self._report(prompts)
        if prompts is not None and self._windows:
            self._start(prompts)
        else:
            self._run_apart()
        if prompts is not None and self._rows and not (self._windows or self.ran):
            self._turns(prompts)  # what ran beside the windows is not what the plan has now
            self._run_apart()
        if self._windows:
            self._execute(self._windows)
        for lane in self._lanes.values():
            if not lane.seats and lane.kv_store.stored_rows:
                lane.fit(0, 0, 0)

    def _turns(self, prompts: PromptThread | None) -> None:
        """Decide what runs, model by model; rows that have run, or run beside, are left out."""
        for name, rows in self._rows.items():
            rest = [row for row in rows if row.seq not in self.ran and not (prompts and prompts.runs((row.seq,)))]
            if rest:
                self._turn(self._lanes[name], rest)

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
        self._apart += [(lane, [named[seq] for seq in batch]) for batch in decision.apart]
        if self._engine.prompts is None:
            self._run_apart()
        if decision.window:
            self._windows[lane.model.spec.name] = lane.window([named[seq] for seq in decision.window], spare)
            self.ran |= set(decision.window)

    # -- prompts apart -------------------------------------------------------------------------------------------------

    def _run_apart(self) -> None:
        """Run the decided batches of prompts now."""
        apart, self._apart = self._apart, []
        for lane, rows in apart:
            try:
                made = lane.apart(rows)
                self._execute({lane.model.spec.name: made})
                lane.save_kv(made)
            finally:
                lane.close_prompts()
            self.ran |= {row.seq for row in rows}

    def _start(self, prompts: PromptThread) -> None:
        """Start the first decided batch of prompts on their thread if that is free and memory allows."""
        for lane, rows in self._apart[: 0 if prompts.busy else 1]:
            if self._engine.pages_used + lane.prompt_cost(rows) <= self._engine.page_capacity:
                prompts.start(lane, rows)

    def _report(self, prompts: PromptThread) -> None:
        """Report the plan's prompts that have run beside earlier windows."""
        for name, rows in self._rows.items():
            for row in rows:
                found = None if row.seq in self.ran else prompts.take_result(row.seq)
                if found is None:
                    continue
                if (found.row.start, found.row.tokens) == (row.start, row.tokens):
                    self._outcomes.append(Outcome(found.sampled, found.scores))
                    self.ran.add(row.seq)
                else:  # another chunk of the prompt is asked for
                    self._lanes[name].truncate(row.seq, row.start)
        idle, segments = prompts.take_counts()
        self.idle = self.idle.plus(idle)
        self.segments.extend(segments)

    def _decision(self, lane: DenseBatch, rows: Sequence[Row]) -> LaneDecision:
        """Return the policy's decision for a batch.

        If even the minimum that must run exceeds the device's memory, park the other models' batches and decide again.
        """
        others = [each for each in self._lanes.values() if each is not lane]
        must, prompts = not self.ran and not self._apart, self._engine.prompts
        decision = self._engine.decide(lane, rows, sum(each.pages for each in others), must)
        if must and decision.pages > self._engine.page_capacity and prompts is not None and prompts.busy:
            prompts.finish(wait=True)
            self._report(prompts)
            return self._decision(lane, rows)
        if must and decision.pages > self._engine.page_capacity:
            for each in others:
                each.park()
            decision = self._engine.decide(lane, rows, sum(each.pages for each in others), must)
        return decision

    def _execute(self, batches: Mapping[str, PaddedBatch]) -> None:
        self._engine.peak_pages = max(self._engine.peak_pages, self._engine.pages_used)
        run = self._engine.step_run(batches)
        self._outcomes.append(run.execute(self._engine.choice))
        self.segments.extend(run.segments)
        for name, batch in batches.items():
            self.idle = self.idle.plus(self._lanes[name].counts(batch))
