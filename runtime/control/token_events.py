"""Build the events that end a sequence without a token. Pure functions."""

from __future__ import annotations

from runtime.control.sequence import LiveSequence
from runtime.types import FinishReason, SequenceRequest, TokenEvent


def end_event(
    live: LiveSequence, finish: FinishReason, error: str | None = None, served: str | None = None
) -> TokenEvent:
    """Return the event that ends a sequence without a token; its index is the number of tokens produced."""
    request, scores = live.request, tuple(live.prompt_logprobs)
    return TokenEvent(
        request.seq,
        request.request,
        len(live.output),
        None,
        prompt_logprobs=scores,
        finish=finish,
        error=error,
        served=served,
        cached=0 if live.output else live.cached,
    )


def refusal_event(request: SequenceRequest, why: str) -> TokenEvent:
    """Return the only event of a sequence that was refused; its index is the number of tokens produced before."""
    return TokenEvent(request.seq, request.request, len(request.output), None, finish="error", error=why)
