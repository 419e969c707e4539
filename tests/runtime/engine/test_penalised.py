"""Penalties in engines, beside transformers' `generate`: over prompt and output, from step to step, in any company."""

from __future__ import annotations

import pytest

from runtime.config import EngineConfig
from runtime.types import SamplingParams, SequenceRequest
from tests.runtime.engine.drive import DenseDevice, PagedDevice, drive
from tests.runtime.engine.oracle import greedy, reference, same_tokens

PROMPTS = [(5, 9, 11, 9, 30, 31, 32), tuple(range(40, 60)), (7,)]
COUNT = 24


@pytest.fixture(scope="module")
def name(bench) -> str:
    return bench.family("llama", "penalised", seed=11)


@pytest.mark.parametrize("kernels", ["auto", "stock"])
@pytest.mark.parametrize("made", [PagedDevice, DenseDevice])
def test_repetition_penalties_are_those_of_generate(bench, name, made, kernels) -> None:
    """Rows with different penalties and without one in the same steps. The prompt counts, so it changes the answer."""
    model = reference(bench.folders[name])
    asked = {
        f"{number}-{penalty}": (prompt, penalty) for number, prompt in enumerate(PROMPTS) for penalty in (1.0, 1.2, 3.0)
    }
    requests = [
        SequenceRequest(seq, seq, name, prompt, SamplingParams(COUNT, ignore_eos=True, repetition_penalty=penalty))
        for seq, (prompt, penalty) in asked.items()
    ]
    config = EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4, kernels=kernels)
    out = drive(made(bench.store, config, [name]), {0: requests[:5], 3: requests[5:]})
    answers = {}
    for seq, (prompt, penalty) in asked.items():
        expected = greedy(model, prompt, COUNT, repetition_penalty=penalty, eos_token_id=None)
        answers[seq] = expected
        assert same_tokens(model, prompt, expected, out.tokens(seq), rounding=0.0) == COUNT
    assert all(answers[f"{number}-1.0"] != answers[f"{number}-3.0"] for number in range(len(PROMPTS)))
    assert not set(answers["1-3.0"][:8]) & set(PROMPTS[1])
