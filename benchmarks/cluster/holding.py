"""The agent program of `benchmarks.cluster.phases`: an agent that can be stopped at a chosen moment of its work.

    python -m benchmarks.cluster.holding

It replaces `cli.serving.agent_engines`; its engine uses integers (`runtime.engine.fakes.integer_engine`).

To stop an agent at a moment, the benchmark makes a named pipe of that name in the agent's folder and reads it. The
first agent at that moment renames the pipe, so that no second one stops, writes its process id into it, and continues
when `<moment>.go` is opened. There are no timeouts here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from runtime.chains import Array, Stage, StageResult
from runtime.cluster.agent_process.main import MakeEngine, main
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.engine.fakes.integer_model import IntegerModel
from runtime.types import ModelSpec, StepPlan


class HoldingEngine(IntegerEngine):
    """An integer engine that can be stopped at these moments:

    - `load`: a stage is loaded.
    - `prefill`, `decode`, `predict`: a step with such rows (`predict`: of a stand-in).
    - `give`, `take`: pages are read or written for a migration.
    """

    folder = Path()

    def load(self, stage: Stage) -> ModelSpec:
        self._hold("load")
        return super().load(stage)

    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        if any("~[" in row.model for row in plan.rows):
            self._hold("predict")
        elif any(len(row.tokens) > 1 for row in plan.rows):
            self._hold("prefill")
        elif plan.rows:
            self._hold("decode")
        return super().run(plan, inputs)

    def read_pages(self, pages: Sequence[int]) -> Array:
        self._hold("give")
        return super().read_pages(pages)

    def write_pages(self, pages: Sequence[int], data: Array) -> None:
        self._hold("take")
        super().write_pages(pages, data)

    def _hold(self, moment: str) -> None:
        taken = self.folder / f"{moment}.{os.getpid()}"
        try:
            (self.folder / moment).rename(taken)
        except FileNotFoundError:
            return
        taken.write_text(f"{os.getpid()}\n")
        (self.folder / f"{moment}.go").read_text()


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: tuple[IntegerModel, ...]
    pages: int
    folder: str


def _holding(settings: Mapping[str, Any]) -> MakeEngine:
    chosen = msgspec.convert(dict(settings), Settings)

    def make(device: str) -> HoldingEngine:
        engine = HoldingEngine(chosen.models, chosen.pages, rewrites=True)
        engine.folder = Path(chosen.folder)
        return engine

    return make


if __name__ == "__main__":
    sys.exit(main({"holding": _holding}))
