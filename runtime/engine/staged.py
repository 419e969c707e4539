"""The paged executor for parts of chains: one device, one page pool, any number of stages; a step runs all their rows together.

    inputs --joined by stage--> hidden states --segments, as for whole models--> tokens (with a head) | hidden states --> outputs

Implements `runtime.stages.StageEngine`. A stage is a model whose chain is a part (`engine.loading`): two that have a unit in common, of
whichever models, hold it once and run it once. Decides nothing: which rows run, and on which pages, is in the plan.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from runtime.config import EngineConfig
from runtime.engine.arrays import array_of, arrays_of, joined, likeness
from runtime.engine.graphs import graphs_for
from runtime.engine.outcome import Outcome, sampling_of, wanted_of
from runtime.engine.paged import eager, learn, rows_of
from runtime.engine.residents import Residents
from runtime.engine.rows import Rows
from runtime.kv.pool import PagePool
from runtime.stages import Array, Likeness, Stage, StageResult
from runtime.types import EngineMemory, ModelSpec, SegmentRun, StepPlan, StepResult
from zoo.store import Store


class StagedEngine:
    """See the top of the file.

    Args:
        store: where the weights are.
        config: device, pool size, dtype, and whether decodes are recorded. `page_tokens` and `async_scheduling` are not read: whoever
            hands hidden states on must have them, and what is sampled goes to a scheduler first.
        half_page: bytes of K (and of V) in a page, the same on all devices (`engine.residents.half_page`).
        device: its name in paths; that of the hardware if there is none.
    """

    def __init__(self, store: Store, config: EngineConfig, half_page: int, device: str = "") -> None:
        self._trace = config.trace_segments
        self._device = device or config.device
        self._residents = Residents(store, config, "paged")
        self._pool = PagePool(config.kv_bytes, half_page, config.device)
        self._graphs = None if self._trace else graphs_for(config.graphs, self._residents.units, self._pool)

    @property
    def device(self) -> str:
        return self._device

    @property
    def page_capacity(self) -> int:
        return self._pool.pages

    @property
    def page_bytes(self) -> int:
        return 2 * self._pool.half_bytes

    def load(self, stage: Stage) -> ModelSpec:
        """Make a stage ready; one that is loaded already costs nothing. Raises NotServable, NotFound, AmbiguousName, DamagedObject."""
        before = len(self._residents.models)
        spec = self._residents.load(stage.model, self._pool, stage).spec
        if len(self._residents.models) > before:
            self._forget()  # adapters came to units that recordings have in them
        return spec

    def unload(self, stage: Stage) -> None:
        """Drop a stage; what no other one uses is freed. Raises NotFound."""
        self._forget()
        self._residents.unload(stage.id)

    @torch.inference_mode()
    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        """Run one step. Raises ValueError for rows without what they start from, or with what does not fit them."""
        begin = time.perf_counter_ns()
        models, units = self._residents.models, self._residents.units
        learn(models, plan)
        batches = {name: _begun(batch, inputs, units.device) for name, batch in rows_of(models, self._pool, plan).items()}
        outcome, behind, segments = self._ran(batches)
        outputs: dict[str, Array] = {}
        for name, hidden in behind.items():
            arrays = arrays_of(hidden, [(span.lo, span.hi) for span in batches[name].spans])
            outputs.update(zip((row.seq for row in batches[name].rows), arrays, strict=True))
        busy = time.perf_counter_ns() - begin
        return StageResult(StepResult(plan.step, outcome.sampled, outcome.prompts, segments, busy), outputs)

    def _ran(self, batches: Mapping[str, Rows]) -> tuple[Outcome, Mapping[str, Tensor], tuple[SegmentRun, ...]]:
        """Tokens, hidden states behind stages without a head, and what ran; a recording tells nothing of that."""
        units = self._residents.units
        made = None if self._graphs is None else self._graphs.forward(batches)
        if made is None:
            run = eager(batches, units, self._pool, self._trace)
            return run.execute(units.operations.largest), run.behind, tuple(run.segments)
        wanted = {name: wanted_of(batch) for name, batch in batches.items()}
        outcome = sampling_of(batches, wanted, made, units.operations.largest).read()
        # The next replay writes over them, and whoever they go to may read them later.
        return outcome, {name: made[name].clone() for name, batch in batches.items() if not batch.model.has_head}, ()

    def _forget(self) -> None:
        if self._graphs is not None:
            self._graphs.forget()

    def read_pages(self, pages: Sequence[int]) -> Array:
        """Raises ValueError for pages that are not there."""
        return array_of(self._pool.read(pages))

    def write_pages(self, pages: Sequence[int], data: Array) -> None:
        self._pool.write(pages, joined([data], (len(pages), self.page_bytes), torch.uint8))

    def alike(self, a: Array, b: Array) -> Likeness:
        return likeness(a, b)

    def memory(self) -> EngineMemory:
        return EngineMemory(self._residents.units.nbytes, self._residents.bytes_alone(), self._pool.nbytes)


def _begun(batch: Rows, inputs: Mapping[str, Array], device: torch.device) -> Rows:
    """A stage's rows with the hidden states that they start from. Raises ValueError where they are missing or do not fit."""
    model = batch.model
    if model.has_embedding:
        return batch
    for row in batch.rows:
        if row.seq not in inputs or inputs[row.seq].shape[:1] != (len(row.tokens),):
            raise ValueError(f"{row.seq} has {len(row.tokens)} tokens, and no hidden states for as many")
    hidden = joined([inputs[row.seq] for row in batch.rows], (batch.tokens, model.width), model.dtype)
    return replace(batch, hidden=hidden.to(device)[None])
