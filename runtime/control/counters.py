"""Define an agent's statistics: frozen snapshots for `/zoo/state`, `/metrics` and the scheduler.

`BlockLoad` reports the queue and batch of each block instance (BL-14), over the sequences of all models that contain
the block. Nothing here changes an agent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields

from runtime.types import FinishReason, ModelSpec, PageCounts, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Count one model's sequences on this device, running and waiting."""

    model: str
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Count the sequences at one block instance.

    Fields:
        queue: Sequences that wait for it.
        batch: Sequences in its batch.
        batch_limit: Most sequences in its batch.
    """

    block: str
    queue: int
    batch: int
    batch_limit: int


def _shown(metric: str, documentation: str, per: float = 1) -> int:
    """Define a counter that `/metrics` exports under this name, divided by `per` to convert it to the metric's unit."""
    shown: int = field(default=0, metadata={"metric": metric, "documentation": documentation, "per": per})
    return shown


@dataclass(slots=True)
class AgentCounters:
    """Hold totals since the agent started; each only grows.

    This is the only list of counters: `Counters` increments them, `/zoo/state` and `/metrics` export them.

    Fields:
        prompt_tokens: Tokens of fully computed prompts, each counted once. The frontend exports it and
            `generated_tokens`.
        steps: Steps that succeeded.
        segments: 0 while the engine does not report segments.
        busy: Nanoseconds that engines spent in steps.
        adapted: Sequences that run on another chain than they named, because they allow it (BL-28).
        adapted_similarity: Sum of the scores of these chains against the named ones, in millionths.
        finished: Ended sequences by reason.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = _shown("vllm:num_preemptions", "Sequences that gave way, to be computed again or brought back.")
    resumed_tokens: int = _shown("blockzoo:resumed_tokens", "Tokens run again after preemptions.")
    prompt_chunks: int = _shown("blockzoo:prompt_chunks", "Chunks sent that several prompts may fill.")
    prompt_chunk_tokens: int = _shown("blockzoo:prompt_chunk_tokens", "Tokens in these chunks.")
    steps: int = _shown("blockzoo:steps", "Steps that the engine ran.")
    failed_steps: int = _shown("blockzoo:failed_steps", "Steps in which the engine failed.")
    segments: int = _shown("blockzoo:segments", "Segments run, where the engine reports them.")
    idle_tokens: int = _shown("blockzoo:idle_tokens", "Padding tokens of dense batches.")  # BA-18
    busy: int = _shown("blockzoo:step_seconds", "Time the engine spent in steps.", per=1e9)
    adapted: int = _shown("blockzoo:adapted_sequences", "Adaptive sequences that ran on a variant of their model.")
    adapted_similarity: int = _shown(
        "blockzoo:adapted_similarity",
        "Similarity of these variants to their model, as the store has scored them, added up.",
        per=1e6,
    )
    finished: Mapping[FinishReason, int] = field(default_factory=dict)
    # Speculated hops (BL-25).
    speculations: int = _shown("blockzoo:speculations", "Rows that might be predicted.")
    speculation_hits: int = _shown("blockzoo:speculation_hits", "Rows that were predicted rightly.")
    speculation_misses: int = _shown("blockzoo:speculation_misses", "Rows that were predicted wrongly.")
    speculations_ended: int = _shown(
        "blockzoo:speculations_ended", "Block instances that were predicted wrongly too often."
    )
    # Migrations (BL-16), hops dispatched by agents (BL-23), shared prefixes (BL-32).
    moves: int = _shown("blockzoo:migrations", "Sequences migrated to another device.")
    moves_aborted: int = _shown("blockzoo:migrations_aborted", "Migrations that were given up.")
    hops_won: int = _shown("blockzoo:hops_won", "Hops that were offered to several agents and taken by one.")
    copied: int = _shown("blockzoo:migration_copied_tokens", "Tokens whose K and V migrations copied.")
    recomputed: int = _shown("blockzoo:migration_recomputed_tokens", "Tokens whose K and V migrations recomputed.")
    moved_bytes: int = _shown("blockzoo:migration_bytes", "Bytes of K and V that migrations sent.")
    # Hand-offs from devices for prompts to devices that decode (TI-15); they count as migrations, too.
    handoffs: int = _shown("blockzoo:handoffs", "Sequences handed off to devices that decode.")
    handoff_transfers: int = _shown("blockzoo:handoff_transfers", "Times that hand-offs sent K and V.")
    handoffs_aborted: int = _shown("blockzoo:handoffs_aborted", "Hand-offs that were given up.")
    handoff_bytes: int = _shown("blockzoo:handoff_bytes", "Bytes of K and V that hand-offs sent.")
    handoff_present_tokens: int = _shown(
        "blockzoo:handoff_present_tokens",
        "Tokens of hand-offs of which the K and V were where they decode, as of another prompt with the same prefix.",
    )
    handoff_ns: int = _shown("blockzoo:handoff_seconds", "Duration of hand-offs, from request to commit.", per=1e9)
    local_prefills: int = _shown(
        "blockzoo:local_prefills", "Prompts of which the rest behind a cached prefix ran where they decode."
    )
    local_prefill_tokens: int = _shown("blockzoo:local_prefill_tokens", "Tokens of these rests.")
    predicted: int = _shown("blockzoo:lengths_predicted", "Answers of which the length was predicted.")
    unpredicted: int = _shown(
        "blockzoo:lengths_not_predicted",
        "Answers that came without a prediction: no predictor, a given length, a failure.",
    )
    prediction_ns: int = _shown("blockzoo:length_prediction_seconds", "Time that these predictions took.", per=1e9)
    role_changes: int = _shown("blockzoo:role_changes", "Changes of roles of devices, by hand and by the scheduler.")
    # Loans of K and V to devices that are not on a sequence's path (IL-04).
    loans: int = _shown(
        "blockzoo:loans", "Loans of K and V of running sequences to devices that are not on their path."
    )
    loans_refused: int = _shown("blockzoo:loans_refused", "Loans that were asked for in vain.")
    loan_pages: int = _shown("blockzoo:loan_pages", "Pages lent.")
    loan_bytes: int = _shown("blockzoo:loan_bytes", "Bytes of K and V that loans sent.")
    loan_ns: int = _shown("blockzoo:loan_seconds", "Duration of loans' transfers, from request to answer.", per=1e9)
    loan_recalls: int = _shown("blockzoo:loan_recalls", "Parts of loans that came back while their sequence ran.")
    recalled_pages: int = _shown("blockzoo:recalled_pages", "Pages that came back with them.")
    mends: int = _shown("blockzoo:mends", "Sequences that computed again only what a dead creditor had held.")
    mended_tokens: int = _shown("blockzoo:mended_tokens", "Tokens that mends computed again.")
    loss_restarts: int = _shown("blockzoo:loss_restarts", "Sequences that ran again as a creditor had died.")
    restarted_tokens: int = _shown(
        "blockzoo:restarted_tokens", "Tokens with K and V that sequences computed again without a mend."
    )
    recoveries: int = _shown("blockzoo:recoveries", "Sequences with a token after the death of a creditor.")
    recovery_ns: int = _shown(
        "blockzoo:recovery_seconds", "Time from the death of a creditor to the next token of a sequence.", per=1e9
    )
    circles: int = _shown("blockzoo:circles", "Circles of debts among devices that were resolved, or given up.")
    # What is said with the managers of the pool and the creditors that they recommend (IL-12).
    pool_queries: int = _shown("blockzoo:pool_queries", "Queries for creditors to the managers of the pool.")
    pool_offers: int = _shown("blockzoo:pool_offers", "Creditors that these recommended.")
    pool_grants: int = _shown("blockzoo:pool_grants", "Creditors that took the pages they were asked to take.")
    pool_denials: int = _shown("blockzoo:pool_denials", "Creditors that refused.")
    pool_unanswered: int = _shown("blockzoo:pool_unanswered", "Queries without an answer in time.")
    # K and V of sequences that gave way, in host memory (QL-10).
    swapped_out: int = _shown("blockzoo:swapped_out", "Sequences that gave way, with K and V kept in host memory.")
    swapped_in: int = _shown("blockzoo:swapped_in", "Sequences whose K and V came back from host memory.")
    swapped_lost: int = _shown("blockzoo:swapped_lost", "Kept K and V that were dropped before they came back.")
    swapped_tokens: int = _shown("blockzoo:swapped_tokens", "Tokens that came back and were not computed again.")
    swapped_bytes: int = _shown("blockzoo:swapped_bytes", "Bytes of K and V that were copied to host memory.")
    # Deadlines (`slo_ms`, `ttft_slo_ms`), and running sequences that gave way to urgent ones (QL-09).
    slo_met: int = _shown("blockzoo:slo_met", "Sequences of requests with slo_ms or ttft_slo_ms that were in time.")
    slo_missed: int = _shown(
        "blockzoo:slo_missed", "Sequences of requests with slo_ms or ttft_slo_ms that were late, or failed."
    )
    evictions: int = _shown("blockzoo:evictions", "Running sequences that gave way to urgent ones.")
    backfilled: int = _shown("blockzoo:backfilled", "Sequences that ran before one that lacked pages.")
    # Planned orders of groups (QL-17, QL-18).
    violations_foreseen: int = _shown(
        "blockzoo:violations_foreseen", "Times that late requests were foreseen and a plan was asked for."
    )
    plans_used: int = _shown("blockzoo:plans_used", "Plans that were followed.")
    plans_rejected: int = _shown("blockzoo:plans_rejected", "Plans that came too late to be better.")
    plans_failed: int = _shown("blockzoo:plans_failed", "Plans that were not found.")
    plan_ns: int = _shown("blockzoo:plan_seconds", "Time that solving plans took, beside the scheduler.", per=1e9)
    # Stages loaded because requests needed them, and unloaded to make room (QL-13).
    stage_loads: int = _shown("blockzoo:stage_loads", "Stages loaded because requests needed them.")
    stage_unloads: int = _shown("blockzoo:stage_unloads", "Stages unloaded to make room for others.")
    loaded_bytes: int = _shown("blockzoo:loaded_bytes", "Bytes of weights that these loads added.")
    load_ns: int = _shown("blockzoo:load_seconds", "Duration of these loads, from request to report.", per=1e9)
    shared: int = _shown("blockzoo:shared_sequences", "Sequences that started from cached pages.")
    shared_tokens: int = _shown("vllm:prefix_cache_hits", "Tokens that were found in cached pages.")
    # Prompts shared between chains (UN-15).
    shared_prompts: int = _shown(
        "blockzoo:shared_prompts", "Sequences that started from another model's pages of their common first layers."
    )
    shared_prompt_tokens: int = _shown(
        "blockzoo:shared_prompt_tokens", "Prompt tokens that skipped the first layers, with pages of another model."
    )
    saved_state_bytes: int = _shown("blockzoo:saved_state_bytes", "Bytes of hidden states of prompts that were saved.")
    dropped_state_bytes: int = _shown("blockzoo:dropped_state_bytes", "Bytes of saved hidden states that were dropped.")
    prefix_queries: int = _shown("vllm:prefix_cache_queries", "Tokens for which cached pages were looked up.")

    def count_objective(self, met: bool) -> None:
        """Count a sequence that was in time for what it had to be, or was not."""
        if met:
            self.slo_met += 1
        else:
            self.slo_missed += 1

    def shown(self) -> Iterator[tuple[str, str, float]]:
        """Yield (metric name, documentation, value in the metric's unit) for each counter that is a metric."""
        for each in fields(self):
            if each.metadata:
                value: int = getattr(self, each.name)
                yield each.metadata["metric"], each.metadata["documentation"], value / each.metadata["per"]


@dataclass(frozen=True, slots=True)
class AgentState:
    """Hold the state of one device. `running` and `waiting` count sequences."""

    running: int
    waiting: int
    pages: PageCounts
    models: tuple[ModelLoad, ...]
    instances: tuple[BlockLoad, ...]
    counters: AgentCounters


def model_loads(specs: Iterable[ModelSpec], running: Iterable[str], waiting: Iterable[str]) -> tuple[ModelLoad, ...]:
    """Count sequences by model; `running` and `waiting` hold the model name of each sequence."""
    runs, waits = Counter(running), Counter(waiting)
    return tuple(ModelLoad(spec.name, runs[spec.name], waits[spec.name]) for spec in specs)


def block_loads(specs: Iterable[ModelSpec], models: Iterable[ModelLoad], batch_limit: int) -> tuple[BlockLoad, ...]:
    """Sum the loads of models by block, in the order in which the chains list the blocks first."""
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
    """Count up the totals of `AgentCounters`."""

    finished: Counter[FinishReason] = field(default_factory=Counter)

    def step(self, plan: StepPlan, result: StepResult) -> None:
        """Count a step that succeeded. A plan without rows only released sequences and is not counted as a step."""
        self.steps += 1 if plan.rows else 0
        self.segments += len(result.segments)
        self.busy += result.busy
        self.idle_tokens += result.idle

    def snapshot(self) -> AgentCounters:
        """Return a copy that does not change."""
        values = {each.name: getattr(self, each.name) for each in fields(AgentCounters)}
        return AgentCounters(**values | {"finished": dict(self.finished)})
