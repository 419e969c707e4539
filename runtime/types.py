"""Define the data types of serving: requests, step plans, step results, events.

    frontend --SequenceRequest--> agent --StepPlan--> engine --StepResult--> agent --TokenEvent--> frontend

Token ids are ints; times are integer nanoseconds of the driver's clock; sizes are bytes. Types that are created for
every token are msgspec Structs, which cost a tenth of a frozen dataclass to create; the rest are dataclasses. This file
imports only msgspec and the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
#: Which hidden states of a prompt make its embedding: the mean of all, or that of its last token.
Pooling = Literal["mean", "last"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Hold the sampling parameters of one sequence. Temperature 0 is greedy; all other defaults switch a feature off.

    Fields:
        seed: A sequence's tokens depend only on its model, its prompt and these parameters. The frontend draws a seed
            where the request has none, so that a preempted sequence continues with the same tokens.
        grammar: Grammar that the answer is constrained to (`runtime.grammars.sources`); empty for none.
        logprobs, prompt_logprobs: Number of alternatives reported beside each token; None reports no log-probabilities.
        pooling: Report the prompt's final hidden states, pooled (`PromptLogprobs.states`), with `max_tokens` 0.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    grammar: str = ""
    pooling: Pooling | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def reads_prompt(self) -> bool:
        """Whether every token of the prompt has to run, cached or not."""
        return self.prompt_logprobs is not None or self.pooling == "mean"


#: Priority from which on a sequence is background work: a line of a batch. Requests of clients have lower ones.
BACKGROUND = 1 << 31


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """Describe one sequence to generate. A request with `n` choices is `n` sequences with the same `request`.

    Fields:
        priority: Lower runs first, as in vLLM; equal priorities run in order of `arrival`.
        slo_ms, ttft_slo_ms: Time from the arrival in which its whole answer, or its first token, is to be there; at
            most one of the two.
        adaptive: Whether another chain may serve the request (BL-28).
        tenant: Isolation key; sequences of different tenants share no pages.
        output: Tokens that it produced before, on a server that is gone. It goes on as after a preemption: they run as
            prompt, and count as output (limits, penalties, draws, indexes of its events). `model` produced them, so
            `adaptive` has no effect.
    """

    seq: str
    request: str
    model: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    slo_ms: int | None = None
    adaptive: bool = False
    arrival: int = 0
    tenant: str = ""
    output: tuple[int, ...] = ()
    ttft_slo_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Describe a loaded model, or a stage of one, to the scheduler and agents.

    Fields:
        kv_layers: Attention layers: the number of pages that one page set takes.
        page_tokens: Tokens per page, K and V of one layer. All pages of a device have the same size in bytes.
        max_model_len: Most tokens of prompt and output together, without virtual tokens.
        blocks: Digests of the chain's blocks, in order.
        domain: Digest of the KV domain (UN-15).
        virtual_tokens: Positions before every prompt that hold no prompt token (prompt and prefix tuning). They take
            pages and positions like tokens, but do not appear in prompts, usage or log-probabilities.
        windowed: Whether a layer attends to the latest tokens only.
    """

    name: str
    kv_layers: int
    page_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    blocks: tuple[str, ...] = ()
    domain: str = ""
    kind: str = "foundation"
    base: str | None = None
    virtual_tokens: int = 0
    windowed: bool = False


class Row(msgspec.Struct, frozen=True, gc=False):
    """Describe one sequence's part of a step: run `tokens` at positions `start, start + 1, …`.

    Positions count from the model's first virtual token; `tokens` holds an unused 0 for each virtual position.

    Fields:
        new_pages: Page sets that are new to the engine, each of `kv_layers` page ids in layer order, or empty where
            another device has it (`StepPlan.place_changes`); they are appended to
            the sequence's page table.
        sample: Sample a token from the last position's logits; false inside a chunked prompt.
        generated: Tokens produced so far, used as the counter of the random draw.
        awaits: The row's only token is the one that the sequence's row in the previous, still running step samples.
            `tokens` holds an unused 0 for it; `generated` counts it.
        enters: Component of the stage, counted from its first one, at which the row enters with hidden states; 0: it
            runs the whole stage.
        saves: Components of the stage, in order, of which the input hidden states are returned (`StageResult.saved`).
        probed: Forecast the answer's length from the hidden state of its last token, if the stage has the model's
            probe, and one for the answer's own tokens if that is one.
        layers: Attention layers of the stage, from its first one on, that the row passes; 0: it runs the whole stage.
            Such a row does not sample, and its hidden states are of no use.
    """

    seq: str
    model: str
    tokens: tuple[int, ...]
    start: int
    new_pages: tuple[tuple[int, ...], ...] = ()
    sample: bool = True
    generated: int = 0
    awaits: bool = False
    enters: int = 0
    saves: tuple[int, ...] = ()
    probed: bool = False
    layers: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """Introduce a sequence to the engine before its first row; after a preemption it is introduced again.

    Fields:
        output: Tokens it produced before (empty the first time). They count for penalties and are run as prompt.
    """

    request: SequenceRequest
    output: tuple[int, ...] = ()


#: Layers [first, last): all of a table, however many it has.
ALL_LAYERS = (0, 1 << 30)
#: In a page set, the page of a layer that another device has.
AWAY = -1


class SentAway(msgspec.Struct, frozen=True, gc=False):
    """Tell the engine that the pages of tokens [first, last) of a sequence are another device's from now on (IL-04).

    Fields:
        seq: Key of the page table.
        loan: Its number at the creditor.
        layers: Layers [first, last) of which it has them, counted from the table's first one.
    """

    seq: str
    creditor: str
    loan: int
    first: int
    last: int
    layers: tuple[int, int] = ALL_LAYERS


