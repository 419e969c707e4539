"""Run one prepared request: token events of the driver in, text pieces out, with metrics recorded on the way.

Each step is processed once for all choices that received a token. A choice ended by a stop string is aborted in the
driver at once. Unfinished sequences are aborted when the consumer stops, so that their pages are released. Nothing here
depends on HTTP.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

from runtime.control.overload import retry_after
from runtime.frontend.apis.embeddings import EmbeddingBody
from runtime.frontend.assemble import (
    Generation,
    Limits,
    Receipt,
    assemble_asked,
    assemble_chat,
    assemble_completion,
    assemble_embedding,
)
from runtime.frontend.choice import GRAMMAR_LIMITS, AnswerChoice, TextPiece
from runtime.frontend.errors import RequestError, overloaded, unavailable
from runtime.frontend.schemas import ChatBody, ChatShapedBody, CompletionBody, ServedBody, parse
from runtime.frontend.served_models import NotServedYet
from runtime.server.context import Service
from runtime.server.metrics import ModelMetrics
from runtime.server.model_choice import check_model, model_for
from runtime.server.model_loading import ensure_served
from runtime.types import TokenEvent

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A parsed and tokenized request, and the text state of each of its choices."""

    generation: Generation
    choices: tuple[AnswerChoice, ...]


def limits_of(service: Service) -> Limits:
    """Return the bounds on one request of this server."""
    return Limits(service.config.max_choices, service.config.max_queued, service.grammars)


def prepare(service: Service, kind: type[ServedBody], raw: bytes, receipt: Receipt) -> Prepared:
    """Parse, tokenize and check a body. Runs on a worker thread. Raises RequestError."""
    body = parse(kind, raw)
    key = service.key_of(receipt.principal)
    if key is not None:
        if not receipt.begun_on:  # else it was accepted
            check_model(service, body.model, key)
        receipt = replace(receipt, salt=key.principal, priority=key.priority)
    limits, model = limits_of(service), model_for(service, body, receipt.begun_on)
    if isinstance(body, CompletionBody):
        generation = assemble_completion(body, model, receipt, limits)
    elif isinstance(body, ChatBody):
        generation = assemble_chat(body, model, receipt, limits)
    elif isinstance(body, EmbeddingBody):
        generation = assemble_embedding(body, model, receipt, limits)
    elif isinstance(body, ChatShapedBody):
        generation = assemble_asked(body, model, receipt, limits)
    else:
        raise TypeError(kind.__name__)
    return Prepared(generation, tuple(AnswerChoice(generation, index) for index in range(len(generation.sequences))))


async def prepare_served(service: Service, kind: type[ServedBody], raw: bytes, receipt: Receipt) -> Prepared:
    """Prepare a body as `when_served` does. Raises as both."""
    return await when_served(service, partial(prepare, service, kind, raw, receipt))


async def when_served(service: Service, work: Callable[[], T]) -> T:
    """Do work on a worker thread; serve the model that it names first if that waits for a request. Raises as both."""
    while True:
        try:
            return await service.in_worker(work)
        except NotServedYet as unserved:
            await ensure_served(service, unserved.model.name)


class Meter:
    """Record one request's latencies (seconds of the monotonic clock) and token counts.

    Args:
        resumed: The request began on a server that is gone: it has no latencies.
    """

    def __init__(self, metrics: ModelMetrics, prepared: Prepared, resumed: bool = False) -> None:
        self._metrics = metrics
        self._prompt_tokens = prepared.generation.prompt_tokens
        self._began = prepared.generation.receipt.arrival / 1e9
        self._choices = prepared.choices
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._resumed, self._counted = resumed, False
        metrics.request_prompt.observe(self._prompt_tokens)
        if prepared.generation.model.alias and not resumed:
            metrics.count_alias(prepared.generation.model.alias)

    def step(self, pieces: Iterable[TextPiece]) -> None:
        now = time.monotonic()
        for piece in pieces:
            if piece.tokens:
                self._tokens(piece, now)
            if piece.finish is not None:
                self._end(piece, now)

    def abort_unfinished(self) -> None:
        """Count unfinished choices as aborted. Called when the consumer has stopped."""
        for choice in self._choices:
            if choice.finish is None:
                self._metrics.finish("abort")

    def _tokens(self, piece: TextPiece, now: float) -> None:
        if self._resumed:
            self._metrics.steps.tokens += len(piece.tokens)
            return
        self._count_prompt()
        if piece.choice not in self._first:
            self._first[piece.choice] = now
            self._metrics.first_token.observe(now - self._began)
        else:
            self._metrics.steps.between((now - self._last[piece.choice]) / len(piece.tokens))
        self._last[piece.choice] = now
        self._metrics.steps.tokens += len(piece.tokens)

    def _count_prompt(self) -> None:
        if not self._counted:
            self._metrics.prompt_tokens.inc(self._prompt_tokens)
            self._counted = True

    def _end(self, piece: TextPiece, now: float) -> None:
        generated = self._choices[piece.choice].tokens
        self._metrics.finish(piece.finish or "error")
        if self._resumed:
            return
        if piece.finish == "length":  # maybe without a token
            self._count_prompt()
        self._metrics.whole.observe(now - self._began)
        self._metrics.request_generated.observe(generated)
        if generated > 1:
            self._metrics.per_token.observe((now - self._first[piece.choice]) / (generated - 1))


