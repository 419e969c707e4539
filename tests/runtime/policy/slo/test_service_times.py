"""Learned service times: contexts by their tokens, answers by theirs, each model on its own."""

from __future__ import annotations

import pytest

from runtime.policy.slo.service_times import ServiceTimes

MS = 1_000_000


def played(
    times: ServiceTimes, model: str, context_ms: float, token_ms: float, count: int = 60, cell: str = ""
) -> None:
    """Let sequences of one model run one after another: a context of 10 to 100 tokens, then 20 tokens."""
    now = 0
    for number in range(count):
        tokens = 10 + number * 7 % 91
        times.start("s", tokens, now, cell)
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


def test_cells_have_their_own_times() -> None:
    """QL-22: prompts and tokens apart, since devices differ in computing and in reading weights."""
    times = ServiceTimes()
    played(times, "m", 1.0, 10.0, cell="fast")
    played(times, "m", 2.0, 40.0, count=30, cell="slow")
    played(times, "m", 1.0, 10.0, count=20, cell="fast")
    assert times.tokens("m", 1, "fast") == pytest.approx(10 * MS, rel=0.01)
    assert times.tokens("m", 1, "slow") == pytest.approx(40 * MS, rel=0.01)
    assert times.context("m", 50, "fast") == pytest.approx(52 * MS, rel=0.05)
    assert times.context("m", 50, "slow") == pytest.approx(102 * MS, rel=0.05)


def test_a_model_is_as_slow_in_a_cell_as_others_are_there() -> None:
    """Many models have run in one cell only; a slow model tells nothing of its cell."""
    times = ServiceTimes()
    for _ in range(8):
        played(times, "m", 1.0, 10.0, count=5, cell="fast")
        played(times, "m", 4.0, 40.0, count=5, cell="slow")
    played(times, "large", 10.0, 100.0, cell="fast")
    played(times, "small", 0.4, 4.0, cell="slow")
    assert times.tokens("large", 1, "slow") == pytest.approx(400 * MS, rel=0.2)
    assert times.context("large", 50, "slow") > 2 * times.context("large", 50, "fast")
    assert times.tokens("small", 1, "fast") == pytest.approx(1 * MS, rel=0.2)


def test_models_that_differ_tell_nothing_of_cells() -> None:
    times = ServiceTimes()
    played(times, "large", 10.0, 100.0, cell="one")
    played(times, "small", 1.0, 10.0, cell="other")
    assert times.tokens("large", 1, "other") == times.tokens("large", 1, "one")
    assert times.tokens("small", 1, "one") == times.tokens("small", 1, "other")


def test_cells_that_are_not_told_apart_have_one_time() -> None:
    times, single = ServiceTimes(by_cell=False), ServiceTimes()
    for each, cells in ((times, ("fast", "slow")), (single, ("", ""))):
        played(each, "m", 1.0, 10.0, count=5, cell=cells[0])
        played(each, "m", 4.0, 40.0, count=5, cell=cells[1])
    assert times.tokens("m", 1, "fast") == times.tokens("m", 1, "slow") == single.tokens("m", 1, "")
    assert times.context("m", 50, "fast") == times.context("m", 50, "slow") == single.context("m", 50, "")
