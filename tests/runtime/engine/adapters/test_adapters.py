"""Every kind of adapter, served beside its base and other adapters, gives peft's tokens."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from runtime.config import EngineConfig
from runtime.types import SamplingParams, SequenceRequest
from tests import checkpoints
from tests.adapters import KINDS
from tests.bottlenecks import CONFIGS, with_bottleneck
from tests.runtime.engine.drive import Limits, PagedDevice, drive
from tests.runtime.engine.oracle import ROUNDING, Answers, reference
from tests.runtime.engine.test_equality import engine, prompts
from zoo.errors import NotServable


def peft_reference(bench, base: str, name: str):
    """Return the base with the adapter applied by peft, or by the tests' own code for bottleneck adapters."""
    if (bench.folders[name] / "adapter.safetensors").exists():
        return with_bottleneck(reference(bench.folders[base]), bench.folders[name])
    return PeftModel.from_pretrained(reference(bench.folders[base]), bench.folders[name]).eval()


#: Tokens of an answer.
COUNT = 12


def ask(model: str, prompt: tuple[int, ...], seq: str) -> SequenceRequest:
    return SequenceRequest(seq, seq, model, prompt, SamplingParams(max_tokens=COUNT))


def answers(bench, base: str, name: str) -> Answers:
    return bench.answers(
        name, lambda: reference(bench.folders[base]) if name == base else peft_reference(bench, base, name)
    )


def check(bench, base: str, name: str, wanted, out) -> None:
    for prompt, seq in wanted:
        assert answers(bench, base, name).agreeing(prompt, out.tokens(seq), COUNT) == len(out.tokens(seq)), seq


FAMILIES = [*checkpoints.SERVED, "opt-prenorm", "gpt_neox-sequential"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "layers"), [*((f, "fused") for f in FAMILIES), ("llama", "stock"), ("qwen3", "stock")]
)
def test_all_kinds_beside_their_base(bench, family, layers):
    """Every kind (llama: two each) and the base in one batch: chunks, late arrivals, pages for half of them."""
    base = f"{family}-base"
    numbers, lengths = ((1, 2), (5, 11)) if family == "llama" else ((1,), (11,))
    bottlenecks = ("seq_bn", "double_seq_bn", "par_bn") if family in ("llama", "mistral", "gpt2") else ()
    if base not in bench.folders:
        bench.family(family, base)
        for kind, config in KINDS.items():
            for number in numbers:
                bench.peft(base, f"{family}-{kind}{number}", config(family), seed=number)
        bench.lora(base, f"{family}-lora")
        bench.lora(base, f"{family}-dora", use_dora=True)
        for config in bottlenecks:
            bench.bottleneck(base, f"{family}-{config}", **CONFIGS[config])
    names = [
        base,
        f"{family}-lora",
        f"{family}-dora",
        *(f"{family}-{kind}{number}" for kind in KINDS for number in numbers),
    ]
    names += [f"{family}-{config}" for config in bottlenecks]
    wanted = {name: [(p, f"{name}.{i}") for i, p in enumerate(prompts(n, lengths))] for n, name in enumerate(names)}
    requests = [ask(name, *wanted[name][i]) for i in range(len(lengths)) for name in names]
    made = engine(bench, *names, layers=layers, pages=48)
    out = drive(made, {i: [request] for i, request in enumerate(requests)}, Limits(max_num_batched_tokens=13))
    assert out.preemptions > 0
    for name in names:
        check(bench, base, name, wanted[name], out)