async def run(service: Service, prepared: Prepared) -> AsyncGenerator[list[TextPiece], None]:
    """Yield the pieces of each step until every choice has ended. Close the generator (`aclosing`) to abort.

    Raises zoo.errors.Unavailable at the start; RequestError 500 or 503 when a sequence fails.
    """
    generation = prepared.generation
    choices = {choice.seq: choice for choice in prepared.choices}
    meter = Meter(service.metrics.get_model(generation.model.name), prepared)
    left = len(prepared.choices)
    # Formatting a long echoed prompt with log-probabilities token by token would block the event loop.
    heavy = generation.echo and generation.logprobs is not None
    async with aclosing(service.driver.open_stream(generation.sequences)) as stream:
        try:
            async for events in stream:
                if heavy:
                    pieces = await service.in_worker(partial(advance, choices, events))
                else:
                    pieces = advance(choices, events)
                meter.step(pieces)
                if ended := [piece for piece in pieces if piece.finish is not None]:
                    if cut := [prepared.choices[piece.choice].seq for piece in ended if piece.cut]:
                        service.driver.abort(cut)
                    _raise_failure(service, ended)
                    left -= len(ended)
                yield pieces
                if not left:
                    return
        finally:
            meter.abort_unfinished()
            charge(service, prepared)


def charge(service: Service, prepared: Prepared) -> None:
    """Record what a request has used, once it is over, for its client's key: of the model that it asked for."""
    if service.keys is not None:
        used = used_tokens(prepared)
        service.keys.charge(prepared.generation.receipt.principal, *used)


class UsedTokens(NamedTuple):
    """What a request has used, as far as it has come: the model that it asked for, and tokens."""

    model: str
    prompt: int
    generated: int
    cached: int


def used_tokens(prepared: Prepared) -> UsedTokens:
    """Return what a request has used, the prompt once there is anything of an answer."""
    generation, generated = prepared.generation, sum(choice.tokens for choice in prepared.choices)
    answered = generated > 0 or any(choice.finish is not None for choice in prepared.choices)
    prompt_tokens = generation.prompt_tokens if answered else 0
    model = generation.model.asked or generation.model.name
    return UsedTokens(model, prompt_tokens, generated, min(cached_tokens(prepared), prompt_tokens))


def cached_tokens(prepared: Prepared) -> int:
    """Return how many tokens of a request's prompts were not computed, as far as it has come."""
    return prepared.generation.cached_tokens([choice.cached for choice in prepared.choices])


def advance(choices: dict[str, AnswerChoice], events: Sequence[TokenEvent]) -> list[TextPiece]:
    """Return the pieces that one step's events add, one per choice. Choices that have ended get none."""
    if len(events) == 1:  # the usual case: one token for the only choice of a request
        one = choices[events[0].seq]
        return [one.add_events(events)] if one.finish is None else []
    by_seq: dict[str, list[TokenEvent]] = {}
    for event in events:
        by_seq.setdefault(event.seq, []).append(event)
    return [choices[seq].add_events(its) for seq, its in by_seq.items() if choices[seq].finish is None]


def _raise_failure(service: Service, pieces: Iterable[TextPiece]) -> None:
    for piece in pieces:
        if piece.finish in ("error", "abort"):
            raise failure(service, piece.error)


def failure(service: Service, error: str | None) -> RequestError:
    """Return the error of a sequence that ended with `error`."""
    message = error or "the sequence was aborted"
    seconds = retry_after(message)
    if seconds is not None:
        return overloaded(message, seconds)
    if message == GRAMMAR_LIMITS:
        return RequestError(message, code="grammar_limits")
    return RequestError(message, status=500, kind="server_error") if service.driver.alive else unavailable(message)
