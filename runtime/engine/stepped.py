"""One step of a staged executor over some stages: hidden states in, hidden states and tokens out. Knows no lanes and no devices' states."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from runtime.engine.arrays import arrays_of, joined
from runtime.engine.graphs import Graphs
from runtime.engine.loaded import LoadedModel
from runtime.engine.outcome import Outcome, sampling_of, wanted_of
from runtime.engine.paged import eager, learn, rows_of
from runtime.engine.rows import Rows
from runtime.engine.units import UnitStore
from runtime.kv.pool import PagePool
from runtime.stages import Array, StageResult
from runtime.types import SegmentRun, StepPlan, StepResult


def stepped(
    models: Mapping[str, LoadedModel],
    units: UnitStore,
    pool: PagePool,
    trace: bool,
    plan: StepPlan,
    inputs: Mapping[str, Array],
    graphs: Graphs | None = None,
) -> StageResult:
    """Run one step; `graphs`: what decodes are recorded with.

    Raises ValueError for rows without what they start from, or with what does not fit them.
    """
    begin = time.perf_counter_ns()
    learn(models, plan)
    batches = {name: _begun(batch, inputs, units.device) for name, batch in rows_of(models, pool, plan).items()}
    made = None if graphs is None else graphs.forward(batches)
    outcome, behind, segments = _ran(batches, units, pool, trace) if made is None else _replayed(batches, units, made)
    outputs: dict[str, Array] = {}
    for name, hidden in behind.items():
        arrays = arrays_of(hidden, [(span.lo, span.hi) for span in batches[name].spans])
        outputs.update(zip((row.seq for row in batches[name].rows), arrays, strict=True))
    busy = time.perf_counter_ns() - begin
    return StageResult(StepResult(plan.step, outcome.sampled, outcome.prompts, segments, busy), outputs)


#: Tokens, hidden states behind stages without a head, and what ran; a recording tells nothing of that.
_Made = tuple[Outcome, Mapping[str, Tensor], tuple[SegmentRun, ...]]


def _ran(batches: Mapping[str, Rows], units: UnitStore, pool: PagePool, trace: bool) -> _Made:
    run = eager(batches, units, pool, trace)
    return run.execute(units.operations.largest), run.behind, tuple(run.segments)


def _replayed(batches: Mapping[str, Rows], units: UnitStore, made: Mapping[str, Tensor]) -> _Made:
    wanted = {name: wanted_of(batch) for name, batch in batches.items()}
    outcome = sampling_of(batches, wanted, made, units.operations.largest).read()
    # The next replay writes over them, and whoever they go to may read them later.
    return outcome, {name: made[name].clone() for name, batch in batches.items() if not batch.model.has_head}, ()


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
