"""Turn a parsed body into sequences: prompts into token ids, fields into sampling parameters.

Every bound that depends on the model is checked here. A request is `prompts x n` sequences, numbered choice by choice
within a prompt, as in OpenAI. Nothing is sent from here. The time of tokenizing grows with the prompt: call this on a
worker thread, never on an event loop.

Defaults:
- `max_tokens`: 16 for completions (OpenAI), the rest of the context for chat.
- Sampling values: the model's own (`served_models.defaults_from`).
- `seed`: a random one for every sequence, unless the receipt has one. With a given seed, choice k uses seed + k.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from blake3 import blake3

from runtime.frontend.apis.embeddings import EmbeddingBody
from runtime.frontend.errors import RequestError, in_other_fields, too_long
from runtime.frontend.schemas import ChatBody, ChatShapedBody, CompletionBody, Prompts, ServedBody
from runtime.frontend.served_models import ServedModel
from runtime.frontend.structured import answer_grammar
from runtime.frontend.tools.use import ToolUse, template_message, tool_use
from runtime.grammars.checking import GrammarChecker
from runtime.types import SamplingParams, SequenceRequest

COMPLETION_TOKENS = 16
_SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one request.

    Fields:
        max_choices: Choices per prompt (`n`).
        max_sequences: Sequences in total.
        grammars: What checks the grammars of answers; None: no answer may have one.
    """

    max_choices: int = 64
    max_sequences: int = 4096
    grammars: GrammarChecker | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """Identity and arrival of a request.

    Fields:
        id: The response's id.
        created: Unix seconds.
        arrival: Nanoseconds of the driver's clock.
        seed: Seeds of the sequences are derived from it where the body has none, so that the same body becomes the same
            sequences again; None: they are drawn.
        begun_on: Full name of the model that the request was accepted for, if that was before.
        principal: Owner of what is kept for the client (`zoo.keys.principal_of`); "" where the server has no key.
        salt: Namespace of the client's cached prefixes; "" for that of all clients.
        priority: The most urgent priority that it may have, and that of a body without one; None: any, and 0.
    """

    id: str
    created: int = 0
    arrival: int = 0
    seed: int | None = None
    begun_on: str = ""
    principal: str = ""
    salt: str = ""
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids, and its text if it was given as text."""

    tokens: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A request ready to run.

    Fields:
        sequences: `sequences[i]` is choice i and continues `prompts[i // n]`.
        stops: Stop strings.
        usage_chunk: Whether a stream ends with a chunk of token counts.
        echo: Whether the answer begins with the prompt.
        logprobs: Alternatives per token; None for no log-probabilities at all.
        accepts: Whether a whole answer is one of the grammar; None without a grammar.
        tools: The tools that its answers may call.
        asked: The body in the shape that it came in, where that is neither a chat's nor a completion's.
    """

    receipt: Receipt
    chat: bool
    model: ServedModel
    prompts: tuple[Prompt, ...]
    sequences: tuple[SequenceRequest, ...]
    stops: tuple[str, ...] = ()
    stream: bool = False
    usage_chunk: bool = False
    echo: bool = False
    logprobs: int | None = None
    return_token_ids: bool = False
    accepts: Callable[[str], bool] | None = None
    tools: ToolUse | None = None
    asked: ServedBody | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)

    def cached_tokens(self, by_choice: Sequence[int]) -> int:
        """Return how many of the prompt tokens were not computed at all, from how many each choice did not need.

        Choices of one prompt may have it from each other: it counts as computed if it was for one of them.
        """
        each = len(self.sequences) // len(self.prompts)
        return sum(min(by_choice[at : at + each]) for at in range(0, len(self.sequences), each))

    def prompt_of(self, choice: int) -> Prompt:
        return self.prompts[choice * len(self.prompts) // len(self.sequences)]


def assemble_completion(body: CompletionBody, model: ServedModel, receipt: Receipt, limits: Limits) -> Generation:
    """Return the sequences of a completion request. Raises RequestError 400."""
    prompts = _prompts(body.prompt, model)
    grammar = answer_grammar(body, model, limits.grammars)
    sampling = tuple(_completion_sampling(body, model, len(prompt.tokens), grammar) for prompt in prompts)
    return Generation(
        receipt=receipt,
        chat=False,
        model=model,
        prompts=prompts,
        sequences=_sequences(body, model, receipt, prompts, sampling, limits, body.n or 1, body.seed),
        stops=body.stops,
        stream=bool(body.stream),
        usage_chunk=body.usage_chunk,
        echo=bool(body.echo),
        logprobs=body.logprobs,
        return_token_ids=bool(body.return_token_ids),
        accepts=_accepting(grammar, limits),
    )


def _accepting(grammar: str, limits: Limits) -> Callable[[str], bool] | None:
    return partial(limits.grammars.accepts, grammar) if grammar and limits.grammars is not None else None


def assemble_chat(body: ChatBody, model: ServedModel, receipt: Receipt, limits: Limits) -> Generation:
    """Return the sequences of a chat request. Raises RequestError 400."""
    logprobs = _chat_logprobs(body)
    prompt, tools = chat_prompt(body, model, limits)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if wanted == 0:
        raise RequestError("max_tokens must be at least 1", param="max_tokens")
    room = _room(wanted, len(prompt.tokens), model.spec.max_model_len, model.spec.max_model_len, "messages")
    answer = answer_grammar(body, model, limits.grammars)
    grammar = answer or (tools.grammar if tools is not None else "")
    sampling = _sampling(body, model, room, logprobs, None, grammar)
    return Generation(
        receipt=receipt,
        chat=True,
        model=model,
        prompts=(prompt,),
        sequences=_sequences(body, model, receipt, (prompt,), (sampling,), limits, body.n or 1, body.seed),
        stops=body.stops,
        stream=bool(body.stream),
        usage_chunk=body.usage_chunk,
        logprobs=logprobs,
        return_token_ids=bool(body.return_token_ids),
        accepts=_accepting(answer, limits),
        tools=tools,
    )


def assemble_embedding(body: EmbeddingBody, model: ServedModel, receipt: Receipt, limits: Limits) -> Generation:
    """Return the sequences of an embedding request, one per text, which have no answers. Raises RequestError 400."""
    with fields_of({"prompt": "input"}):
        prompts = _prompts(body.input, model)
        for prompt in prompts:
            _room(0, len(prompt.tokens), model.spec.max_model_len, 0, "input")
        sampling = SamplingParams(max_tokens=0, pooling=body.pooling or "mean")
        return Generation(
            receipt=receipt,
            chat=False,
            model=model,
            prompts=prompts,
            sequences=_sequences(body, model, receipt, prompts, [sampling] * len(prompts), limits),
            asked=body,
        )


def assemble_asked(body: ChatShapedBody, model: ServedModel, receipt: Receipt, limits: Limits) -> Generation:
    """Return the sequences of the chat that a body stands for. Raises RequestError 400, in the body's own fields."""
    with fields_of(body.chat_fields):
        return replace(assemble_chat(body.chat(), model, receipt, limits), asked=body)


@contextmanager
def fields_of(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name a body's own fields, by the fields of the body that it stands for."""
    try:
        yield
    except RequestError as error:
        raise in_other_fields(error, names) from None


def chat_prompt(body: ChatBody, model: ServedModel, limits: Limits) -> tuple[Prompt, ToolUse | None]:
    """Return the prompt of a conversation, and the tools that answers may call. Raises RequestError 400, 429."""
    tools = tool_use(body, model, limits.grammars)
    shown = None if tools is None else tools.shown
    tokens = model.tokenizer.encode_chat([template_message(message) for message in body.messages], shown)
    return Prompt(known_tokens(tokens, model, "messages")), tools


def _prompts(prompt: Prompts, model: ServedModel) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (_from_text(prompt, model),)
    if not prompt:
        raise RequestError("prompt is empty", param="prompt")
    if isinstance(prompt[0], int):
        return (Prompt(known_tokens(prompt, model, "prompt")),)
    return tuple(
        _from_text(p, model) if isinstance(p, str) else Prompt(known_tokens(p, model, "prompt")) for p in prompt
    )


def _from_text(text: str, model: ServedModel) -> Prompt:
    return Prompt(known_tokens(model.tokenizer.encode(text), model, "prompt"), text)


def known_tokens(tokens: Sequence[int], model: ServedModel, param: str) -> tuple[int, ...]:
    """Return the ids as a tuple. Raises RequestError if there are none or one is outside the vocabulary."""
    if not tokens:
        raise RequestError(
            f"{param}: nothing to start from: the prompt has no tokens and the tokenizer adds none", param=param
        )
    highest = max(tokens)
    if highest >= model.spec.vocab_size:
        raise RequestError(
            f"{param}: token id {highest} is not in the model's vocabulary of {model.spec.vocab_size}", param=param
        )
    return tuple(tokens)


def _room(wanted: int | None, prompt: int, limit: int, default: int, param: str) -> int:
    """Return the token limit of the answer.

    `default` applies if none was requested, cut to what the context leaves. A requested number must fit. Raises
    RequestError 400.
    """
    left = limit - prompt
    if wanted is None:
        if left < 1:
            raise too_long(prompt, 1, limit, param)
        return min(default, left)
    if wanted > left:
        raise too_long(prompt, wanted, limit, param)
    return wanted


def _completion_sampling(body: CompletionBody, model: ServedModel, prompt: int, grammar: str) -> SamplingParams:
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens must be at least 1 (0 only with echo)", param="max_tokens")
    room = _room(body.max_tokens, prompt, model.spec.max_model_len, COMPLETION_TOKENS, "prompt")
    return _sampling(body, model, room, body.logprobs, body.logprobs if body.echo else None, grammar)


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _sampling(
    body: CompletionBody | ChatBody,
    model: ServedModel,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: str,
) -> SamplingParams:
    defaults = model.defaults
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestError(f"min_tokens ({min_tokens}) is more than max_tokens ({max_tokens})", param="min_tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_either(body.temperature, defaults.temperature),
        top_k=max(0, int(_either(body.top_k, defaults.top_k))),
        top_p=_either(body.top_p, defaults.top_p),
        min_p=_either(body.min_p, defaults.min_p),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_either(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=_biases(body.logit_bias or {}, model.spec.vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        min_tokens=min_tokens,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        grammar=grammar,
    )


def _either(given: float | None, default: float) -> float:
    return default if given is None else given


def _biases(given: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Return OpenAI's map of token id (a JSON string) to bias as pairs sorted by id."""
    biases = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
            raise RequestError(f"logit_bias: {key[:40]!r} is no token id of this model", param="logit_bias")
        biases[int(key)] = bias
    return tuple(sorted(biases.items()))


def _sequences(
    body: ServedBody,
    model: ServedModel,
    receipt: Receipt,
    prompts: Sequence[Prompt],
    sampling: Sequence[SamplingParams],
    limits: Limits,
    n: int = 1,
    seed: int | None = None,
) -> tuple[SequenceRequest, ...]:
    if body.slo_ms is not None and body.ttft_slo_ms is not None:
        raise RequestError("a request has slo_ms or ttft_slo_ms, not both", param="ttft_slo_ms")
    if n > limits.max_choices:
        raise RequestError(f"n is {n}; at most {limits.max_choices} choices are served", param="n")
    if n * len(prompts) > limits.max_sequences:
        raise RequestError(
            f"{n * len(prompts)} sequences in one request; at most {limits.max_sequences} are served", param="prompt"
        )
    return tuple(
        SequenceRequest(
            seq=f"{receipt.id}/{index * n + choice}",
            request=receipt.id,
            model=model.name,
            prompt=prompt.tokens,
            sampling=_seeded(params, seed, choice, receipt.seed, index * n + choice),
            priority=_priority(body.priority, receipt.priority),
            slo_ms=body.slo_ms,
            adaptive=bool(body.adaptive),
            arrival=receipt.arrival,
            tenant=_tenant(body.cache_salt, receipt.salt),
            ttft_slo_ms=body.ttft_slo_ms,
        )
        for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
        for choice in range(n)
    )


def _priority(asked: int | None, least: int | None) -> int:
    """Return a request's priority: lower is more urgent."""
    if least is None:
        return asked or 0
    return least if asked is None else max(asked, least)


def _tenant(salt: str | None, client: str) -> str:
    """Return the prefix-cache namespace of a request, a digest of its `cache_salt` and of its client's namespace.

    Cached prefixes are shared within one namespace only, so that the time to first token does not reveal other clients'
    prompts (CVE-2025-46570). It is a digest because the salt may be a secret and must not travel further.
    """
    if salt is None and not client:
        return ""
    given = "" if salt is None else salt
    mixed = f"{client}\0{given}" if client else given
    return blake3(mixed.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _seeded(params: SamplingParams, given: int | None, choice: int, derived: int | None, index: int) -> SamplingParams:
    """Return the parameters with a sequence's seed: from the body's (`given`), the receipt's (`derived`), or drawn."""
    if given is not None:
        seed = given + choice
    else:
        seed = secrets.randbelow(_SEEDS) if derived is None else derived + index
    return replace(params, seed=seed % _SEEDS)
