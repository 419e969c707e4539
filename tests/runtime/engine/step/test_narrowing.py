"""Behind a model's last attention only the tokens needed for logits are computed; the answers do not change."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from runtime.config import EngineConfig
from runtime.engine.kernels.bindings import Kernels
from runtime.types import SamplingParams, SequenceRequest
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.drive import DenseDevice, Limits, PagedDevice, drive
from tests.runtime.engine.oracle import greedy, reference, same_tokens
from tests.runtime.engine.test_equality import ask, prompts
from tests.runtime.engine.test_sharing import fine_tune


def short(name: str, prompt: tuple[int, ...], seq: str, tokens: int) -> SequenceRequest:
    return SequenceRequest(seq, seq, name, prompt, SamplingParams(max_tokens=tokens))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record how many half layers each native call runs, and over how many tokens."""
    seen: list[tuple[int, int]] = []
    run = Kernels.layers_

    def counted(self: Kernels, hidden: Tensor, halves: Any, *given: Any, **how: bool) -> None:
        seen.append((len(halves), hidden.shape[1]))
        run(self, hidden, halves, *given, **how)

    monkeypatch.setattr(Kernels, "layers_", counted)
    return seen


def widths(engine: PagedDevice | DenseDevice, name: str, unit: int) -> list[int]:
    """Record how many tokens a unit of a model's chain gets in each call of its module."""
    seen: list[int] = []
    module = engine._registry.models[engine.stage(name)].units[unit].module
    module.register_forward_hook(lambda module, given, out: seen.append(given[0].shape[1]))
    return seen


@pytest.mark.parametrize("kernels", ["stock", pytest.param("native", marks=needs_kernels)])
def test_a_chunk_leaves_one_token_or_none(bench, called, kernels):
    name = bench.family("llama", "narrowed", num_hidden_layers=2, seed=3)
    engine = PagedDevice(
        bench.store, EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4, kernels=kernels), [name]
    )
    before, last = widths(engine, name, 2), widths(engine, name, 4)
    (prompt,) = prompts(4, (30,))
    out = drive(engine, {0: [short(name, prompt, "a", 3)]}, Limits(max_num_batched_tokens=12))
    if kernels == "native":  # a native call for all layers calls no module; with chunks it is without the last FFN
        assert called[:4] == [(3, 12), (3, 12), (3, 6), (4, 1)] and last == [1]
    else:
        assert before[:3] == [12, 12, 6] and last[0] == 1, (
            "the last layer's FFN has nothing to do for a prompt's earlier chunks"
        )
    model = reference(bench.folders[name])
    assert same_tokens(model, prompt, greedy(model, prompt, 3), out.tokens("a")) == 3


def test_models_that_part_and_meet_again(bench):
    """Fine-tunes of the first and the last layer, their base and a LoRA: prefill and decode of all in one step."""
    base = bench.family("llama", "narrow-base", num_hidden_layers=3, seed=7)
    names = [
        base,
        fine_tune(bench, base, "narrow-first", 0),
        fine_tune(bench, base, "narrow-last", 2),
        bench.lora(base, "narrow-lora"),
    ]
    engine = PagedDevice(bench.store, EngineConfig(kv_cache_memory_bytes=8 << 20, page_tokens=4), names)
    wanted = {name: prompts(number, (3, 21, 40)) for number, name in enumerate(names)}
    requests = [ask(name, prompt, f"{name}-{i}") for name in names for i, prompt in enumerate(wanted[name])]
    out = drive(engine, {3 * at: [request] for at, request in enumerate(requests)}, Limits(max_num_batched_tokens=24))
    for name in names[:3]:
        model = reference(bench.folders[name])
        for i, prompt in enumerate(wanted[name]):
            got = out.tokens(f"{name}-{i}")
            assert same_tokens(model, prompt, greedy(model, prompt, 20), got) == len(got)
    alone = PagedDevice(bench.store, EngineConfig(kv_cache_memory_bytes=8 << 20, page_tokens=4), ["narrow-lora"])
    for i, prompt in enumerate(wanted["narrow-lora"]):
        assert drive(alone, {0: [ask("narrow-lora", prompt, "x")]}).tokens("x") == out.tokens(f"narrow-lora-{i}")


@pytest.mark.parametrize("kernels", ["stock", pytest.param("native", marks=needs_kernels)])
def test_log_probabilities_of_a_prompt_want_every_token(bench, called, kernels):
    name = bench.family("llama", "narrowed-scores", num_hidden_layers=2, seed=3)
    engine = PagedDevice(
        bench.store, EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4, kernels=kernels), [name]
    )
    last = widths(engine, name, 4)
    (prompt,) = prompts(4, (30,))
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    drive(engine, {0: [SequenceRequest("a", "a", name, tuple(prompt), params)]}, Limits(max_num_batched_tokens=64))
    assert called[0][1] >= 29 and called[0][0] == 4 if kernels == "native" else last[0] >= 29


@pytest.mark.parametrize("mode", ["baton", "baton-pd"])
def test_dense_batches_too(bench, mode):
    from runtime.config import DenseConfig

    name = bench.family("llama", "narrowed-dense", num_hidden_layers=2, seed=3)
    engine = DenseDevice(
        bench.store, EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4, dense=DenseConfig(mode=mode)), [name]
    )
    last = widths(engine, name, 4)
    wanted = prompts(4, (30, 9))
    out = drive(
        engine,
        {2 * i: [short(name, prompt, f"{i}", 5)] for i, prompt in enumerate(wanted)},
        Limits(max_num_batched_tokens=64),
    )
    assert max(last) <= 2
    model = reference(bench.folders[name])
    for i, prompt in enumerate(wanted):
        assert same_tokens(model, prompt, greedy(model, prompt, 5), out.tokens(f"{i}")) == 5
