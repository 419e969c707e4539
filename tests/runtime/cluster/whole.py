"""One device with models known by their specs only, on an integer engine, for tests of the driver and of HTTP.

A model is its blocks in a row: the first block has all layers with attention, each further one is one component.
Blocks with equal names are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from runtime.chains import Array, Block, BlockUse, Chain, Rewriting, StageResult
from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.agents.inline import InlineAgent
from runtime.cluster.driver.driver import ClusterDriver
from runtime.config import AgentConfig, ClusterConfig, ControlConfig, PrefixCaching
from runtime.control.scheduler_io import ServeModel
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.engine.fakes.integer_model import IntegerModel, IntegerPart, expected
from runtime.policy.profiles import BlockProfile, DeviceProfile
from runtime.scheduler.admission.variant_choice import VariantChoice
from runtime.tracing.sink import TraceSink
from runtime.types import ModelSpec, SamplingParams, SegmentRun, StepPlan
from zoo.errors import NotFound


def model_of(spec: ModelSpec) -> IntegerModel:
    """Return the integer model for a spec."""
    first, *others = spec.blocks or ("",)
    parts = [IntegerPart(_seed(f"{first}{layer}"), True, 1000 // spec.kv_layers) for layer in range(spec.kv_layers)]
    return IntegerModel(spec, (*parts, *(IntegerPart(_seed(block)) for block in others)))


def answer(spec: ModelSpec, prompt: Iterable[int], sampling: SamplingParams) -> list[int]:
    """Return all tokens that a sequence gets, its end token included."""
    return expected(model_of(spec), prompt, sampling)


def chain_of(spec: ModelSpec) -> Chain:
    """Return the chain of a spec, one use for each of its blocks."""
    layers = (spec.kv_layers, *[0] * (len(spec.blocks) - 1))
    ends = [spec.kv_layers + at for at in range(len(spec.blocks))]
    uses = [
        BlockUse(block, ends[at] - 1 if at else 0, ends[at], layers[at], f"{spec.name}/{at}", 0)
        for at, block in enumerate(spec.blocks)
    ]
    return Chain(spec, f"v-{spec.name}", tuple(uses))


def blocks_of(spec: ModelSpec) -> tuple[Block, ...]:
    return tuple(Block(use.block, 1000, use.kv_layers) for use in chain_of(spec).uses)


class WholeEngine(IntegerEngine):
    """An engine that runs models by their specs, and reports what ran by block.

    `available`: models that can be loaded in addition to the served ones.
    """

    def __init__(
        self, models: Iterable[ModelSpec], pages: int, available: Iterable[ModelSpec] = (), **options: Any
    ) -> None:
        self.served = tuple(models)
        self.known = {spec.name: spec for spec in (*available, *self.served)}
        width = max((spec.page_tokens for spec in self.known.values()), default=1)
        super().__init__([model_of(spec) for spec in self.known.values()], pages, page_bytes=16 * width, **options)

    def models(self) -> tuple[ModelSpec, ...]:
        """Return the specs of the loaded models."""
        return tuple(self.known[stage.model] for stage in self._stages.values())

    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        told = super().run(plan, inputs)
        by_block: dict[str, list[Any]] = {}
        for row in plan.rows:
            for block in self.known[self._stages[row.model].model].blocks:
                by_block.setdefault(block, []).append(row)
        runs = tuple(
            SegmentRun(
                (block,),
                "block",
                (None,),
                tuple(dict.fromkeys(row.model for row in rows)),
                len(rows),
                sum(len(r.tokens) for r in rows),
            )
            for block, rows in by_block.items()
        )
        return replace(told, result=replace(told.result, segments=runs))


def inline(
    engine: WholeEngine, trace: TraceSink | None = None, max_num_batched_tokens: int = 64, max_num_seqs: int = 16,
    sharing: PrefixCaching = "off", credit: int = 1, clock: Callable[[], int] | None = None,
    deltas: Mapping[str, Rewriting] = MappingProxyType({}), profiles: Sequence[BlockProfile] = (),
) -> ClusterDriver:  # fmt: skip
    """Return a driver with one inline agent, as `zoo serve` makes it for stored models.

    Args:
        deltas: By model, the full fine-tune that it may answer for.
        profiles: Of blocks, and of whole chains by their versions.
    """
    made = [engine]
    agent = AgentConfig(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs, chunk_prefill=True)
    times = {} if clock is None else {"clock": clock}
    only = InlineAgent(made.pop, agent, AgentSettings(), engine.device, trace=trace, **times)
    config = ClusterConfig(
        max_num_seqs=max_num_seqs,
        prefill_chunk=4 * max_num_batched_tokens,
        control=ControlConfig.off(),
        prefix_caching=sharing,
        stride=credit,
    )
    served = engine.served
    return ClusterDriver(
        [replace(chain_of(spec), rewriting=deltas.get(spec.name)) for spec in served],
        [*{block.id: block for spec in served for block in blocks_of(spec)}.values()],
        [only.device],
        only,
        config,
        trace=trace,
        adaptation=VariantChoice(profiles=DeviceProfile(engine.device, tuple(profiles), ())),
        describe=lambda name: _serve(engine, name, deltas.get(name)),
        **times,
    )


def _seed(block: str) -> int:
    return sum((at + 1) * byte for at, byte in enumerate(block.encode()))


def _serve(engine: WholeEngine, name: str, rewriting: Rewriting | None) -> ServeModel:
    if name not in engine.known:
        raise NotFound(f"no model named {name!r}")
    return ServeModel(replace(chain_of(engine.known[name]), rewriting=rewriting), blocks_of(engine.known[name]))
