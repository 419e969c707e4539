"""One step of a staged executor over its stages: hidden states in, hidden states and tokens out.

`stepped` begins a step, `Begun.result` waits for it. Both lanes of an engine use this module; it holds no state of its
own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.chains import Array, LayerWatch, Stacked, StageResult, cut
from runtime.engine.executors.paged import eager, laid, learn, open_pages
from runtime.engine.models.components import ComponentPool
from runtime.engine.models.loaded import LoadedModel
from runtime.engine.recording.graphs import Graphs
from runtime.engine.sampling.output import Outcome, Sampling, late_constraint, sampling_of, wanted_of
from runtime.engine.step.batch import ModelBatch
from runtime.engine.step.decode_reuse import DecodeReuse, ReusedStep
from runtime.engine.step.probing import StepProbes
from runtime.engine.tensors.convert import gather, gathered, whole_of
from runtime.kv.pool import PagePool
from runtime.types import StepPlan, StepResult

_NOTHING = Outcome((), ())


@dataclass(frozen=True, slots=True)
class Begun:
    """A step that is under way on the device.

    Fields:
        step: The plan's step number.
        begin: When the step began, in ns (`time.perf_counter_ns`).
        sampling: The tokens to be read from the device; None if `made` has them already.
        made: Outputs and trace of the step; also its tokens if it reused a decode step.
        saved: By batch, its rows and the hidden states that they ask for (`StepRun.saved`).
        probes: Forecasts that rows ask for; None for none.
        late: Rows of the plan that did not run, since their grammars are not ready.
    """

    step: int
    begin: int
    sampling: Sampling | None
    made: ReusedStep
    saved: Sequence[tuple[ModelBatch, Mapping[int, Tensor]]] = ()
    probes: StepProbes | None = None
    late: Sequence[str] = ()

    def result(self) -> StageResult:
        """Wait for the sampled tokens and return the step's result."""
        outcome = self.made.outcome if self.sampling is None else self.sampling.read()
        busy = time.perf_counter_ns() - self.begin
        return StageResult(
            StepResult(self.step, outcome.sampled, outcome.prompts, self.made.segments, busy, self._deferred()),
            self.made.outputs,
            _saved(self.saved),
            {} if self.probes is None else self.probes.lengths(),
        )

    def _deferred(self) -> tuple[str, ...]:
        return (*self.late, *(() if self.sampling is None else self.sampling.deferred))


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
    watch: LayerWatch | None = None,
) -> Begun:
    """Begin one step: reuse the preceding decode step, replay a recorded graph, or run the modules one by one.

    Args:
        trace: record the segments that run.
        inputs: hidden states by row's sequence name, for stages without an embedding.
        graphs: recorded decode steps; None where nothing is recorded.
        decode_reuse: decode steps that a step over the same rows may continue; None where it is off.
        stays: keep outputs on this device, for a direct transfer to the next stage.
        before: the sampling of the preceding step, which rows may await tokens of.
        watch: called between the layers of a step with chunks.

    Raises ValueError for rows without input hidden states, or with inputs of the wrong size.
    """
    begin = time.perf_counter_ns()
    if plan.released or plan.opened or plan.place_changes:
        learn(models, plan)
        if plan.place_changes and decode_reuse is not None:
            decode_reuse.clear()
    if any([row.new_pages for row in plan.rows]):  # noqa: C419  # a list is faster, and this runs in every step
        open_pages(models, pool, plan)
    made = (
        None
        if decode_reuse is None
        else decode_reuse.follow(plan, lambda names, into: _start(models[plan.rows[0].model], inputs, names, into))
    )
    if made is not None:
        return Begun(plan.step, begin, None, made)
    plan, defers, late = _without_late(models, plan) if plan.defers else (plan, False, ())
    batches = {name: _begun(batch, inputs, units.device) for name, batch in laid(models, plan, before).items()}
    away = any(batch.away for batch in batches.values())
    logits = None if graphs is None or away else graphs.forward(batches)
    if logits is not None:
        return Begun(plan.step, begin, *_replayed(batches, units, logits, stays, before), late=late)
    run = eager(batches, units, pool, trace, watch)
    sampling = run.sample(units.operations, before, defers)
    if decode_reuse is not None and not away:
        sampling.read()
        if not sampling.deferred:
            decode_reuse.remember_step(plan, batches, run)
    told = ReusedStep(_NOTHING, _outputs(batches, run.behind, stays), tuple(run.segments))
    saved = [(batches[name], states) for name, states in run.saved.items()]
    return Begun(plan.step, begin, sampling, told, saved, run.probes if run.probes.cuts else None, late)


