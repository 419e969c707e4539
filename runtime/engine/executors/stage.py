"""The paged executor for parts of chains: one device, one page pool, any number of stages; a step runs all their rows
together.

    inputs --joined by stage--> hidden states --segments, as for whole models--> tokens (with a head) | hidden states
    --> outputs

Implements `runtime.chains.StageEngine`. A stage is a model whose chain is a part (`engine.models.load`): two that have
a unit in common, of whichever models, hold it once and run it once. Decides nothing: which rows run, and on which
pages, is in the plan.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from runtime.chains import Array, Lack, LaunchedStep, Likeness, Stage, StageResult, StepRunner
from runtime.config import AheadChoice, DirectConfig, EngineConfig
from runtime.engine.executors.second_lane import ReleasedTables, SecondLane
from runtime.engine.executors.stage_step import Begun, stepped
from runtime.engine.models.registry import ModelRegistry
from runtime.engine.recording.graphs import graphs_for
from runtime.engine.sampling.output import Sampling
from runtime.engine.step.decode_reuse import DecodeReuse
from runtime.engine.tensors.convert import array_of, joined, likeness, staying
from runtime.kv.pool import PagePool
from runtime.types import EngineMemory, ModelSpec, StepPlan
from zoo.store import Store

if TYPE_CHECKING:
    from runtime.engine.tensors.links import DirectLinks


class StagedEngine:
    """See the top of the file.

    Args:
        store: where the weights are.
        config: device, pool size, dtype, whether decodes are recorded, and whether steps are launched before those
            before them are over. `page_tokens` is not read.
        half_page: bytes of K (and of V) in a page, the same on all devices (`engine.models.registry.half_page`).
        device: its name in paths; that of the hardware if there is none.
    """

    def __init__(self, store: Store, config: EngineConfig, half_page: int, device: str = "") -> None:
        self._trace = config.trace_segments
        self._device = device or config.device
        self._registry = ModelRegistry(store, config, "paged")
        self._pool = PagePool(config.kv_cache_memory_bytes, half_page, config.device)
        self._graphs = None if self._trace else graphs_for(config.graphs, self._registry.units, self._pool)
        self._ahead = launches_ahead(config.async_scheduling, self._registry.units.device)
        kernels = self._registry.units.kernels
        self._decode_reuse = (
            DecodeReuse(self._registry.units) if kernels is not None and not self._trace and not self._ahead else None
        )
        self._before: Sampling | None = None
        self._over = 0  # when a result was last read
        self._turn, self._released = threading.Lock(), ReleasedTables(self._registry.models)
        self._second_lane: SecondLane | None = None
        self._stays = False

    lacks: frozenset[Lack] = frozenset()

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
        """Make a stage ready; one that is loaded already costs nothing. Raises NotServable, NotFound, AmbiguousName,
        DamagedObject.
        """
        with self._alone():
            before = len(self._registry.models)
            if self._decode_reuse is not None:
                self._decode_reuse.clear()
            spec = self._registry.load(stage.model, self._pool, stage).spec
            if len(self._registry.models) > before:
                self._clear_reuse()  # adapters came to units that recordings have in them
            return spec

    def unload(self, stage: Stage) -> None:
        """Drop a stage; what no other one uses is freed. Raises NotFound."""
        with self._alone():
            self._clear_reuse()
            self._registry.unload(stage.id)

    @property
    def ahead(self) -> bool:
        """(A lane beside takes no steps before they are over.)"""
        return self._ahead and self._second_lane is None

    @torch.inference_mode()
    def launch(self, plan: StepPlan, inputs: Mapping[str, Array]) -> LaunchedStep:
        """Begin a step. Raises ValueError for rows without what they start from, or with what does not fit them."""
        before, self._before = self._before, None
        begun = self._begin(plan, inputs, before)
        self._before = begun.sampling
        return _Launched(self, begun)

    @torch.inference_mode()
    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        """Run one step. Raises as `launch`."""
        if self._second_lane is None:
            return self._begin(plan, inputs).result()
        with self._turn:
            self._second_lane.released.add_released(plan.released)
            self._released.add_released(plan.released)
            result = self._begin(replace(plan, released=self._released.drain_released()), inputs).result()
            self._finish()
        return result

    def busy_since(self, begin: int) -> int:
        """Nanoseconds that a step which is over now has had this device, if it came to it at `begin`."""
        since, self._over = max(begin, self._over), time.perf_counter_ns()
        return self._over - since

    def _begin(self, plan: StepPlan, inputs: Mapping[str, Array], before: Sampling | None = None) -> Begun:
        registry = self._registry
        return stepped(
            registry.models,
            registry.units,
            self._pool,
            self._trace,
            plan,
            inputs,
            self._graphs,
            self._decode_reuse,
            self._stays,
            before,
        )

    def second_lane(self) -> StepRunner:
        units, models = self._registry.units, self._registry.models
        if units.device.type == "cuda":
            self._graphs = None  # while one thread records, another's work would break the recording
        self._second_lane = SecondLane(units, models, self._pool, self._released, self._trace, self._stays)
        return self._second_lane

    def direct(self, config: DirectConfig, host: str = "") -> DirectLinks:
        """`runtime.transport.interfaces.Connectable`: gloo between CPUs, NCCL between GPUs. Raises NotServable where
        torch has none.
        """
        from runtime.engine.tensors.links import (
            DirectLinks,
        )  # what there is of torch.distributed differs from build to build
        from runtime.engine.tensors.process_groups import rail_for

        links = DirectLinks(rail_for(self._registry.units.device, host), config)
        self._stays = True
        return links

    def _clear_reuse(self) -> None:
        if self._decode_reuse is not None:
            self._decode_reuse.clear()
        if self._graphs is not None:
            self._graphs.clear()

    def read_pages(self, pages: Sequence[int]) -> Array:
        """Raises ValueError for pages that are not there."""
        with self._alone():
            return staying(self._pool.held(pages)) if self._stays else array_of(self._pool.read(pages))

    def write_pages(self, pages: Sequence[int], data: Array) -> None:
        given = joined([data], (len(pages), self.page_bytes), torch.uint8, self._registry.units.device)
        with self._alone():
            self._pool.write(pages, given)

    def alike(self, a: Array, b: Array) -> Likeness:
        return likeness(a, b)

    def memory(self) -> EngineMemory:
        return EngineMemory(self._registry.units.nbytes, self._registry.bytes_alone(), self._pool.nbytes)

    # -- two lanes -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Between steps of both lanes; the one beside learns of stages that came or went."""
        if self._second_lane is None:
            yield
            return
        with self._turn, self._second_lane.turn:
            yield
            self._finish()
            self._second_lane.follow(self._registry.units)

    def _finish(self) -> None:
        """What one lane has written is there when the other one reads it."""
        if self._registry.units.device.type == "cuda":
            torch.cuda.current_stream(self._registry.units.device).synchronize()


@dataclass(frozen=True, slots=True)
class _Launched:
    """`LaunchedStep`: what it computes is under way."""

    engine: StagedEngine
    begun: Begun

    def result(self) -> StageResult:
        told = self.begun.result()
        return replace(told, result=replace(told.result, busy=self.engine.busy_since(self.begun.begin)))


def launches_ahead(choice: AheadChoice, device: torch.device) -> bool:
    """Whether steps on this device are launched before the ones before are read."""
    return choice == "on" or (choice == "auto" and device.type != "cpu")
