"""Turn a step plan into a step over KV pages.

The functions here open and release sequences, append new pages to the page tables, group the plan's rows by model, and
build the `StepRun` that executes them. `executors.stage_step` uses them for stages; `engine.step` has the mechanics of
a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runtime.chains import LayerWatch
from runtime.engine.models.components import ComponentPool
from runtime.engine.models.loaded import LoadedModel
from runtime.engine.sampling.output import Sampling
from runtime.engine.step.batch import Awaited, ModelBatch
from runtime.engine.step.context import RowSpan
from runtime.engine.step.layout import ContextBuilder, lay_out
from runtime.engine.step.runner import StepRun
from runtime.kv.pool import PagePool
from runtime.types import Row, StepPlan


def paged_run(
    models: Mapping[str, LoadedModel], units: ComponentPool, pool: PagePool, plan: StepPlan, trace: bool
) -> StepRun:
    """Return a step over pages that is ready to run. `trace`: record the segments that run."""
    return eager(rows_of(models, pool, plan), units, pool, trace)


def eager(
    batches: Mapping[str, ModelBatch],
    units: ComponentPool,
    pool: PagePool,
    trace: bool,
    watch: LayerWatch | None = None,
) -> StepRun:
    """Return a step that runs its modules one by one, without recorded graphs. `watch`: called between layers."""
    frames = ContextBuilder(batches, lay_out(batches, units.device), units, pool)
    return StepRun(batches, frames, units.device, trace, watch=watch)


def learn(models: Mapping[str, LoadedModel], plan: StepPlan) -> None:
    """Close the sequences that the plan releases, open those that it opens, and record what other devices hold."""
    for seq in plan.released:
        for model in models.values():
            if seq in model.sequences:
                model.close(seq)
    for opened in plan.opened:
        models[opened.request.model].open(opened.request, opened.output)
    for one in plan.place_changes:
        for model in models.values():
            model.change_place(one)


def rows_of(
    models: Mapping[str, LoadedModel], pool: PagePool, plan: StepPlan, before: Sampling | None = None
) -> dict[str, ModelBatch]:
    """Return the plan's rows grouped by model, after appending their new pages to the page tables.

    `before`: the sampling of the preceding step, which awaiting rows read their tokens from.

    Raises ValueError for a row that awaits a token when there is no preceding step.
    """
    open_pages(models, pool, plan)
    return laid(models, plan, before)


def laid(models: Mapping[str, LoadedModel], plan: StepPlan, before: Sampling | None = None) -> dict[str, ModelBatch]:
    """Do the same as `rows_of` for a plan with its new pages in the page tables already.

    Rows that pass a part of a model are a batch beside those of the whole model. No name of a model has the separator.
    """
    by_model: dict[str, dict[tuple[int, int], list[Row]]] = {}
    for row in plan.rows:
        by_model.setdefault(row.model, {}).setdefault((row.enters, row.layers), []).append(row)
    return {
        f"{name}\x1f{enters}\x1f{layers}" if enters or layers else name:
            _rows(models[name].part(enters, layers), rows, before)
        for name in models if name in by_model
        for (enters, layers), rows in sorted(by_model[name].items())
    }  # fmt: skip


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
    """Append each row's new pages to its page table, and zero the empty ones that this step does not fill.

    Pages with tokens before a row's start have been written already (a shared prefix, or pages written by a migration),
    and so have those of the layers before the one that it enters at.
    `kv.pool` explains why pages are zeroed.
    """
    new: list[int] = []
    for row in plan.rows:
        if row.new_pages:
            model = models[row.model]
            held = model.sequences[row.seq]
            width = model.spec.page_tokens
            filled = max((row.start + len(row.tokens)) // width, -(-row.start // width)) - held.groups
            model.tables.append(held, row.new_pages)
            first = sum(unit.attends for unit in model.units[: row.enters])
            new.extend(page for group in row.new_pages[max(filled, 0) :] for page in group[first:])
    if new:
        pool.clear(new)
