"""Learned service times: contexts by their tokens, answers by theirs, each model on its own."""

from __future__ import annotations

import pytest

from runtime.policy.slo.service_times import ServiceTimes

MS = 1_000_000


def played(times: ServiceTimes, model: str, context_ms: float, token_ms: float, count: int = 60) -> None:
    """Let sequences of one model run one after another: a context of 10 to 100 tokens, then 20 tokens."""
    now = 0
    for number in range(count):
        tokens = 10 + number * 7 % 91
        times.start("s", tokens, now)
        now += int((2 + tokens * context_ms) * MS)
        times.first_token("s", model, 1, now)
        now += int(20 * token_ms * MS)
        times.end("s", model, 21, now)


def test_contexts_and_tokens_are_told_apart() -> None:
    times = ServiceTimes()
    played(times, "m", 3.0, 11.0)
    assert times.context("m", 50) == pytest.approx(152 * MS, rel=0.05)
    assert times.tokens("m", 10) == pytest.approx(110 * MS, rel=0.01)


def test_models_have_their_own_and_new_ones_the_mean() -> None:
    times = ServiceTimes()
    played(times, "slow", 3.0, 40.0)
    played(times, "fast", 1.0, 5.0)
    assert times.tokens("slow", 1) == pytest.approx(40 * MS, rel=0.01)
    assert times.tokens("fast", 1) == pytest.approx(5 * MS, rel=0.01)
    assert 5 * MS < times.tokens("new", 1) < 40 * MS


def test_samples_of_running_sequences_count_at_once() -> None:
    times = ServiceTimes()
    times.start("s", 10, 0)
    times.first_token("s", "m", 1, 10 * MS)
    times.sample("s", "m", 101, 1010 * MS)
    assert times.tokens("m", 1) == pytest.approx(10 * MS, rel=0.01)


def test_a_time_without_tokens_counts_with_the_next_ones() -> None:
    """A stalled sequence is not seen as fast afterwards."""
    times = ServiceTimes()
    times.start("s", 10, 0)
    times.first_token("s", "m", 1, 0)
    times.sample("s", "m", 1, 500 * MS)
    times.sample("s", "m", 101, 1000 * MS)
    assert times.tokens("m", 1) == pytest.approx(10 * MS, rel=0.01)
