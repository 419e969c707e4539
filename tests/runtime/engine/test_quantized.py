"""Quantised models in the engine: near their own weights, the same bits in any company, held in int8."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.config import EngineConfig
from runtime.engine.kernels.program import program_of
from runtime.engine.models.coded_layers import takes_form
from runtime.types import SamplingParams, SequenceRequest
from surgery.families.quantized import CodedWeights
from surgery.quantize.make import quantize
from tests.chains import manifest_of, put_chain
from tests.runtime.engine.company import bits_of
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.drive import Drive, Limits, PagedDevice, drive
from tests.runtime.engine.test_equality import prompts
from tests.runtime.engine.test_sharing import fine_tune
from zoo.handle import ModelHandle

pytestmark = needs_kernels
CONFIG = EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4, kernels="native")
DTYPES = ("float32", "bfloat16")
MODELS = ("base", "base-int8", "tune-int8", "base-fp8", "lora", "mixed", "gemma2-int8", "mixtral-int8", "twice-int8")
TOP = 1 << 20


@pytest.fixture(scope="module", params=DTYPES)
def zoo(bench, request):
    """Models of one dtype, named after it: exact, quantised, fine-tuned, adapted, a chain of exact and int8 layers."""
    dtype = request.param
    bench.family("llama", f"{dtype} base", seed=1, dtype=dtype, tie_word_embeddings=True)
    fine_tune(bench, f"{dtype} base", f"{dtype} tune", 1)
    twice(bench, f"{dtype} base", f"{dtype} twice")
    for name in ("base", "tune", "twice"):
        quantize(bench.store, f"{dtype} {name}", "int8")
    quantize(bench.store, f"{dtype} base", "fp8")
    bench.folders[f"{dtype} base-int8"] = bench.folders[f"{dtype} base"]
    bench.lora(f"{dtype} base-int8", f"{dtype} lora", seed=2)
    put_chain(bench.store, f"{dtype} mixed", (f"{dtype} base", 0, 2), (f"{dtype} base-int8", 2, 3))
    for family in ("gemma2", "mixtral"):
        bench.family(family, f"{dtype} {family}", seed=4, dtype=dtype)
        quantize(bench.store, f"{dtype} {family}", "int8")
    return dtype, bench


def twice(bench, base: str, name: str) -> None:
    """Add a fine-tune with FFNs of twice the values: its codes are the base's, its scales are not."""
    folder = bench.root / "hf" / name
    model = AutoModelForCausalLM.from_pretrained(bench.folders[base])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight *= 2
    model.save_pretrained(folder)
    bench.add(name, folder)


def ask(name: str, prompt: tuple[int, ...], seq: str) -> SequenceRequest:
    return SequenceRequest(seq, seq, name, prompt, SamplingParams(6, logprobs=TOP, ignore_eos=True))


def named(dtype: str) -> list[str]:
    return [f"{dtype} {name}" for name in MODELS]


def everything(made: PagedDevice, dtype: str) -> Drive:
    """Requests to all models in one batch, prompts in chunks, arrivals at different steps."""
    arrivals = {
        2 * at: [ask(name, prompt, f"{name}.{number}") for number, prompt in enumerate(prompts(at, (5, 19)))]
        for at, name in enumerate(named(dtype))
    }
    return drive(made, arrivals, Limits(max_num_batched_tokens=9, max_num_seqs=24))


def test_answers_are_near_those_of_the_model_s_own_weights_and_the_same_bits_alone(zoo) -> None:
    dtype, bench = zoo
    together = everything(PagedDevice(bench.store, CONFIG, named(dtype)), dtype)
    for at, name in enumerate(named(dtype)):
        model = ModelHandle(bench.store, manifest_of(bench.store, name)).load(dtype="float32")
        model.set_attn_implementation("eager")  # which has gemma2's soft cap
        alone = PagedDevice(bench.store, CONFIG, [name])
        for number, prompt in enumerate(prompts(at, (5, 19))):
            seq = f"{name}.{number}"
            got = together.events[seq]
            assert bits_of(drive(alone, {0: [ask(name, prompt, seq)]}).events[seq]) == bits_of(got), seq
            ids = torch.tensor([[*prompt, *(event.token for event in got)]])
            with torch.no_grad():
                wanted = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            near = 2e-4 if dtype == "float32" else 0.06
            for step, event in enumerate(got):
                for top in event.top[:20]:
                    assert abs(top.logprob - float(wanted[step, top.token])) < near, seq


