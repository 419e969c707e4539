"""What an agent tells of itself: frozen pictures for `/zoo/state`, `/metrics` and the scheduler.

Contract: pictures only; `BlockLoad` shows the queue and batch of each block instance (BL-14), whose sequences come from
all models with that block in their chain. Nothing here changes an agent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields

from runtime.types import FinishReason, ModelSpec, PageCounts, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Sequences of one model on this device, by what they do."""

    model: str
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """One block instance: sequences that wait for it, that are in its batch, and how many that may be."""

    block: str
    queue: int
    batch: int
    batch_limit: int


def _shown(metric: str, documentation: str, per: float = 1) -> int:
    """A counter that `/metrics` shows under this name, so many to one of the metric's unit."""
    shown: int = field(default=0, metadata={"metric": metric, "documentation": documentation, "per": per})
    return shown


@dataclass(slots=True)
class AgentCounters:
    """Totals since the agent began; each only grows. The one list of them: `Counters` counts them, `/zoo/state` and
    `/metrics` show them.

    `prompt_tokens`: tokens of prompts whose run is complete, each counted once; it and `generated_tokens` are
    metrics of the frontend's.
    `steps`: that ended well. `segments`: zero while the engine does not report them. `busy`: nanoseconds that
    engines spent in steps.
    `adapted`: sequences that got another chain than the one they named, because they allow it (BL-28). `finished`:
    sequences by their last event's reason.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = _shown("vllm:num_preemptions", "Sequences preempted, to be recomputed.")
    resumed_tokens: int = _shown("blockzoo:resumed_tokens", "Tokens run again after preemptions.")
    steps: int = _shown("blockzoo:steps", "Steps that the engine ran.")
    failed_steps: int = _shown("blockzoo:failed_steps", "Steps in which the engine failed.")
    segments: int = _shown("blockzoo:segments", "Segments run, where the engine reports them.")
    idle_tokens: int = _shown("blockzoo:idle_tokens", "Padding tokens of dense batches.")  # BA-18
    busy: int = _shown("blockzoo:step_seconds", "Time the engine spent in steps.", per=1e9)
    adapted: int = _shown("blockzoo:adapted_sequences", "Adaptive sequences that ran on a variant of their model.")
    finished: Mapping[FinishReason, int] = field(default_factory=dict)
    # Predicted hops (BL-25).
    speculations: int = _shown("blockzoo:speculations", "Rows that might be predicted.")
    speculation_hits: int = _shown("blockzoo:speculation_hits", "Rows that were predicted rightly.")
    speculation_misses: int = _shown("blockzoo:speculation_misses", "Rows that were predicted wrongly.")
    speculations_ended: int = _shown(
        "blockzoo:speculations_ended", "Block instances that were predicted wrongly too often."
    )
    # What only several devices do: moves (BL-16), hops that agents dispatch (BL-23), shared beginnings (BL-32).
    moves: int = _shown("blockzoo:migrations", "Sequences migrated to another device.")
    moves_aborted: int = _shown("blockzoo:migrations_aborted", "Migrations that were given up.")
    hops_won: int = _shown("blockzoo:hops_won", "Hops that were offered to several agents and taken by one.")
    copied: int = _shown("blockzoo:migration_copied_tokens", "Tokens whose K and V migrations copied.")
    recomputed: int = _shown("blockzoo:migration_recomputed_tokens", "Tokens whose K and V migrations recomputed.")
    moved_bytes: int = _shown("blockzoo:migration_bytes", "Bytes of K and V that migrations sent.")
    shared: int = _shown("blockzoo:shared_sequences", "Sequences that started from cached pages.")
    shared_tokens: int = _shown("vllm:prefix_cache_hits", "Tokens that were found in cached pages.")

    prefix_queries: int = _shown("vllm:prefix_cache_queries", "Tokens for which cached pages were looked up.")

    def shown(self) -> Iterator[tuple[str, str, float]]:
        """Of each counter that is a metric: its name there, what it says, and its value in the metric's unit."""
        for each in fields(self):
            if each.metadata:
                value: int = getattr(self, each.name)
                yield each.metadata["metric"], each.metadata["documentation"], value / each.metadata["per"]


@dataclass(frozen=True, slots=True)
class AgentState:
    """One device, now. `running` and `waiting` count sequences."""

    running: int
    waiting: int
    pages: PageCounts
    models: tuple[ModelLoad, ...]
    instances: tuple[BlockLoad, ...]
    counters: AgentCounters


def model_loads(specs: Iterable[ModelSpec], running: Iterable[str], waiting: Iterable[str]) -> tuple[ModelLoad, ...]:
    """Count by model; `running` and `waiting` name the model of each sequence."""
    runs, waits = Counter(running), Counter(waiting)
    return tuple(ModelLoad(spec.name, runs[spec.name], waits[spec.name]) for spec in specs)


def block_loads(specs: Iterable[ModelSpec], models: Iterable[ModelLoad], batch_limit: int) -> tuple[BlockLoad, ...]:
    """Sum by block over the models whose chain has it; blocks in the order in which chains name them first."""
    by_model = {load.model: load for load in models}
    queue: Counter[str] = Counter()
    batch: Counter[str] = Counter()
    blocks: dict[str, None] = {}
    for spec in specs:
        for block in dict.fromkeys(spec.blocks):
            blocks.setdefault(block)
            queue[block] += by_model[spec.name].waiting
            batch[block] += by_model[spec.name].running
    return tuple(BlockLoad(block, queue[block], batch[block], batch_limit) for block in blocks)


@dataclass(slots=True)
class Counters(AgentCounters):
    """The counters while they grow."""

    finished: Counter[FinishReason] = field(default_factory=Counter)

    def step(self, plan: StepPlan, result: StepResult) -> None:
        """A step ended well. One without rows only told the engine what to forget."""
        self.steps += 1 if plan.rows else 0
        self.segments += len(result.segments)
        self.busy += result.busy
        self.idle_tokens += result.idle

    def snapshot(self) -> AgentCounters:
        """A copy that does not grow."""
        values = {each.name: getattr(self, each.name) for each in fields(AgentCounters)}
        return AgentCounters(**values | {"finished": dict(self.finished)})
