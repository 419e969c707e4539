"""Integer engines for tests of one agent: they launch steps as a GPU does, or defer rows as the dense executor does."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from runtime.chains import Array, LaunchedStep, StageResult
from runtime.engine.catalog.describe import DescribedChain
from runtime.engine.fakes.faults import FakeFault, require
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.engine.fakes.integer_model import IntegerModel
from runtime.kv.pages import Group
from runtime.types import Row, StepPlan


class CountedDevice(IntegerEngine):
    """An integer engine that can launch steps or defer rows.

    Fields:
        ahead: Steps are launched: a row that awaits a token gets the one that the step launched before it has
            sampled. A step launched after one that failed does not run.
        puts_off: Draws the rows of a step that are deferred; None for no deferral.
    """

    def __init__(
        self,
        models: Sequence[IntegerModel],
        pages: int,
        *,
        ahead: bool = False,
        puts_off: random.Random | None = None,
        **options: object,
    ) -> None:
        super().__init__(models, pages, **options)  # type: ignore[arg-type]
        self.described = [DescribedChain(model.chain(), model.blocks()) for model in models]
        self.ahead, self._puts_off = ahead, puts_off
        self._last: dict[str, int] = {}
        self._broken = 0
        self._kept_back: dict[str, tuple[Group, ...]] = {}

    def launch(self, plan: StepPlan, inputs: Mapping[str, Array]) -> LaunchedStep:
        if self._broken:
            self._failed.update([row.seq for row in plan.rows], [one.request.seq for one in plan.opened], plan.released)
            return _Over(self, FakeFault("a step before it failed"))
        for row in plan.rows:
            require(not row.awaits or row.seq in self._last, f"{row.seq} awaits what the step before does not sample")
        rows = tuple(structs.replace(row, tokens=(self._last[row.seq],)) if row.awaits else row for row in plan.rows)
        try:
            told = super().run(replace(plan, rows=rows), inputs)
        except FakeFault as error:
            self._broken += 1
            return _Over(self, error)
        self._last = {one.seq: one.token for one in told.result.sampled}
        return _Over(self, told)

    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        require(not any(row.awaits for row in plan.rows), "nothing is awaited of a step that is over")
        if self._puts_off is None:
            return super().run(plan, inputs)
        off = {row.seq for row in self._puts_off.sample(plan.rows, self._puts_off.randrange(max(1, len(plan.rows))))}
        rows = tuple(self._with_pages(row) for row in plan.rows if row.seq not in off)
        for row in plan.rows:
            if row.seq in off:
                self._kept_back[row.seq] = (*self._kept_back.get(row.seq, ()), *row.new_pages)
        told = super().run(replace(plan, rows=rows), {name: inputs[name] for name in inputs if name not in off})
        return replace(
            told, result=replace(told.result, deferred=tuple(row.seq for row in plan.rows if row.seq in off), idle=3)
        )

    def _with_pages(self, row: Row) -> Row:
        """Add to a row the pages that it was sent while it was deferred."""
        return structs.replace(row, new_pages=(*self._kept_back.pop(row.seq, ()), *row.new_pages))


@dataclass
class _Over:
    """A launched step that is already over: its result, or the fault that it raises."""

    device: CountedDevice
    told: StageResult | FakeFault

    def result(self) -> StageResult:
        if isinstance(self.told, FakeFault):
            self.device._broken = 0
            raise self.told
        return self.told