def test_int8_weights_are_held_as_they_are_and_once_for_fine_tunes(zoo) -> None:
    dtype, bench = zoo
    both = [f"{dtype} base-int8", f"{dtype} tune-int8"]
    held = {
        (quantized, count): PagedDevice(bench.store, replace(CONFIG, quantized=quantized), both[:count])
        for quantized in ("native", "decompress")
        for count in (1, 2)
    }
    bytes_ = {key: made.memory().weights for key, made in held.items()}
    width = 4 if dtype == "float32" else 2
    matrices = 3 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96) + 320 * 64
    saved = bytes_["decompress", 1] - bytes_["native", 1]
    # Matrices as small as these are padded to whole panels: by how much depends on the processor.
    assert 0.6 * (width - 1) * matrices < saved < (width - 1) * matrices
    layer = bytes_["native", 2] - bytes_["native", 1]
    assert layer < 0.4 * bytes_["native", 1], "one layer of three is not shared"
    units = held["native", 1]._registry.units.units.values()
    layers = [unit.module for unit in units if unit.kind in ("attention", "ffn")]
    assert len(layers) == 6 and program_of(layers) is not None, "decode steps run in one call"


@pytest.mark.parametrize(
    "changes", [{"quantized": "decompress"}, {"kernels": "stock"}, {"weights": "plain"}, {"layers": "stock"}], ids=str
)
def test_the_other_ways_to_compute_give_nearly_the_same(zoo, changes) -> None:
    dtype, bench = zoo
    name, prompt = f"{dtype} base-int8", prompts(3, (11,))[0]
    native = drive(PagedDevice(bench.store, CONFIG, [name]), {0: [ask(name, prompt, "s")]}).events["s"]
    made = PagedDevice(bench.store, replace(CONFIG, **changes), [name])
    other = drive(made, {0: [ask(name, prompt, "s")]}).events["s"]
    first, second = ({one.token: one.logprob for one in each[0].top} for each in (native, other))
    assert max(abs(first[token] - second[token]) for token in first) < (1e-3 if dtype == "float32" else 0.1)


def test_models_come_and_go(zoo) -> None:
    dtype, bench = zoo
    made = PagedDevice(bench.store, CONFIG, [f"{dtype} base"])
    before = made.memory().weights
    for name in (f"{dtype} base-int8", f"{dtype} lora", f"{dtype} tune-int8"):
        made.load(name)
    assert made.memory().weights > before
    for name in (f"{dtype} base-int8", f"{dtype} tune-int8", f"{dtype} lora"):
        made.unload(name)
    assert made.memory().weights == before


@pytest.mark.parametrize(
    ("form", "takes"),
    [
        (CodedWeights("pack-quantized", 8, 0, True), True),
        (CodedWeights("int-quantized", 8, -1, True), True),
        (CodedWeights("int-quantized", 8, 0, False), False),
        (CodedWeights("pack-quantized", 8, 32, True), False),
        (CodedWeights("pack-quantized", 4, 0, True), False),
        (CodedWeights("float-quantized", 8, 0, True), False),
    ],
)
def test_only_int8_with_a_scale_for_each_output_and_no_zero_points_stays_as_it_is(
    form: CodedWeights, takes: bool
) -> None:
    assert takes_form(form, "q_proj.weight") == takes
    assert not takes_form(form, "block_sparse_moe.experts.0.w1.weight")