class _RestOfPlan(NamedTuple):
    """A plan without the rows `late`, and whether more of them may be deferred."""

    plan: StepPlan
    defers: bool
    late: Sequence[str]


def _without_late(models: Mapping[str, LoadedModel], plan: StepPlan) -> _RestOfPlan:
    """Leave the rows out that a step before went on without, and that still have no grammar that is ready.

    If no row would be left, the step waits for all of them.
    """
    closed = {row.seq: one for row in plan.rows if (one := late_constraint(models[row.model], row)) is not None}
    if not closed or len(closed) == len(plan.rows):
        return _RestOfPlan(plan, False, ())
    late = [seq for seq, one in closed.items() if one.late]
    if not late:
        return _RestOfPlan(plan, True, ())
    return _RestOfPlan(replace(plan, rows=tuple(row for row in plan.rows if row.seq not in late), batch=0), True, late)


def _outputs(batches: Mapping[str, ModelBatch], behind: Mapping[str, Tensor], stays: bool) -> Mapping[str, Array]:
    """Return the output hidden states by row's sequence name; a step of one stage returns them in one array."""
    parts = [(batches[name].rows, hidden.to(batches[name].model.dtype)) for name, hidden in behind.items()]
    arrays = [
        Stacked([row.seq for row in rows], whole_of(hidden, stays), [len(row.tokens) for row in rows])
        for rows, hidden in parts
    ]
    return arrays[0] if len(arrays) == 1 else {name: array for one in arrays for name, array in one.items()}


def _saved(batches: Sequence[tuple[ModelBatch, Mapping[int, Tensor]]]) -> Mapping[str, Mapping[int, Array]]:
    """Return the hidden states that rows asked for, by row's sequence name and component of the stage."""
    saved: dict[str, dict[int, Array]] = {}
    for batch, states in batches:
        for at, hidden in states.items():
            whole = whole_of(hidden[None])
            for row, span in zip(batch.rows, batch.spans, strict=True):
                if (place := at + row.enters) in row.saves:
                    saved.setdefault(row.seq, {})[place] = cut(whole, span.lo, span.hi)
    return saved


def _replayed(
    batches: Mapping[str, ModelBatch],
    units: ComponentPool,
    made: Mapping[str, Tensor],
    stays: bool,
    before: Sampling | None,
) -> tuple[Sampling, ReusedStep]:
    wanted = {name: wanted_of(batch) for name, batch in batches.items()}
    sampling = sampling_of(batches, wanted, made, units.operations, before)
    # Cloned: the next replay overwrites the buffers, possibly before the next stage has read them.
    behind = {name: made[name].clone() for name, batch in batches.items() if not batch.model.has_head}
    return sampling, ReusedStep(_NOTHING, _outputs(batches, behind, stays))


def _begun(batch: ModelBatch, inputs: Mapping[str, Array], device: torch.device) -> ModelBatch:
    """Return a stage's batch with its input hidden states.

    Raises ValueError where they are missing or have another size.
    """
    if batch.model.has_embedding:
        return batch
    model, names, counts = batch.model, [row.seq for row in batch.rows], [len(row.tokens) for row in batch.rows]
    _require(inputs, names, counts)
    hidden = gathered(inputs, names, (batch.tokens, model.width), model.dtype, device)
    return replace(batch, hidden=hidden.to(model.inside)[None])


def _start(model: LoadedModel, inputs: Mapping[str, Array], names: Sequence[str], into: memoryview) -> None:
    """Copy the input hidden states of rows of one token into `into`. Raises ValueError as `_begun`."""
    _require(inputs, names, None)
    gather(inputs, names, into, model.width, model.dtype)


def _require(inputs: Mapping[str, Array], names: Sequence[str], counts: Sequence[int] | None) -> None:
    """Raise ValueError unless each row has input hidden states for its number of tokens (`counts` None: one each)."""
    if isinstance(inputs, Stacked) and inputs.matches_rows(names, counts):
        return
    for name, count in zip(names, counts or (1,) * len(names), strict=True):
        if name not in inputs or inputs[name].shape[:1] != (count,):
            raise ValueError(f"{name} has {count} tokens, and no hidden states for as many")
