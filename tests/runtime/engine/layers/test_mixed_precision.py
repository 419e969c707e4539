"""bfloat16 models with float32 activations: near the float32 model, and the same bits in any company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.config import EngineConfig
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.models.registry import half_page
from runtime.types import Sampled, SamplingParams
from tests.chains import manifest_of, put_chain
from tests.runtime.engine.carry import Carrier
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.test_equality import prompts

pytestmark = needs_kernels
CONFIG = EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4, kernels="native")
SAMPLING = SamplingParams(8, ignore_eos=True, logprobs=2)
#: A model, two adapters of it, one that shares no weight, and a chain of both; `gpt2` runs as transformers computes it.
MODELS = ["llama", "lora", "bottleneck", "other", "chain", "gpt2"]

#: Models with products by torch in bfloat16, which depend on the batch.
STOCK = ("gpt2", "bottleneck")


@pytest.fixture(scope="module")
def family(bench):
    bench.family("llama", "llama", num_hidden_layers=3, num_key_value_heads=2, seed=1, dtype="bfloat16")
    bench.family("llama", "other", num_hidden_layers=3, num_key_value_heads=2, seed=2, dtype="bfloat16")
    bench.family("gpt2", "gpt2", seed=3, dtype="bfloat16")
    bench.lora("llama", "lora", seed=6)
    bench.bottleneck("llama", "bottleneck")
    put_chain(bench.store, "chain", ("llama", 0, 2), ("other", 2, 3))
    return bench


def end(bench, name: str) -> int:
    return len(manifest_of(bench.store, name).components)


def engines(bench, count: int = 1, **changes) -> list[StagedEngine]:
    config = replace(CONFIG, **changes)
    half = half_page(bench.store, config, MODELS)
    return [StagedEngine(bench.store, config, half, f"d{number}") for number in range(count)]


def bits(sampled: list[Sampled]) -> list[tuple]:
    """Tokens and log-probabilities, without the names of sequences."""
    return [(one.token, one.logprob, one.top) for one in sampled]


def alone(bench, name: str, prompt: tuple[int, ...], chunk: int = 64, **changes) -> list[Sampled]:
    carrier = Carrier(*engines(bench, **changes))
    carrier.add("a", name, prompt, SAMPLING, [(0, 0, end(bench, name))])
    carrier.run(chunk)
    return carrier.seqs["a"].sampled


@pytest.mark.parametrize("name", ["llama", "other"])
def test_logits_are_nearer_to_the_float32_model_s_than_transformers_are(family, name):
    """Log-probabilities of the likeliest tokens of greedy answers, against transformers in float32 and in bfloat16."""
    folder, texts = family.folders[name], prompts(5, (11, 4, 23, 9, 16, 7, 31, 12))
    wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    narrow = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    carrier = Carrier(*engines(family))
    for number, text in enumerate(texts):
        carrier.add(str(number), name, text, SAMPLING, [(0, 0, end(family, name))])
    carrier.run(64)
    ours, theirs = [], []
    for number, text in enumerate(texts):
        sampled = carrier.seqs[str(number)].sampled
        ids = torch.tensor([[*text, *(one.token for one in sampled)]])
        with torch.inference_mode():
            wanted, given = (
                model(ids).logits[0, len(text) - 1 : -1].float().log_softmax(-1) for model in (wide, narrow)
            )
        for at, one in enumerate(sampled):
            for top in one.top:
                ours.append(abs(top.logprob - float(wanted[at, top.token])))
                theirs.append(abs(float(given[at, top.token] - wanted[at, top.token])))
    assert len(ours) >= 8 * SAMPLING.max_tokens and sum(ours) < sum(theirs) and sum(ours) / len(ours) < 0.01


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_in_any_company(family, name):
    """Tokens and log-probabilities alone, beside all models, cut over two devices, and with the prompt in chunks."""
    prompt = prompts(7, (13,))[0]
    wanted = alone(family, name, prompt)
    if name not in STOCK:
        assert bits(alone(family, name, prompt, chunk=8)) == bits(wanted)
    carrier = Carrier(*engines(family, 2))
    for number, other in enumerate(MODELS):
        for at, text in enumerate(prompts(number, (5, 9))):
            carrier.add(f"{other}{at}", other, text, SAMPLING, [(0, 0, end(family, other))])
        carrier.step()
    carrier.add("whole", name, prompt, SAMPLING, [(0, 0, end(family, name))])
    carrier.step()
    carrier.add("cut", name, prompt, SAMPLING, [(0, 0, 3), (1, 3, end(family, name))])
    carrier.run(64)
    if name in STOCK:
        assert [one.token for one in carrier.seqs["cut"].sampled] == [one.token for one in wanted]
    else:
        for seq in ("whole", "cut"):
            assert bits(carrier.seqs[seq].sampled) == bits(wanted), seq


def test_weights_and_pages_stay_bfloat16(family):
    """Half the bytes of the same model in float32; hidden states between stages are bfloat16."""
    (narrow,), (wide,) = engines(family), engines(family, dtype="float32")
    for engine in (narrow, wide):
        carrier = Carrier(engine)
        carrier.add("a", "llama", prompts(5, (4,))[0], replace(SAMPLING, max_tokens=1), [(0, 0, end(family, "llama"))])
        carrier.run(64)
    assert narrow.memory().weights < 0.6 * wide.memory().weights
    assert half_page(family.store, CONFIG, ["llama"]) * 2 == half_page(
        family.store, replace(CONFIG, dtype="float32"), ["llama"]
    )
    carrier = Carrier(*engines(family, 2))
    carrier.add("a", "llama", prompts(5, (4,))[0], SAMPLING, [(0, 0, 3), (1, 3, end(family, "llama"))])
    seen: list[str] = []
    run = carrier.places[0].engine.run

    def spy(plan, inputs):
        result = run(plan, inputs)
        seen.extend(array.dtype for array in result.outputs.values())
        return result

    carrier.places[0].engine.run = spy
    carrier.run(64)
    assert set(seen) == {"bfloat16"} and len(seen) == SAMPLING.max_tokens