def test_bitfit_beside_its_base(bench):
    """A base without biases and a fine-tune with biases share the matrices; each gives its own tokens."""
    base = bench.family("llama", "bitfit-base", seed=6)
    name = bench.add("bitfit", checkpoints.make_bitfit(bench.folders[base], bench.root / "hf" / "bitfit"))
    made = engine(bench, base, name)
    wanted = {
        each: [(p, f"{each}.{i}") for i, p in enumerate(prompts(n, (4, 13)))] for n, each in enumerate((base, name))
    }
    out = drive(
        made, {0: [ask(each, *one) for each in wanted for one in wanted[each]]}, Limits(max_num_batched_tokens=7)
    )
    for each in wanted:
        check(bench, each, each, wanted[each], out)
    biases = [
        tensor for key, tensor in load_file(bench.folders[name] / "model.safetensors").items() if key.endswith(".bias")
    ]
    added = made.memory().weights - engine(bench, base).memory().weights
    assert added == sum(tensor.numel() * tensor.element_size() for tensor in biases)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_alone(bench, kind):
    """One sequence on the device with its prompt in one piece: no other rows, no chunks."""
    base = "alone-base" if "alone-base" in bench.folders else bench.family("llama", "alone-base", seed=4)
    name = bench.peft(base, f"alone-{kind}", KINDS[kind]("llama"), seed=5)
    made = engine(bench, name)
    for number, prompt in enumerate(prompts(6, (1, 19))):
        check(bench, base, name, [(prompt, f"{number}")], drive(made, {0: [ask(name, prompt, f"{number}")]}))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_half_precision(bench, family, kind):
    """Tokens may differ only at ties within rounding, and most never do; adapters come in either precision."""
    base = f"{family}-half"
    if base not in bench.folders:
        bench.family(family, base, dtype="bfloat16")
    full = bench.peft(base, f"{family}-half-{kind}", KINDS[kind](family))
    path = bench.root / "hf" / f"{full}16"
    shutil.copytree(bench.folders[full], path)
    file = path / "adapter_model.safetensors"
    save_file({key: tensor.bfloat16() for key, tensor in load_file(file).items()}, file)
    names = (base, full, bench.add(path.name, path, base=base))
    wanted = {name: [(p, f"{name}.{i}") for i, p in enumerate(prompts(n, (3, 11)))] for n, name in enumerate(names)}
    out = drive(
        engine(bench, *names),
        {0: [ask(name, *each) for name in names for each in wanted[name]]},
        Limits(max_num_batched_tokens=9),
    )
    agreed = 0
    for name in names[1:]:
        known = answers(bench, base, name)
        agreed += sum(known.agreeing(p, out.tokens(seq), COUNT, ROUNDING[torch.bfloat16]) for p, seq in wanted[name])
    assert agreed >= 2 * COUNT, "hardly a token agrees"


@pytest.mark.parametrize(("family", "layers"), [("llama", "fused"), ("llama", "stock"), ("gpt2", "fused")])
def test_bottlenecks_of_every_config_in_one_batch(bench, family, layers):
    base = f"{family}-narrowed"
    if base not in bench.folders:
        bench.family(family, base, seed=2)
        for number, config in enumerate(CONFIGS):
            bench.bottleneck(base, f"{base}-{config}", seed=number, **CONFIGS[config])
        bench.bottleneck(base, f"{base}-another", seed=77, **CONFIGS["seq_bn"])
    names = [base, *(f"{base}-{config}" for config in CONFIGS), f"{base}-another"]
    wanted = {name: [(p, f"{name}.{i}") for i, p in enumerate(prompts(n, (9,)))] for n, name in enumerate(names)}
    made = engine(bench, *names, layers=layers, pages=3 * 2 * len(names))
    arrivals = {n: [ask(name, *each) for each in wanted[name]] for n, name in enumerate(names)}
    out = drive(made, arrivals, Limits(max_num_batched_tokens=13))
    assert out.preemptions > 0
    for name in names:
        check(bench, base, name, wanted[name], out)


def test_bottlenecks_run_in_their_bases_precision(bench):
    base = bench.family("llama", "bottleneck-half", dtype="bfloat16")
    names = [bench.bottleneck(base, f"half-{config}", **CONFIGS[config]) for config in ("seq_bn", "norms")]
    wanted = {name: [(p, f"{name}.{i}") for i, p in enumerate(prompts(n, (3, 11)))] for n, name in enumerate(names)}
    out = drive(engine(bench, base, *names), {0: [ask(name, *each) for name in names for each in wanted[name]]})
    agreed = sum(
        answers(bench, base, name).agreeing(p, out.tokens(seq), COUNT) for name in names for p, seq in wanted[name]
    )
    assert agreed >= 2 * COUNT, "hardly a token agrees"


