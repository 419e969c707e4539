"""For every served family the engine's greedy tokens are those of transformers.

Covered: a request alone, mixed batches, late arrivals, chunked prefill, and preemption.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from runtime.config import EngineConfig
from runtime.types import SamplingParams, SequenceRequest
from tests import checkpoints
from tests.runtime.engine.drive import Limits, PagedDevice, drive
from tests.runtime.engine.oracle import greedy, reference, same_tokens

COUNT = 20
FAMILIES = [*checkpoints.SERVED, *checkpoints.VARIANTS]
#: Families with a fused form of their layers; all other families run stock layers either way.
FUSED = ["llama", "mistral", "qwen2", "qwen3", "mixtral"]


def prompts(seed: int, lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(3, checkpoints.VOCAB) for _ in range(length)) for length in lengths]


def ask(model: str, prompt: tuple[int, ...], seq: str, **params) -> SequenceRequest:
    return SequenceRequest(seq, seq, model, prompt, SamplingParams(max_tokens=COUNT, **params))


def engine(bench, *names: str, pages: int | None = None, layers: str = "fused", kernels: str = "auto") -> PagedDevice:
    config = EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4, layers=layers, kernels=kernels)
    made = PagedDevice(bench.store, config, names)
    if pages is None:
        return made
    size = made.memory().kv_pool // made.page_capacity
    return PagedDevice(bench.store, replace(config, kv_cache_memory_bytes=pages * size), names)


@pytest.mark.parametrize("layers", ["fused", "stock"])
@pytest.mark.parametrize("family", FAMILIES)
def test_alone(bench, family, layers):
    name = family if family in bench.folders else bench.family(family, shards="60KB")
    model, made = reference(bench.folders[name]), engine(bench, name, layers=layers)
    for number, prompt in enumerate(prompts(1, (1, 7, 33))):
        got = drive(made, {0: [ask(name, prompt, f"{number}")]}).tokens(f"{number}")
        assert same_tokens(model, prompt, greedy(model, prompt, COUNT), got) == len(got)


@pytest.mark.parametrize(("family", "layers"), [*((f, "fused") for f in FAMILIES), *((f, "stock") for f in FUSED)])
def test_mixed_with_late_arrivals_chunks_and_preemption(bench, family, layers):
    """The pool cannot hold all sequences, prompts come in chunks of at most six tokens, requests arrive late."""
    name = f"{family}-mixed"
    if name not in bench.folders:
        bench.family(family, name, seed=3)
    model = reference(bench.folders[name])
    wanted = prompts(2, (9, 2, 21, 13, 1, 17, 30, 6))
    made = engine(bench, name, pages=3 * 15, layers=layers)
    arrivals = {3 * i: [ask(name, prompt, f"{i}")] for i, prompt in enumerate(wanted)}
    out = drive(made, arrivals, Limits(max_num_batched_tokens=6, max_num_seqs=6))
    assert out.preemptions > 0, "the pool was to be too small"
    for i, prompt in enumerate(wanted):
        assert same_tokens(model, prompt, greedy(model, prompt, COUNT), out.tokens(f"{i}")) == len(out.tokens(f"{i}"))


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(bench, family):
    """In half precision tokens may differ only at ties within rounding, and most sequences never do."""
    name = f"{family}-bf16"
    bench.family(family, name, dtype="bfloat16")
    model = reference(bench.folders[name])
    wanted = prompts(4, (1, 8, 19, 30))
    out = drive(
        engine(bench, name),
        {2 * i: [ask(name, prompt, f"{i}")] for i, prompt in enumerate(wanted)},
        Limits(max_num_batched_tokens=8),
    )
    agreed = [
        same_tokens(model, prompt, greedy(model, prompt, COUNT), out.tokens(f"{i}")) for i, prompt in enumerate(wanted)
    ]
    assert sum(agreed) >= COUNT, "hardly a token agrees"
