"""The paged executor for stages of chains: one device, one page pool, any number of stages.

A step runs the rows of all stages together:

    inputs --joined by stage--> hidden states --segments, as for whole models--> tokens (with a head) | hidden states
    --> outputs

Implements `runtime.chains.StageEngine`. A stage is loaded as a model with a part of a chain (`engine.models.load`).
Stages that have a unit in common, even of different models, hold it once and run it once per step. The engine makes no
decisions: the plan states which rows run on which pages.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from runtime.chains import (
    Array,
    Lack,
    LaunchedStep,
    LayerWatch,
    Likeness,
    LoadedUnits,
    Stage,
    StageResult,
    StepRunner,
)
from runtime.config import AheadChoice, DirectConfig, EngineConfig
from runtime.engine.attention.away import Creditors
from runtime.engine.attention.lent import LentPages, native_exchange
from runtime.engine.attention.native_away import PacketCreditors
from runtime.engine.attention.varlen import page_multiple
from runtime.engine.executors.device import enter_device, pool_bytes
from runtime.engine.executors.second_lane import ReleasedTables, SecondLane
from runtime.engine.executors.stage_step import Begun, stepped
from runtime.engine.kernels.away_calls import NativeAway, native_away
from runtime.engine.models.registry import ModelRegistry
from runtime.engine.recording.graphs import Graphs, graphs_for
from runtime.engine.sampling.output import Sampling
from runtime.engine.step.decode_reuse import DecodeReuse
from runtime.engine.tensors.convert import array_of, joined, likeness, staying
from runtime.kv.pool import PagePool
from runtime.lending_config import LoanShipping
from runtime.loans import LoanExchange, LoanLink, LoanQuery, PacketLoanLink
from runtime.types import EngineMemory, ModelSpec, Opened, StepPlan
from zoo.store import Store

if TYPE_CHECKING:
    from runtime.engine.tensors.links import DirectLinks


_log = logging.getLogger(__name__)

#: Seconds without loading after which the models to serve are taken to be complete.
_SETTLED_S = 1.0


class StagedEngine:
    """`runtime.chains.StageEngine` over KV pages, for one device.

    Args:
        store: the store that holds the weights.
        config: device, pool size, dtype, whether decode steps are recorded, and whether a step may be launched before
            the preceding one has finished. `page_tokens` is not read.
        half_page: bytes of K (and of V) in a page, the same on all devices (`engine.models.registry.half_page`).
        device: the device's name in paths; empty means the name of the hardware.
    """

    def __init__(self, store: Store, config: EngineConfig, half_page: int, device: str = "") -> None:
        self._trace = config.trace_segments
        self._device = device or config.device
        nbytes = pool_bytes(config)
        self._registry = ModelRegistry(store, config, "paged")
        self._pool = PagePool(nbytes, half_page, config.device, page_multiple(self._registry.units.device))
        self._graphs = None if self._trace else graphs_for(config.graphs, self._registry.units, self._pool)
        self._ahead = launches_ahead(config.async_scheduling, self._registry.units.device)
        kernels = self._registry.units.kernels
        self._decode_reuse = (
            DecodeReuse(self._registry.units) if kernels is not None and not self._trace and not self._ahead else None
        )
        units = self._registry.units
        self._lent = LentPages(units.attention, self._pool.second_lane(), units.device)
        self._away: NativeAway | None = None
        self._before: Sampling | None = None
        self._over = 0  # perf_counter_ns at which a result was last read
        self._turn, self._released = threading.Lock(), ReleasedTables(self._registry.models)
        self._second_lane: SecondLane | None = None
        self._stays = False
        self._watch: LayerWatch | None = None
        self._loaded_at = 0.0

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
        """Load a stage and return its spec; return at once if it is loaded already.

        Raises NotServable, NotFound, AmbiguousName, DamagedObject.
        """
        enter_device(self._registry.units.device)
        with self._alone():
            before = len(self._registry.models)
            if self._decode_reuse is not None:
                self._decode_reuse.clear()
            spec = self._registry.load(stage.model, self._pool, stage).spec
            if len(self._registry.models) > before:
                self._loaded_at = time.monotonic()
                self._clear_reuse()  # the new stage may have attached adapters to units that are in recordings
            return spec

    @property
    def prepares(self) -> bool:
        """Whether `prepare` is of use: on a CPU. Copies to a GPU from another thread were never tried."""
        return self._registry.units.device.type == "cpu"

    def prepare(self, stage: Stage) -> None:
        """Prepare the load of a stage (`runtime.chains.Preparing`)."""
        self._registry.prepare(stage)

    def read_ahead(self, stages: Sequence[Stage], stop: Callable[[], bool]) -> Iterator[tuple[Stage, tuple[str, ...]]]:
        """Read the weights of stages into host memory (`runtime.chains.ReadsAhead`)."""
        return self._registry.read_ahead(stages, stop)

    def loaded_units(self, stage: Stage) -> LoadedUnits:
        """Return what the load of a stage brought (`runtime.chains.Tiered`). Raises KeyError if it is not loaded."""
        units, found = self._registry.models[stage.id].units, self._registry.units.tiers.of_load(stage.id)
        return LoadedUnits(tuple(unit.digest for unit in units), found.disk, found.host)

    def expect(self, stage: Stage) -> None:
        self._registry.expect(stage)

    def host_changes(self) -> Mapping[str, int]:
        return self._registry.units.host_changes()

    def unload(self, stage: Stage) -> None:
        """Drop a stage and free what no other stage uses. Raises NotFound."""
        with self._alone():
            self._clear_reuse()
            self._registry.unload(stage.id)

    @property
    def recordings(self) -> Graphs | None:
        """The recorded decode steps; None where none are recorded."""
        return self._graphs

    def prepare_next(self) -> bool:
        """Record one decode step on a GPU before it occurs, once loading is over; return whether there are more.

        If that fails, nothing is recorded ahead any more; the engine serves on.
        """
        units = self._registry.units
        if self._graphs is None or units.device.type != "cuda" or time.monotonic() - self._loaded_at < _SETTLED_S:
            return False
        enter_device(units.device)
        try:
            with torch.inference_mode():
                return self._graphs.record_next(self._registry.models)
        except Exception:
            _log.exception("decode steps are not recorded ahead")
            self._loaded_at = math.inf
            return False

    @property
    def ahead(self) -> bool:
        """Whether steps are launched ahead. An engine with a second lane never does."""
        return self._ahead and self._second_lane is None

    @torch.inference_mode()
    def launch(self, plan: StepPlan, inputs: Mapping[str, Array]) -> LaunchedStep:
        """Begin a step.

        Raises ValueError for rows without input hidden states, with inputs of the wrong size, or that await a token
        without a preceding step.
        """
        before, self._before = self._before, None
        begun = self._begin(plan, inputs, before)
        self._before = begun.sampling
        return _Launched(self, begun)

    @torch.inference_mode()
    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        """Run one step to its end. Raises as `launch`."""
        if self._second_lane is None:
            return self._begin(plan, inputs).result()
        with self._turn:
            self._second_lane.released.add_released(plan.released)
            self._released.add_released(plan.released)
            result = self._begin(replace(plan, released=self._released.drain_released()), inputs).result()
            self._finish()
        return result

    def busy_since(self, begin: int) -> int:
        """Return the nanoseconds of device time of a step that has just finished and was launched at `begin` (ns).

        Time before the preceding step's end does not count.
        """
        since, self._over = max(begin, self._over), time.perf_counter_ns()
        return self._over - since

    def _begin(self, plan: StepPlan, inputs: Mapping[str, Array], before: Sampling | None = None) -> Begun:
        registry = self._registry
        enter_device(registry.units.device)
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
            self._watch,
        )

    def second_lane(self) -> StepRunner:
        """Create the second lane. On CUDA this turns the recording of decode steps off."""
        units, models = self._registry.units, self._registry.models
        if units.device.type == "cuda":
            self._graphs = None  # work from the other lane's thread would break a recording in progress
        self._second_lane = SecondLane(units, models, self._pool, self._released, self._trace, self._stays)
        return self._second_lane

    def direct(self, config: DirectConfig, host: str = "") -> DirectLinks:
        """Return links for direct transfers between devices: gloo between CPUs, NCCL between GPUs.

        Part of `runtime.transport.interfaces.Connectable`. Outputs stay on the device from now on. Raises NotServable
        if torch has no transport for the device.
        """
        from runtime.engine.tensors.links import (
            DirectLinks,
        )  # imported here because builds of torch differ in what torch.distributed has
        from runtime.engine.tensors.process_groups import rail_for

        links = DirectLinks(rail_for(self._registry.units.device, host), config)
        self._stays = True
        return links

    def watch_layers(self, watch: LayerWatch) -> bool:
        """Watch the layers of steps on a CPU. On a GPU a step is only queued when its layers seem to have run."""
        if self._registry.units.device.type != "cpu" or self.ahead:
            return False
        self._watch = watch
        return True

    def borrow(self, link: LoanLink, shipping: LoanShipping = "query") -> None:
        away, native = self._away, None
        if away is not None and isinstance(link, PacketLoanLink):
            native = PacketCreditors(link, away)
        self._registry.units.creditors = Creditors(link, shipping, native=native)

    def hold_loan(
        self, loan: int, groups: Sequence[Sequence[int]], tokens: int, debtor: str, first_layer: int = 0
    ) -> None:
        self._lent.hold_loan(loan, groups, tokens, debtor, first_layer)

    def drop_loan(self, loan: int) -> None:
        self._lent.drop_loan(loan)

    def attend_loans(self, query: LoanQuery, arrays: Sequence[Array], debtor: str) -> tuple[Array, ...]:
        return self._lent.attend(query, arrays, debtor)

    def exchange_packets(self, room: int) -> LoanExchange | None:
        kernels = self._registry.units.kernels
        if kernels is None:
            return None
        self._away = native_away(kernels, room)
        return native_exchange(kernels, self._lent, room)

    def _clear_reuse(self) -> None:
        if self._decode_reuse is not None:
            self._decode_reuse.clear()
        if self._graphs is not None:
            self._graphs.clear()

    def return_pages(self, pages: Sequence[int]) -> None:
        self._pool.give_back(pages)

    def read_pages(self, pages: Sequence[int]) -> Array:
        """Return the contents of pages. Raises ValueError for pages that do not exist."""
        with self._alone():
            return staying(self._pool.held(pages)) if self._stays else array_of(self._pool.read(pages))

    def copy_out(self, key: str, tokens: int, pages: Sequence[int]) -> Array:
        """Return the contents of pages in host memory. Raises ValueError for pages that do not exist."""
        with self._alone():
            return array_of(self._pool.read(pages))

    def copy_in(self, opened: Opened, tokens: int, pages: Sequence[int], data: Array) -> None:
        self.write_pages(pages, data)

    @property
    def host_weights(self) -> int:
        return self._registry.units.idle.held

    def share_host_memory(self, kv: int) -> None:
        self._registry.units.share_idle(kv)

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
        """Run the body while neither lane runs a step.

        Afterwards the second lane takes over stages that were loaded or unloaded.
        """
        if self._second_lane is None:
            yield
            return
        with self._turn, self._second_lane.turn:
            yield
            self._finish()
            self._second_lane.follow(self._registry.units)

    def _finish(self) -> None:
        """Wait for the device's stream, so that the other lane can read what this one has written."""
        if self._registry.units.device.type == "cuda":
            torch.cuda.current_stream(self._registry.units.device).synchronize()


@dataclass(frozen=True, slots=True)
class _Launched:
    """`LaunchedStep` of a staged engine: a step that is queued on the device."""

    engine: StagedEngine
    begun: Begun

    def result(self) -> StageResult:
        told = self.begun.result()
        return replace(told, result=replace(told.result, busy=self.engine.busy_since(self.begun.begin)))


def launches_ahead(choice: AheadChoice, device: torch.device) -> bool:
    """Return whether steps on this device are launched before the results of preceding ones are read."""
    return choice == "on" or (choice == "auto" and device.type != "cpu")
