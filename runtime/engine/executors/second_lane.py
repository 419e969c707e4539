"""A staged engine's second lane: steps of stand-ins, while its own run (BL-25). The same weights and pages;
whatever a step changes twice.

    shared         units, their adapters, pages
    of each lane   sequences and their page tables, scratch, programs, rotary modules, joined adapters
                   (`engine.adapters.stack_cache`), a CUDA stream

Contract: `runtime.chains.StepRunner`, on a thread of its own. A sequence is known to the lane that opened it; what
is released may be told to either. Whoever loads or unloads holds `turn`, as every step here does, and says so
(`follow`).
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch

from runtime.chains import Array, StageResult
from runtime.engine.executors.stage_step import stepped
from runtime.engine.kernels.program_cache import Programs
from runtime.engine.models.components import ComponentPool
from runtime.engine.models.loaded import LoadedModel, PageTables
from runtime.kv.pool import PagePool
from runtime.types import StepPlan


class ReleasedTables:
    """Sequences that a lane is to forget in its next step, as far as it knows them. Told from any thread."""

    def __init__(self, models: Mapping[str, LoadedModel]) -> None:
        self._models = models
        self._gone: deque[str] = deque()

    def add_released(self, seqs: Iterable[str]) -> None:
        """What it does not know is the other lane's: none that is released is just being opened."""
        self._gone.extend(seq for seq in seqs if any(seq in model.sequences for model in tuple(self._models.values())))

    def drain_released(self) -> tuple[str, ...]:
        return tuple(self._gone.popleft() for _ in range(len(self._gone)))


class SecondLane:
    """See the top of the file.

    Args:
        units, models: the engine's.
        released: what the engine's own lane is to forget.
    """

    def __init__(
        self,
        units: ComponentPool,
        models: Mapping[str, LoadedModel],
        pool: PagePool,
        released: ReleasedTables,
        trace: bool,
        stays: bool = False,
    ) -> None:
        self.turn = threading.Lock()
        self._shared, self._theirs, self._trace, self._stays = models, released, trace, stays
        self._units = copy.copy(units)
        self._units.rotaries = {}
        self._pool = pool.second_lane()
        self._models: dict[str, LoadedModel] = {}
        self.released = ReleasedTables(self._models)
        self._stream = torch.cuda.Stream(units.device) if units.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.follow(units)

    def follow(self, units: ComponentPool) -> None:
        """Stages have come or gone. While `turn` is held."""
        self._units.programs = Programs(units.kernels is not None)
        # Some kinds of scaling change their module with the length of what is run.
        self._units.rotaries |= {
            key: copy.deepcopy(made) for key, made in units.rotaries.items() if key not in self._units.rotaries
        }
        for name in self._models.keys() - self._shared.keys():
            del self._models[name]
        for name, model in self._shared.items():
            if name not in self._models:
                tables = PageTables(model.tables.data.shape[1], model.tables.padding, model.tables.data.device)
                self._models[name] = replace(model, tables=tables, sequences={})

    @torch.inference_mode()
    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        """As the engine's."""
        with self.turn, nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._theirs.add_released(plan.released)
            self.released.add_released(plan.released)
            mine = replace(plan, released=self.released.drain_released())
            result = stepped(
                self._models, self._units, self._pool, self._trace, mine, inputs, stays=self._stays
            ).result()
            if self._stream is not None:
                self._stream.synchronize()  # pages that go from one lane to the other are written by then
        return result
