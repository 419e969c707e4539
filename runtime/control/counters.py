"""What an agent tells of itself: frozen pictures for `/zoo/state`, `/metrics` and the scheduler.

Contract: pictures only; `BlockLoad` shows the queue and batch of each block instance (BL-14), whose sequences come from
all models with that block in their chain. Nothing here changes an agent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class AgentCounters:
    """Totals since the agent began; each only grows.

    `prompt_tokens`: tokens of prompts whose run is complete, each counted once. `resumed_tokens`: tokens run again
    after
    preemptions. `steps`: steps that ended well. `failed_steps`: steps in which the engine failed. `segments`: segments
    that ran; zero while the engine does not report them. `busy`: nanoseconds that engines spent in steps.
    `idle_tokens`: tokens computed for nobody (BA-18).
    `adapted`: sequences that got another chain than the one they named, because they allow it (BL-28).
    `finished`: sequences by their last event's reason. `speculations`: rows that might be predicted; `speculation_hits`
    and
    `speculation_misses`: that were, rightly and wrongly; `speculations_ended`: instances that were so too often
    (BL-25).
    `moves`: of sequences to other devices that were handed over, and `moves_aborted`; tokens whose K and V were
    `copied` and `recomputed` for them, `moved_bytes` (BL-16). `hops_won`: hops that agents dispatched among
    themselves (BL-23). `shared`: newcomers that began with others' pages, `shared_tokens` of them (BL-32);
    `prefix_queries`: tokens for which cached pages were looked up.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    resumed_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    failed_steps: int = 0
    segments: int = 0
    busy: int = 0
    idle_tokens: int = 0
    adapted: int = 0
    finished: Mapping[FinishReason, int] = field(default_factory=dict)
    speculations: int = 0
    speculation_hits: int = 0
    speculation_misses: int = 0
    speculations_ended: int = 0
    moves: int = 0
    moves_aborted: int = 0
    hops_won: int = 0
    copied: int = 0
    recomputed: int = 0
    moved_bytes: int = 0
    shared: int = 0
    shared_tokens: int = 0
    prefix_queries: int = 0


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


class Counters:
    """The counters while they grow."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.resumed_tokens = 0
        self.preemptions = 0
        self.steps = 0
        self.failed_steps = 0
        self.segments = 0
        self.busy = 0
        self.idle_tokens = 0
        self.adapted = 0
        self.finished: Counter[FinishReason] = Counter()

    def step(self, plan: StepPlan, result: StepResult) -> None:
        """A step ended well. One without rows only told the engine what to forget."""
        self.steps += 1 if plan.rows else 0
        self.segments += len(result.segments)
        self.busy += result.busy
        self.idle_tokens += result.idle

    def snapshot(self) -> AgentCounters:
        return AgentCounters(
            self.prompt_tokens,
            self.generated_tokens,
            self.resumed_tokens,
            self.preemptions,
            self.steps,
            self.failed_steps,
            self.segments,
            self.busy,
            self.idle_tokens,
            self.adapted,
            dict(self.finished),
        )
