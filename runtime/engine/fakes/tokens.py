"""Tokens of the integer engine: end tokens, allowed tokens, and alternatives; without tensors."""

from __future__ import annotations

from runtime.types import Logprob, ModelSpec, SamplingParams


def ends_of(spec: ModelSpec, sampling: SamplingParams) -> frozenset[int]:
    """Return the tokens that end a sequence."""
    return frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else spec.eos_token_ids))


def allowed(spec: ModelSpec, sampling: SamplingParams, produced: int, token: int) -> int:
    """Return the token, or the next allowed one if it would end the sequence before `min_tokens`."""
    ends = ends_of(spec, sampling) if produced + 1 < sampling.min_tokens else frozenset()
    for offset in range(spec.vocab_size):
        if (token + offset) % spec.vocab_size not in ends:
            return (token + offset) % spec.vocab_size
    return token  # every token is an end token


def alternatives(spec: ModelSpec, token: int, count: int) -> tuple[Logprob, ...]:
    """Return the first `count` alternatives to a token, itself included."""
    return tuple(Logprob((token + k) % spec.vocab_size, -1.0 - k) for k in range(count))
