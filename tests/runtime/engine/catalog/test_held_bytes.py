"""The bytes that the scheduler counts for a stage are those that the engine holds, and never fewer."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.chains import Stage
from runtime.config import EngineConfig
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.models.registry import half_page
from surgery.quantize.make import quantize
from tests.adapters import KINDS
from tests.bottlenecks import CONFIGS
from tests.checkpoints import SERVED

_WHOLE = 1 << 62


def config_of(**settings) -> EngineConfig:
    return EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=4, **settings)


def counted_and_held(bench, name: str, piece: int = _WHOLE, **settings) -> tuple[int, int]:
    """Return the bytes of a whole model as the scheduler counts them, and by the engine's own count once loaded."""
    config = config_of(**settings)
    page = half_page(bench.store, config, [name])
    found = describe_chain(bench.store, name, config, page, piece)
    tables = {digest: size for block in found.blocks for digest, size in block.tables}
    own = sum(block.nbytes - sum(size for _, size in block.tables) for block in found.blocks)
    engine = StagedEngine(bench.store, config, page)
    engine.load(Stage(found.chain.loaded_as, 0, found.chain.length))
    adapters = sum(use.adapter_bytes for use in found.chain.uses)
    return own + sum(tables.values()) + adapters, engine.memory().weights


def add(bench, family: str, name: str, **options) -> None:
    """Add a model whose norms differ, as trained ones do: equal tensors are held once."""
    bench.family(family, f"{name} raw", seed=3, **options)
    model = AutoModelForCausalLM.from_pretrained(bench.folders[f"{name} raw"])
    with torch.no_grad():
        for number, parameter in enumerate(each for each in model.parameters() if each.dim() == 1):
            parameter.add_(number / 64)
    model.save_pretrained(bench.root / "hf" / name)
    bench.add(name, bench.root / "hf" / name)


@pytest.fixture(scope="module")
def family(bench):
    """Models of a width that is no multiple of a panel, in float32 and bfloat16, with tied and own heads."""
    for dtype in ("float32", "bfloat16"):
        for tied in (False, True):
            add(bench, "llama", f"{dtype} {tied}", dtype=dtype, tie_word_embeddings=tied, hidden_size=72,
                intermediate_size=100, head_dim=18, vocab_size=320)  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        bench.lora(f"{dtype} False", f"lora {dtype}", r=5)
        everything = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        bench.lora(f"{dtype} False", f"wide {dtype}", r=3, target_modules=everything)
    return bench


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["{} False", "{} True", "lora {}", "wide {}"])
@pytest.mark.parametrize("settings", [{}, {"layers": "stock"}, {"weights": "plain"}, {"kernels": "stock"}], ids=str)
def test_counted_is_held(family, model, dtype, settings):
    counted, held = counted_and_held(family, model.format(dtype), **settings)
    assert counted == held


def test_counted_is_held_where_weights_are_cast(family):
    for stored, dtype in (("float32", "bfloat16"), ("bfloat16", "float32")):
        counted, held = counted_and_held(family, f"lora {stored}", dtype=dtype)
        assert counted == held


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.parametrize("settings", [{}, {"layers": "stock"}, {"weights": "plain"}, {"kernels": "stock"}], ids=str)
def test_counted_is_held_of_quantized_models(family, scheme, dtype, settings):
    name = f"{dtype} True {scheme}"
    with family.store.catalog.reading() as reader:
        known = name in reader.names()
    if not known:
        quantize(family.store, f"{dtype} True", scheme, name)
    counted, held = counted_and_held(family, name, **settings)
    assert counted == held


def test_pieces_count_what_the_whole_does(family):
    counted, held = counted_and_held(family, "lora bfloat16", piece=1)
    assert counted == held


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_adapter_holds_more_than_is_counted(family, kind, dtype):
    name = family.peft(f"{dtype} False", f"{kind} {dtype}", KINDS[kind]("llama"))
    counted, held = counted_and_held(family, name)
    assert held <= counted <= 1.02 * held


def test_dora_and_bottlenecks_hold_no_more_than_is_counted(family):
    base = "float32 False"
    names = [family.lora(base, "dora", use_dora=True, r=3), family.bottleneck(base, "side", **CONFIGS["seq_bn"])]
    for name in names:
        counted, held = counted_and_held(family, name)
        assert held <= counted <= 1.02 * held


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_family_holds_more_than_is_counted(bench, name, dtype):
    add(bench, name, f"{name} {dtype}", dtype=dtype)
    counted, held = counted_and_held(bench, f"{name} {dtype}")
    assert held <= counted <= 1.02 * held
