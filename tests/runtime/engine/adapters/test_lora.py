"""LoRAs served beside their base give peft's tokens, and their rows share the base's products."""

from __future__ import annotations

import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from runtime.config import EngineConfig
from tests import checkpoints
from tests.runtime.engine.drive import Limits, PagedDevice, drive
from tests.runtime.engine.oracle import ROUNDING, greedy, reference, same_tokens
from tests.runtime.engine.test_equality import ask, engine, prompts


def peft_reference(bench, base: str, lora: str):
    return PeftModel.from_pretrained(reference(bench.folders[base]), bench.folders[lora]).eval()


def check(model, name, wanted, out) -> None:
    for prompt, seq in wanted:
        assert same_tokens(model, prompt, greedy(model, prompt, 20), out.tokens(seq)) == len(out.tokens(seq)), name


@pytest.mark.parametrize("family", [*checkpoints.SERVED, "opt-prenorm", "gpt_neox-sequential"])
def test_lora_beside_its_base(bench, family):
    """Two adapters of different rank and the base in one batch; prompts come in chunks, rows arrive late."""
    base = bench.family(family, f"{family}-base")
    loras = [bench.lora(base, f"{family}-a", seed=1, r=4), bench.lora(base, f"{family}-b", seed=2, r=7, lora_alpha=9)]
    made = engine(bench, base, *loras)
    wanted = {
        name: [(p, f"{name}{i}") for i, p in enumerate(prompts(n, (3, 11)))] for n, name in enumerate((base, *loras))
    }
    requests = [ask(name, p, seq) for i in range(2) for name in wanted for p, seq in [wanted[name][i]]]
    out = drive(made, {i: [request] for i, request in enumerate(requests)}, Limits(max_num_batched_tokens=8))
    check(reference(bench.folders[base]), base, wanted[base], out)
    for name in loras:
        check(peft_reference(bench, base, name), name, wanted[name], out)


@pytest.mark.parametrize(
    ("family", "dora"), [("llama", False), ("gpt2", False), ("gpt_neox", False), ("llama", True), ("gpt2", True)]
)
def test_half_precision_base_with_adapters_in_either(bench, family, dora):
    """peft computes adapters in float32 on a half-precision base, whichever dtype they were saved in."""
    base = f"{family}-half"
    if base not in bench.folders:
        bench.family(family, base, dtype="bfloat16")
    full = bench.lora(base, f"{family}-half-{'dora' if dora else 'lora'}", use_dora=dora)
    half = bench.root / "hf" / f"{full}16"
    shutil.copytree(bench.folders[full], half)
    path = half / "adapter_model.safetensors"
    save_file({key: tensor.bfloat16() for key, tensor in load_file(path).items()}, path)
    names = (base, full, bench.add(half.name, half, base=base))
    wanted = {name: [(p, f"{name}{i}") for i, p in enumerate(prompts(n, (3, 11)))] for n, name in enumerate(names)}
    out = drive(engine(bench, *names), {0: [ask(name, p, seq) for name in names for p, seq in wanted[name]]})
    agreed = 0
    for name in names[1:]:
        model = peft_reference(bench, base, name)
        agreed += sum(
            same_tokens(model, p, greedy(model, p, 20), out.tokens(seq), ROUNDING[torch.bfloat16])
            for p, seq in wanted[name]
        )
    assert agreed >= 40, "hardly a token agrees"


VARIANTS = {
    "rslora": {"use_rslora": True, "r": 3},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 5}},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "embedding_saved": {"modules_to_save": ["embed_tokens"]},
    "bias_all": {"bias": "all"},
    "bias_lora_only": {"bias": "lora_only"},
    "on_head_and_embedding": {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
    "some_layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "lora_bias": {"lora_bias": True},
    "mlp": {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "dora": {"use_dora": True},
    "dora_on_mlp_and_head": {"use_dora": True, "use_rslora": True, "target_modules": ["down_proj", "lm_head"]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(bench, variant):
    base = "variants-base"
    if base not in bench.folders:
        bench.family("llama", base, attention_bias=True)
    name = bench.lora(base, f"variant-{variant}", **VARIANTS[variant])
    made = engine(bench, name, base)
    wanted = [(p, f"{variant}{i}") for i, p in enumerate(prompts(8, (4, 15)))]
    others = [ask(base, p, f"base{i}") for i, p in enumerate(prompts(9, (6, 2)))]
    out = drive(made, {0: [ask(name, p, seq) for p, seq in wanted], 2: others})
    check(peft_reference(bench, base, name), name, wanted, out)


@pytest.mark.parametrize(
    "variant", [{"target_modules": ["q_proj", "embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}]
)
def test_tied_embeddings(bench, variant):
    base = "tied-base"
    if base not in bench.folders:
        bench.family("gemma2", base)
    name = bench.lora(base, f"tied-{next(iter(variant))}", **variant)
    wanted = [(p, f"t{i}") for i, p in enumerate(prompts(8, (4, 9)))]
    out = drive(engine(bench, name, base), {0: [ask(name, p, seq) for p, seq in wanted]})
    check(peft_reference(bench, base, name), name, wanted, out)


def test_rows_of_adapters_share_the_base_product(bench):
    """With LoRAs on attention, the trace shows each unit running once per step over all three models' rows."""
    base = bench.family("llama", "share-base", seed=5)
    names = (base, bench.lora(base, "share-a"), bench.lora(base, "share-b", seed=4))
    made = PagedDevice(
        bench.store,
        EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4, trace_segments=True, kernels="stock"),
        names,
    )
    out = drive(made, {0: [ask(name, p, f"{name}{i}") for name in names for i, p in enumerate(prompts(3, (4, 9)))]})
    for step in out.steps:
        assert len(step.segments) == 1 and step.segments[0].models == names
    alone = sum(t.nbytes for t in made._registry.models[made.stage(base)].manifest.tensors)
    parts = [p for u in made._registry.units.units.values() for m in u.targets.values() for p in m.adapters.values()]
    adapters = sum(t.numel() * t.element_size() for p in parts for t in (p.a, p.b))
    assert made.memory().weights == alone + adapters


def test_unloading_an_adapter_leaves_its_base_unchanged(bench):
    base = bench.family("qwen3", "unload-base")
    lora = bench.lora(base, "unload-lora")
    made = engine(bench, base, lora)
    prompt = prompts(5, (9,))[0]
    before = drive(made, {0: [ask(base, prompt, "x")]}).tokens("x")
    resident = made.memory().weights
    made.unload(lora)
    assert drive(made, {0: [ask(base, prompt, "y")]}).tokens("y") == before
    assert made.memory().weights < resident
    made.unload(base)
    assert made.memory().weights == 0 and not made.models()
    assert torch.isfinite(torch.tensor(resident))
