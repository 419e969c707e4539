"""The knee of measured rates: least size near the best, stable under noise, and refused without a proper grid."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulated.tetri_runs import PROMPT_TOKENS, Rig
from runtime.policy.prefill.knee import WITHIN, knee_of

RATES = st.lists(st.floats(1e-3, 1e9), min_size=3, max_size=9)


def test_the_least_size_within_the_loss_is_chosen():
    found = knee_of({64: 40.0, 128: 70.0, 256: 94.9, 512: 95.1, 1024: 100.0, 2048: 96.0})
    assert (found.tokens, found.saturated) == (512, True)
    assert knee_of({64: 40.0, 128: 70.0, 256: 94.9, 512: 95.1, 1024: 100.0}, within=0.1).tokens == 256


def test_a_rate_that_still_grows_is_not_saturated():
    assert not knee_of({64: 1.0, 128: 2.0, 256: 4.0}).saturated


@given(RATES)
def test_nothing_smaller_is_near_the_best(measured: list[float]):
    rates = {16 << at: rate for at, rate in enumerate(measured)}
    found = knee_of(rates)
    least = (1 - WITHIN) * max(rates.values())
    assert rates[found.tokens] >= least
    assert all(rate < least for size, rate in rates.items() if size < found.tokens)
    assert found.saturated == (found.tokens != max(rates))


@pytest.mark.parametrize("kind", ["V100-tetri", "2xV100-tetri"])
def test_opt_13b_on_v100_saturates_at_the_papers_512_tokens(kind: str):
    """Measured on the simulator's scheduler and agents; with noise of 2 % the knee is at most one size away (TI-09)."""
    rig = Rig(kind)
    rates = {tokens: tokens / rig.prompts(tokens) for tokens in PROMPT_TOKENS}
    assert knee_of(rates).tokens == 512
    draws = random.Random(7)
    for _ in range(3):
        noisy = {tokens: rate * draws.gauss(1.0, 0.02) for tokens, rate in rates.items()}
        place = PROMPT_TOKENS.index(knee_of(noisy).tokens)
        assert abs(place - PROMPT_TOKENS.index(512)) <= 1


@pytest.mark.parametrize(
    ("rates", "within", "words"),
    [
        ({}, WITHIN, "at least 3 chunk sizes, not of 0"),
        ({64: 1.0, 128: 2.0}, WITHIN, "at least 3 chunk sizes, not of 2"),
        ({0: 1.0, 64: 1.0, 128: 2.0}, WITHIN, "a chunk of 0 tokens"),
        ({32: 1.0, 64: 0.0, 128: 2.0}, WITHIN, "a chunk of 64 tokens with 0.0"),
        ({32: 1.0, 64: math.nan, 128: 2.0}, WITHIN, "is no measurement"),
        ({32: 1.0, 64: math.inf, 128: 2.0}, WITHIN, "is no measurement"),
        ({32: 1.0, 64: 2.0, 128: 2.0}, 1.0, "from 0 to 1"),
    ],
)
def test_a_grid_without_a_curve_is_refused(rates: dict[int, float], within: float, words: str):
    with pytest.raises(ValueError, match=words):
        knee_of(rates, within)
