"""Check requests that no step could ever serve, so that they are refused before they run.

Frontends check most of this first, to use their own error formats. It is checked again here so that no request,
whichever way it arrived, can fail a step that other requests share.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.types import ModelSpec, SequenceRequest


def refusal(request: SequenceRequest, spec: ModelSpec) -> str | None:
    """Return why a model cannot serve a request, as one sentence, or None if it can. O(prompt).

    The spec's context is already capped to the device. An accepted request is sure to finish once it runs.
    """
    sampling = request.sampling
    if not request.prompt:
        return "the prompt is empty"
    if sampling.max_tokens < 0 or sampling.min_tokens < 0:
        return "max_tokens and min_tokens must not be negative"
    if sampling.min_tokens > sampling.max_tokens:
        return f"min_tokens ({sampling.min_tokens}) exceeds max_tokens ({sampling.max_tokens})"
    if sampling.pooling is not None and sampling.max_tokens:
        return "what is pooled has no answer: max_tokens must be 0"
    if request.output and (why := _ended(request, spec)):
        return why
    length = len(request.prompt) + len(request.output) + min(sampling.max_tokens, 1)
    if length > spec.max_model_len:
        return (
            f"the prompt of {length - min(sampling.max_tokens, 1)} tokens leaves no room for an answer: {spec.name} "
            f"takes {spec.max_model_len} tokens in all"
        )
    if not _within(request.prompt, spec.vocab_size):
        return f"prompt token ids must lie in [0, {spec.vocab_size})"
    if not _within(request.output, spec.vocab_size):
        return f"token ids produced before must lie in [0, {spec.vocab_size})"
    if not _within(sampling.stop_token_ids, spec.vocab_size):
        return f"stop_token_ids must lie in [0, {spec.vocab_size})"
    if not _within((token for token, _ in sampling.logit_bias), spec.vocab_size):
        return f"token ids in logit_bias must lie in [0, {spec.vocab_size})"
    return None


def _ended(request: SequenceRequest, spec: ModelSpec) -> str | None:
    sampling, made = request.sampling, len(request.output)
    if made >= sampling.max_tokens:
        return f"{made} tokens were produced before, and max_tokens is {sampling.max_tokens}"
    ends = sampling.stop_token_ids + (() if sampling.ignore_eos else spec.eos_token_ids)
    if made >= sampling.min_tokens and request.output[-1] in ends:
        return f"the output of {made} tokens has ended: token {request.output[-1]} is its last one"
    return None


def _within(tokens: Iterable[int], vocab_size: int) -> bool:
    known = tuple(tokens)
    return not known or (min(known) >= 0 and max(known) < vocab_size)
