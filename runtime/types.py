"""The one vocabulary of serving: requests, steps, results, events. Frozen data that passes between the parts.

Who says what to whom:

    frontend --SequenceRequest--> agent --StepPlan--> engine --StepResult--> agent --TokenEvent--> frontend

Token ids are ints; times are integer nanoseconds of the driver's clock; byte counts are bytes.
What is made for every token is a msgspec Struct, an order of magnitude cheaper to make than a frozen dataclass; all
else are dataclasses. This file imports nothing beyond that and the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence's tokens are chosen. Zero temperature is greedy; the other defaults switch everything off.

    `logprobs` and `prompt_logprobs`: number of alternatives beside the token itself; None for none at all.
    `seed`: with a seed a sequence's tokens depend on nothing but its model, its prompt and these values;
    without one the frontend draws a seed, so that a preempted sequence still continues as it would have.
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

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence to decode. A request with `n` choices is `n` sequences that share `request`.

    `priority`: lower goes first, as in vLLM; equal ones go by `arrival`. `tenant`: on whose behalf; those of different
    ones share no pages.
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


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the control plane knows of a loaded model.

    `kv_layers`: pages that one page's worth of tokens takes (one per attention layer).
    `page_tokens`: tokens whose K and V of one layer fit a page; all pages of a device have the same bytes.
    `max_model_len`: prompt and answer together, in tokens, virtual tokens not counted.
    `virtual_tokens`: positions before every prompt that are no tokens of it (prompt and prefix tuning). They take pages
    and positions like tokens, but whoever asks never sees them: they are in no prompt, no usage and no
    log-probabilities.
    `blocks`: digests of its chain's blocks, in order. `domain`: its KV domain (UN-15), a digest.
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


class Row(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step: `tokens` run at positions `start, start + 1, …`.

    Positions count from the model's first virtual token; at positions below `ModelSpec.virtual_tokens` a row says 0,
    which nobody reads.

    `new_pages`: page groups opened for this step, each of `kv_layers` page ids (index = layer), appended to the
    sequence's table. `sample`: choose a token from the last position's logits; false inside a chunked prompt.
    `generated`: number of tokens already produced, which numbers the random draw.
    `awaits`: its one token is what the sequence's row in the step launched before samples, which whoever planned it did
    not know yet. The row says 0 there, which nobody reads; `generated` counts that token.
    """

    seq: str
    model: str
    tokens: tuple[int, ...]
    start: int
    new_pages: tuple[tuple[int, ...], ...] = ()
    sample: bool = True
    generated: int = 0
    awaits: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """A sequence that the engine must know before its first row. After a preemption it is opened again.

    `output`: tokens it had produced before (empty the first time); they count for penalties and are run as prompt.
    """

    request: SequenceRequest
    output: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Copied:
    """A sequence that begins with a copy of the K and V of another one's first `tokens` tokens, on engines that
    keep them by sequence.
    """

    opened: Opened
    source: str
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration over all running sequences of a device. Order: learn `copied`, drop `released`, learn `opened`,
    run `rows`.

    `batch`: the number of the persistent batch whose rows these are, in its order and each one token on since the
    last step with that number; 0 for any other step.

    After a failed step its sequences are in the next plan's `released` once more, whether or not the engine had got
    as far as learning them: unknown ones are ignored. `rows` may be empty, when a model is about to be unloaded.
    """

    step: int
    rows: tuple[Row, ...]
    opened: tuple[Opened, ...] = ()
    released: tuple[str, ...] = ()
    copied: tuple[Copied, ...] = ()
    batch: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token and the natural logarithm of its probability (before temperature and truncation)."""

    token: int
    logprob: float


class Sampled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The token chosen for one row; `logprob` and `top` only where its sequence asked for them."""

    seq: str
    token: int
    logprob: float | None = None
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens number `start, start + 1, …` of the prompt; number 0 has none and is never
    listed.
    """

    seq: str
    start: int
    chosen: tuple[Logprob, ...]
    top: tuple[tuple[Logprob, ...], ...]


@dataclass(frozen=True, slots=True)
class SegmentRun:
    """A segment that ran once in a step, for the trace: which components, over how many tokens of which models."""

    components: tuple[str, ...]
    kind: str
    layers: tuple[int | None, ...]
    models: tuple[str, ...]
    seqs: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an engine gives back. `busy`: nanoseconds it took. `segments` only when tracing is on.

    `deferred`: sequences of the plan that did not run, because the batch had no room for them; they stay as they are
    and are planned again. At least one row of a plan that has any runs. `idle`: tokens that were computed though nobody
    asked for them (padding).
    """

    step: int
    sampled: tuple[Sampled, ...]
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    segments: tuple[SegmentRun, ...] = ()
    busy: int = 0
    deferred: tuple[str, ...] = ()
    idle: int = 0


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """One token of one sequence, or its end without a token (`token` None: aborted, or failed with `error`).

    Each sequence gets its tokens once each, in order of `index`, and exactly one event with `finish` set, its last.
    `served`: the model that it ran on, where that stood in for the one it asked for (adaptive requests).
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


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes an engine holds. `weights_unshared`: what the same models would take without sharing, for comparison."""

    weights: int
    weights_unshared: int
    kv_pool: int


class EngineLost(Exception):
    """The device's state can no longer be trusted or reached: no later step can succeed, the driver stops."""


@dataclass(frozen=True, slots=True)
class PageCounts:
    """A device's pages by state. `free + local + lent + reserved + in_flight == capacity`, always."""

    capacity: int
    free: int
    local: int
    lent: int = 0
    reserved: int = 0
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One record of the trace. Absent fields are left out of the JSON line; `extra` is merged in."""

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