class CameBack(msgspec.Struct, frozen=True, gc=False):
    """Tell the engine that tokens [first, last) of a sequence, page sets of a loan, are here again (IL-25).

    They are the last ones of the loan, unless its creditor is gone.

    Fields:
        seq: Key of the page table.
        groups: Page ids [page sets, layers of the loan].
        layers: These layers, as in `SentAway`.
    """

    seq: str
    loan: int
    first: int
    last: int
    groups: tuple[tuple[int, ...], ...]
    layers: tuple[int, int] = ALL_LAYERS


#: What a step has to learn of pages on other devices before it runs, in this order.
PlaceChange = SentAway | CameBack


@dataclass(frozen=True, slots=True)
class Copied:
    """Introduce a sequence that starts with a copy of the K and V of another's first `tokens` tokens.

    For engines that keep K and V by sequence instead of in pages.
    """

    opened: Opened
    source: str
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Plan one step of a device's engine: process `copied`, `released`, `place_changes`, `opened`, then run `rows`.

    `batch`: number of the persistent batch that the rows are, in the same order and one token on since the last step
    with that number; 0 for any other step.

    `defers`: the engine may defer rows of which it cannot choose a token yet (`StepResult.deferred`).

    The sequences of a failed step are in the next plan's `released` again, because the engine may have failed before or
    after it opened them; it ignores unknown ones. `rows` may be empty, when a model is about to be unloaded.
    """

    step: int
    rows: tuple[Row, ...]
    opened: tuple[Opened, ...] = ()
    released: tuple[str, ...] = ()
    copied: tuple[Copied, ...] = ()
    batch: int = 0
    place_changes: tuple[PlaceChange, ...] = ()
    defers: bool = False

    @property
    def tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Logprob:
    """Hold a token and the natural logarithm of its probability, before temperature and truncation."""

    token: int
    logprob: float


class Sampled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Hold the token sampled for one row; `logprob` and `top` are set only if its sequence requested them."""

    seq: str
    token: int
    logprob: float | None = None
    top: tuple[Logprob, ...] = ()


class LengthMasses(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Hold the probability of each bucket of an answer's length; `edges`: least length of each, from 0 on (TI-10)."""

    edges: tuple[int, ...]
    mass: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Hold log-probabilities of the prompt tokens with index `start, start + 1, …`; token 0 has none.

    Fields:
        states: Sum of the final hidden states of `positions` tokens of the prompt, as float32, where they are pooled.
    """

    seq: str
    start: int
    chosen: tuple[Logprob, ...]
    top: tuple[tuple[Logprob, ...], ...]
    positions: int = 0
    states: bytes = b""


@dataclass(frozen=True, slots=True)
class SegmentRun:
    """Record for the trace that a segment ran once in a step, and over how many tokens of which models."""

    components: tuple[str, ...]
    kind: str
    layers: tuple[int | None, ...]
    models: tuple[str, ...]
    seqs: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """Hold the result of one step.

    Fields:
        segments: Segments that ran; filled only while tracing is on.
        busy: Nanoseconds that the step took.
        deferred: Sequences of the plan that did not run, because the batch had no room, or a grammar is not ready.
            They have no results, and are planned again as they were. At least one row of a non-empty plan runs.
        idle: Padding tokens that were computed.
    """

    step: int
    sampled: tuple[Sampled, ...]
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    segments: tuple[SegmentRun, ...] = ()
    busy: int = 0
    deferred: tuple[str, ...] = ()
    idle: int = 0


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """Report one token of a sequence, or its end without a token (`token` is None: aborted, or failed with `error`).

    A sequence's tokens are reported once each, in order of `index`, their number in the output. Exactly one event has
    `finish` set, the last one. `served`: the model that ran, if a variant served the request (adaptive requests).
    `cached`: tokens of the prompt that were not computed since cached pages had them; the first event says it.
    """

    seq: str
    request: str
    index: int
    token: int | None
    logprob: float | None = None
    top: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None
    served: str | None = None
    cached: int = 0


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Count the bytes an engine holds.

    Fields:
        weights_unshared: What its models would take without sharing.
        host_kv, host_weights: Bytes of host memory with K and V of sequences that gave way, and with weights that wait.
    """

    weights: int
    weights_unshared: int
    kv_pool: int
    host_kv: int = 0
    host_weights: int = 0


class LoanLost(Exception):
    """Raised when K and V on another device cannot be attended to. Nothing else of the step has happened."""


class LoansMixed(LoanLost):
    """Raised when rows cannot be attended to together: the same step would fail again."""


class EngineLost(Exception):
    """Raised when the engine's state is lost or unreachable. No later step can succeed, so the driver stops."""


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Count a device's pages by state. `free + local + lent + reserved + in_flight == capacity` always holds."""

    capacity: int
    free: int
    local: int
    lent: int = 0
    reserved: int = 0
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Hold one record of the trace. Fields that are None are left out of the JSON line; `extra` is merged into it.

    Fields:
        t: Time in nanoseconds.
        inst: Block instance.
        n: Count of tokens or pages, depending on the event (`runtime.control.trace_events`).
        cause: Mechanism ID or reason.
    """

    t: int
    ev: str
    req: str | None = None
    seq: str | None = None
    inst: str | None = None
    dev: str | None = None
    block: str | None = None
    page: int | None = None
    n: int | None = None
    bytes: int | None = None
    cause: str | None = None
    span: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
