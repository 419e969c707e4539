"""Tokens of engines that count: those that end a sequence, those that may come, and alternatives to them. By hand,
without tensors.
"""

from __future__ import annotations

from runtime.types import Logprob, ModelSpec, SamplingParams


def ends_of(spec: ModelSpec, sampling: SamplingParams) -> frozenset[int]:
    """Tokens that end a sequence."""
    return frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else spec.eos_token_ids))


def allowed(spec: ModelSpec, sampling: SamplingParams, produced: int, token: int) -> int:
    """A token, or the next one that may come: `min_tokens` forbids those that would end the sequence."""
    ends = ends_of(spec, sampling) if produced + 1 < sampling.min_tokens else frozenset()
    for offset in range(spec.vocab_size):
        if (token + offset) % spec.vocab_size not in ends:
            return (token + offset) % spec.vocab_size
    return token  # every token is an end: there is nothing else to give


def alternatives(spec: ModelSpec, token: int, count: int) -> tuple[Logprob, ...]:
    """The first `count` alternatives to a token, itself among them."""
    return tuple(Logprob((token + k) % spec.vocab_size, -1.0 - k) for k in range(count))
