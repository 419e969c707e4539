"""One step of a staged executor over some stages: hidden states in, hidden states and tokens out. Knows no lanes and no
devices' states.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from runtime.chains import Array, Stacked, StageResult
from runtime.engine.executors.paged import eager, laid, learn, open_pages
from runtime.engine.models.components import ComponentPool
from runtime.engine.models.loaded import LoadedModel
from runtime.engine.recording.graphs import Graphs
from runtime.engine.sampling.output import sampling_of, wanted_of
from runtime.engine.step.batch import ModelBatch
from runtime.engine.step.decode_reuse import DecodeReuse, ReusedStep
from runtime.engine.tensors.convert import gather, gathered, whole_of
from runtime.kv.pool import PagePool
from runtime.types import StepPlan, StepResult


def stepped(
    models: Mapping[str, LoadedModel],
    units: ComponentPool,
    pool: PagePool,
    trace: bool,
    plan: StepPlan,
    inputs: Mapping[str, Array],
    graphs: Graphs | None = None,
    again: DecodeReuse | None = None,
    stays: bool = False,
) -> StageResult:
    """Run one step; `graphs`: what decodes are recorded with; `again`: what goes on from the step before. `stays`: what
    goes on to other stages stays on this device, for whoever takes it on.

    Raises ValueError for rows without what they start from, or with what does not fit them.
    """
    begin = time.perf_counter_ns()
    learn(models, plan)
    open_pages(models, pool, plan)
    made = (
        None
        if again is None
        else again.follow(plan, lambda names, into: _start(models[plan.rows[0].model], inputs, names, into))
    )
    if made is None:
        made = _ran(models, units, pool, trace, plan, inputs, graphs, again, stays)
    busy = time.perf_counter_ns() - begin
    return StageResult(
        StepResult(plan.step, made.outcome.sampled, made.outcome.prompts, made.segments, busy), made.outputs
    )


def _outputs(batches: Mapping[str, ModelBatch], behind: Mapping[str, Tensor], stays: bool) -> Mapping[str, Array]:
    """By row's name: of one stage, mostly, and then all in one."""
    parts = [(batches[name].rows, hidden) for name, hidden in behind.items()]
    arrays = [
        Stacked([row.seq for row in rows], whole_of(hidden, stays), [len(row.tokens) for row in rows])
        for rows, hidden in parts
    ]
    return arrays[0] if len(arrays) == 1 else {name: array for one in arrays for name, array in one.items()}


def _ran(
    models: Mapping[str, LoadedModel],
    units: ComponentPool,
    pool: PagePool,
    trace: bool,
    plan: StepPlan,
    inputs: Mapping[str, Array],
    graphs: Graphs | None,
    again: DecodeReuse | None,
    stays: bool,
) -> ReusedStep:
    batches = {name: _begun(batch, inputs, units.device) for name, batch in laid(models, plan).items()}
    logits = None if graphs is None else graphs.forward(batches)
    if logits is not None:
        return _replayed(batches, units, logits, stays)
    run = eager(batches, units, pool, trace)
    outcome = run.execute(units.operations.largest)
    if again is not None:
        again.ran(plan, batches, run)
    return ReusedStep(outcome, _outputs(batches, run.behind, stays), tuple(run.segments))


def _replayed(
    batches: Mapping[str, ModelBatch], units: ComponentPool, made: Mapping[str, Tensor], stays: bool
) -> ReusedStep:
    wanted = {name: wanted_of(batch) for name, batch in batches.items()}
    outcome = sampling_of(batches, wanted, made, units.operations.largest).read()
    # The next replay writes over them, and whoever they go to may read them later.
    behind = {name: made[name].clone() for name, batch in batches.items() if not batch.model.has_head}
    return ReusedStep(outcome, _outputs(batches, behind, stays))


def _begun(batch: ModelBatch, inputs: Mapping[str, Array], device: torch.device) -> ModelBatch:
    """A stage's rows with the hidden states that they start from. Raises ValueError where they are missing or do not
    fit.
    """
    if batch.model.has_embedding:
        return batch
    model, names, counts = batch.model, [row.seq for row in batch.rows], [len(row.tokens) for row in batch.rows]
    _require(inputs, names, counts)
    return replace(batch, hidden=gathered(inputs, names, (batch.tokens, model.width), model.dtype, device)[None])


def _start(model: LoadedModel, inputs: Mapping[str, Array], names: Sequence[str], into: memoryview) -> None:
    """Put what rows of one token start from into bytes. Raises ValueError as `_begun`."""
    _require(inputs, names, None)
    gather(inputs, names, into, model.width, model.dtype)


def _require(inputs: Mapping[str, Array], names: Sequence[str], counts: Sequence[int] | None) -> None:
    """Raises ValueError unless rows have hidden states for so many tokens each (None: one)."""
    if isinstance(inputs, Stacked) and inputs.of(names, counts):
        return
    for name, count in zip(names, counts or (1,) * len(names), strict=True):
        if name not in inputs or inputs[name].shape[:1] != (count,):
            raise ValueError(f"{name} has {count} tokens, and no hidden states for as many")
