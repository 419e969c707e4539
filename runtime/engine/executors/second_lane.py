"""A second lane of a staged engine: it runs steps of stand-ins while the engine runs its own steps (BL-25).

Both lanes use the same weights and pages. All that a step modifies exists once per lane:

    shared         units, their adapters, pages
    of each lane   sequences and their page tables, scratch, programs, rotary modules, joined adapters
                   (`engine.adapters.stack_cache`), a CUDA stream

Contract: the lane is a `runtime.chains.StepRunner` that runs on a thread of its own. Only the lane that opened a
sequence has it; a release may be sent to either lane. Every step here holds `turn`. Code that loads or unloads stages
must hold `turn` as well and call `follow` afterwards.
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
from runtime.engine.executors.device import enter_device
from runtime.engine.executors.stage_step import stepped
from runtime.engine.kernels.program_cache import Programs
from runtime.engine.models.components import ComponentPool
from runtime.engine.models.loaded import LoadedModel, PageTables
from runtime.kv.pool import PagePool
from runtime.types import StepPlan


class ReleasedTables:
    """Released sequences that a lane drops in its next step. Any thread may add to it."""

    def __init__(self, models: Mapping[str, LoadedModel]) -> None:
        self._models = models
        self._gone: deque[str] = deque()

    def add_released(self, seqs: Iterable[str]) -> None:
        """Queue those of the sequences that this lane has open; the rest belong to the other lane.

        A sequence is never released while it is being opened, so this cannot miss one.
        """
        self._gone.extend(seq for seq in seqs if any(seq in model.sequences for model in tuple(self._models.values())))

    def drain_released(self) -> tuple[str, ...]:
        """Return and remove the queued sequences."""
        return tuple(self._gone.popleft() for _ in range(len(self._gone)))


class SecondLane:
    """The second lane of a staged engine; the module docstring describes what it shares with the first.

    Args:
        units, models: those of the engine.
        pool: the engine's pages; the lane uses them with scratch of its own.
        released: the queue of released sequences of the engine's own lane.
        trace: record the segments that run.
        stays: keep outputs on the device, for direct transfers.
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
        """Take over stages that the engine has loaded or unloaded. The caller holds `turn`."""
        self._units.programs = Programs(units.kernels is not None)
        # Some kinds of rotary scaling modify their module with the sequence length, so each lane has copies.
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
        """Run one step on this lane, as `StagedEngine.run` does on the engine's.

        Releases go to both lanes. On CUDA the call ends with a synchronization of the lane's stream.
        """
        with self.turn, nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            enter_device(self._units.device)
            self._theirs.add_released(plan.released)
            self.released.add_released(plan.released)
            mine = replace(plan, released=self.released.drain_released())
            result = stepped(
                self._models, self._units, self._pool, self._trace, mine, inputs, stays=self._stays
            ).result()
            if self._stream is not None:
                self._stream.synchronize()  # the other lane may read pages that this step has written
        return result