def test_rows_of_every_adapter_share_their_bases_products(bench):
    """For adapters that leave the base's tensors alone, each step is one segment over the rows of all models.

    The base's weights are resident once.
    """
    base = bench.family("llama", "share-base", seed=5)
    names = [bench.peft(base, f"share-{kind}", KINDS[kind]("llama")) for kind in ("ia3", "prompt", "prefix")]
    names = [base, *names, bench.lora(base, "share-lora"), bench.bottleneck(base, "share-adapter")]
    made = PagedDevice(
        bench.store, EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4, trace_segments=True), names
    )
    out = drive(made, {0: [ask(name, p, f"{name}{i}") for name in names for i, p in enumerate(prompts(3, (4, 9)))]})
    for step in out.steps:
        assert len(step.segments) == 1
    assert out.steps[0].segments[0].models == tuple(names)
    adapters = sum(unit.adapter_bytes for unit in made._registry.units.units.values())
    assert made.memory().weights == engine(bench, base).memory().weights + adapters


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_virtual_tokens_are_nobodys_affair_but_the_engines(bench, kind):
    """Prompt log-probabilities cover the prompt alone and equal peft's.

    The context shrinks by the virtual tokens, and the KV cache is not shared with the base.
    """
    base = "virtual-base"
    if base not in bench.folders:
        bench.family("llama", base, max_position_embeddings=48)
    name = bench.peft(base, f"virtual-{kind}", KINDS[kind]("llama"))
    made = engine(bench, base, name)
    plain, spec = made.models()
    assert plain.virtual_tokens == 0 < spec.virtual_tokens
    assert spec.max_model_len == plain.max_model_len - spec.virtual_tokens
    assert spec.domain != plain.domain and spec.blocks != plain.blocks
    prompt = prompts(7, (23,))[0]
    request = replace(ask(name, prompt, "x"), sampling=SamplingParams(max_tokens=40, prompt_logprobs=2))
    for budget in (1, 4, 256):
        out = drive(made, {0: [request]}, Limits(max_num_batched_tokens=budget))
        assert len(out.tokens("x")) == spec.max_model_len - len(prompt)
        parts = [part for event in out.events["x"] for part in event.prompt_logprobs]
        assert [part.start + i for part in parts for i in range(len(part.chosen))] == list(range(1, len(prompt)))
        with torch.inference_mode():
            logits = peft_reference(bench, base, name)(torch.tensor([prompt])).logits[0, -len(prompt) :]
        wanted = torch.log_softmax(logits[:-1], dim=-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        got = torch.tensor([one.logprob for part in parts for one in part.chosen])
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


def test_a_prompt_that_fills_the_context_is_refused(bench):
    base = bench.family("llama", "narrow-base", max_position_embeddings=8)
    name = bench.peft(base, "narrow-prompt", KINDS["prompt"]("llama", num_virtual_tokens=8))
    with pytest.raises(NotServable, match="8 virtual tokens"):
        engine(bench, name)


def _with_values(bench, base: str, name: str, value: float) -> str:
    """Add an adapter with `value` throughout the first matrix of each pair."""
    path = bench.root / "hf" / f"{name} {value}"
    shutil.copytree(bench.folders[name], path)
    file = next(path.glob("*.safetensors"))
    tensors = load_file(file)
    first = [key for key in tensors if "lora_A" in key or "down.0.weight" in key]
    save_file({**tensors, **{key: torch.full_like(tensors[key], value) for key in first}}, file)
    return bench.add(path.name, path, base=base)


@pytest.mark.parametrize("kind", ["lora", "bottleneck"])
def test_an_adapter_gone_wild_is_felt_by_nobody_else(bench, kind):
    """An adapter with overflowing products, in every row of the batch, leaves other models' tokens unchanged."""
    base = "wild-base" if "wild-base" in bench.folders else bench.family("llama", "wild-base")
    tame = getattr(bench, kind)(base, f"tame-{kind}")
    wild = _with_values(bench, base, tame, 3e38)
    wanted = {
        name: [(p, f"{name}.{i}") for i, p in enumerate(prompts(n, (5, 9)))]
        for n, name in enumerate((base, tame, wild))
    }
    out = drive(engine(bench, base, tame, wild), {0: [ask(name, *each) for name in wanted for each in wanted[name]]})
    for name in (base, tame):
        check(bench, base, name, wanted[name], out)
    for value in (float("nan"), float("inf")):
        with pytest.raises(NotServable, match="not finite"):
            engine(bench, base, _with_values(bench, base, tame, value))


@pytest.mark.filterwarnings("ignore")
def test_unloading_adapters_leaves_their_base_as_it_was(bench):
    base = bench.family("llama", "unload-base")
    names = [bench.peft(base, f"unload-{kind}", config("llama")) for kind, config in KINDS.items()]
    names.append(bench.bottleneck(base, "unload-adapter"))
    alone = engine(bench, base)
    made = engine(bench, base, *names)
    prompt = prompts(5, (9,))[0]
    before = drive(alone, {0: [ask(base, prompt, "x")]}).tokens("x")
    for name in names:
        resident = made.memory().weights
        made.unload(name)
        assert made.memory().weights < resident
        assert drive(made, {0: [ask(base, prompt, name)]}).tokens(name) == before
    assert made.memory().weights == alone.memory().weights
