"""An engine of whole models as a stage engine, for one agent alone: the driver and the HTTP of stored models, tokens
worked out by hand.

A stage is a model's whole chain here, and known to the engine by the model's name; tables' names are the engine's
sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from runtime.agent.speculation.hop import same_bits
from runtime.chains import Array, Block, BlockUse, Chain, Likeness, Stage, StageResult
from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.agents.inline import InlineAgent
from runtime.cluster.driver.driver import ClusterDriver
from runtime.config import AgentConfig, ClusterConfig, ControlConfig
from runtime.control.scheduler_io import ServeModel
from runtime.engine.fakes.fake import FakeEngine
from runtime.tracing.sink import TraceSink
from runtime.types import EngineMemory, ModelSpec, StepPlan


class Whole:
    """Implements `runtime.chains.StageEngine` over a FakeEngine."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._names: dict[str, str] = {}
        self.device, self.page_capacity, self.page_bytes = engine.device, engine.page_capacity, 10

    def load(self, stage: Stage) -> ModelSpec:
        self._names[stage.id] = stage.model
        return replace(self._engine.load(stage.model), name=stage.id)

    def unload(self, stage: Stage) -> None:
        self._engine.unload(self._names.pop(stage.id))

    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        names = self._names
        rows = tuple(structs.replace(row, model=names[row.model]) for row in plan.rows)
        opened = tuple(
            replace(one, request=replace(one.request, model=names[one.request.model])) for one in plan.opened
        )
        return StageResult(self._engine.execute(replace(plan, rows=rows, opened=opened)), {})

    def beside(self) -> None:
        return None

    def read_pages(self, pages: Sequence[int]) -> Array:
        raise NotImplementedError("one device moves nothing")

    def write_pages(self, pages: Sequence[int], data: Array) -> None:
        raise NotImplementedError("one device moves nothing")

    def alike(self, a: Array, b: Array) -> Likeness:
        return same_bits(a, b)

    def memory(self) -> EngineMemory:
        return self._engine.memory()


def chain_of(spec: ModelSpec) -> Chain:
    """Its blocks in a row, the first with all K and V."""
    layers = (spec.kv_layers, *[0] * (len(spec.blocks) - 1))
    uses = [BlockUse(block, at, at + 1, layers[at], f"{spec.name}/{at}", 0) for at, block in enumerate(spec.blocks)]
    return Chain(spec, f"v-{spec.name}", tuple(uses))


def blocks_of(spec: ModelSpec) -> tuple[Block, ...]:
    layers = (spec.kv_layers, *[0] * (len(spec.blocks) - 1))
    return tuple(Block(block, 1000, layers[at]) for at, block in enumerate(spec.blocks))


def inline(
    engine: FakeEngine,
    available: Sequence[ModelSpec] = (),
    trace: TraceSink | None = None,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 16,
) -> ClusterDriver:
    """One agent alone, as `zoo serve` makes it of stored models."""
    specs = {spec.name: spec for spec in (*engine.models(), *available)}
    served = [specs[spec.name] for spec in engine.models()]
    relay = AgentConfig(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs, chunk_prefill=True)
    only = InlineAgent(lambda: Whole(engine), relay, AgentSettings(), engine.device, trace=trace)
    config = ClusterConfig(
        max_num_seqs=max_num_seqs,
        prefill_chunk=4 * max_num_batched_tokens,
        control=ControlConfig.off(),
        prefix_caching="off",
    )
    return ClusterDriver(
        [chain_of(spec) for spec in served],
        [*{block.id: block for spec in served for block in blocks_of(spec)}.values()],
        [only.device],
        only,
        config,
        trace=trace,
        describe=lambda name: ServeModel(chain_of(specs[name]), blocks_of(specs[name])),
    )
