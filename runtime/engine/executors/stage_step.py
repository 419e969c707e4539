"""One step of a staged executor over some stages: hidden states in, hidden states and tokens out. Knows no lanes and no
devices' states.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runtime.chains import Array, Stacked, StageResult
from runtime.engine.executors.paged import eager, laid, learn, open_pages
from runtime.engine.models.components import ComponentPool
from runtime.engine.models.loaded import LoadedModel
from runtime.engine.recording.graphs import Graphs
from runtime.engine.sampling.output import Outcome, Sampling, sampling_of, wanted_of
from runtime.engine.step.batch import ModelBatch
from runtime.engine.step.decode_reuse import DecodeReuse, ReusedStep
from runtime.engine.tensors.convert import gather, gathered, whole_of
from runtime.kv.pool import PagePool
from runtime.types import StepPlan, StepResult

_NOTHING = Outcome((), ())


@dataclass(frozen=True, slots=True)
class Begun:
    """A step that is under way: what it computes is on the device until it is read. `begin`: when it began, in ns."""

    step: int
    begin: int
    sampling: Sampling | None
    made: ReusedStep

    def result(self) -> StageResult:
        outcome = self.made.outcome if self.sampling is None else self.sampling.read()
        busy = time.perf_counter_ns() - self.begin
        return StageResult(
            StepResult(self.step, outcome.sampled, outcome.prompts, self.made.segments, busy), self.made.outputs
        )


def stepped(
    models: Mapping[str, LoadedModel],
    units: ComponentPool,
    pool: PagePool,
    trace: bool,
    plan: StepPlan,
    inputs: Mapping[str, Array],
    graphs: Graphs | None = None,
    decode_reuse: DecodeReuse | None = None,
    stays: bool = False,
    before: Sampling | None = None,
) -> Begun:
    """Begin one step; `graphs`: what decodes are recorded with; `decode_reuse`: what goes on from the step before.
    `stays`: what goes on to other stages stays on this device, for whoever takes it on. `before`: what the step
    before has sampled, which rows may await.

    Raises ValueError for rows without what they start from, or with what does not fit them.
    """
    begin = time.perf_counter_ns()
    learn(models, plan)
    open_pages(models, pool, plan)
    made = (
        None
        if decode_reuse is None
        else decode_reuse.follow(plan, lambda names, into: _start(models[plan.rows[0].model], inputs, names, into))
    )
    if made is not None:
        return Begun(plan.step, begin, None, made)
    batches = {name: _begun(batch, inputs, units.device) for name, batch in laid(models, plan, before).items()}
    logits = None if graphs is None else graphs.forward(batches)
    if logits is not None:
        return Begun(plan.step, begin, *_replayed(batches, units, logits, stays, before))
    run = eager(batches, units, pool, trace)
    sampling = run.sample(units.operations.largest, before)
    if decode_reuse is not None:
        sampling.read()
        decode_reuse.remember_step(plan, batches, run)
    return Begun(
        plan.step, begin, sampling, ReusedStep(_NOTHING, _outputs(batches, run.behind, stays), tuple(run.segments))
    )


def _outputs(batches: Mapping[str, ModelBatch], behind: Mapping[str, Tensor], stays: bool) -> Mapping[str, Array]:
    """By row's name: of one stage, mostly, and then all in one."""
    parts = [(batches[name].rows, hidden) for name, hidden in behind.items()]
    arrays = [
        Stacked([row.seq for row in rows], whole_of(hidden, stays), [len(row.tokens) for row in rows])
        for rows, hidden in parts
    ]
    return arrays[0] if len(arrays) == 1 else {name: array for one in arrays for name, array in one.items()}


def _replayed(
    batches: Mapping[str, ModelBatch],
    units: ComponentPool,
    made: Mapping[str, Tensor],
    stays: bool,
    before: Sampling | None,
) -> tuple[Sampling, ReusedStep]:
    wanted = {name: wanted_of(batch) for name, batch in batches.items()}
    sampling = sampling_of(batches, wanted, made, units.operations.largest, before)
    # The next replay writes over them, and whoever they go to may read them later.
    behind = {name: made[name].clone() for name, batch in batches.items() if not batch.model.has_head}
    return sampling, ReusedStep(_NOTHING, _outputs(batches, behind, stays))


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
    if isinstance(inputs, Stacked) and inputs.matches_rows(names, counts):
        return
    for name, count in zip(names, counts or (1,) * len(names), strict=True):
        if name not in inputs or inputs[name].shape[:1] != (count,):
            raise ValueError(f"{name} has {count} tokens, and no hidden states for as many")
