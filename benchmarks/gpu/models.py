"""Make the models of the checks: random Llamas and LoRAs, ingested into a store.

Speed does not depend on the values of weights. The 7B shape repeats a few layers: a layer is several times larger than
any cache, so each of its uses reads all its weights from memory, as with distinct layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.isolation import RunSettings
from surgery.chains.compose import compose
from surgery.chains.composition import parse
from surgery.ingest.ingest import ingest
from surgery.sources import open_source
from zoo.store import Store

#: Full-size shapes: the one compared with transformers, one like Llama 3.2 1B, and one like Llama 2 7B (its distinct
#: layers).
SHAPES: Mapping[str, Mapping[str, int]] = {
    "compared": dict(hidden_size=512, intermediate_size=1376, num_hidden_layers=6, num_attention_heads=8,
                     num_key_value_heads=2, vocab_size=4096),
    "1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
               num_key_value_heads=8, vocab_size=32768),
    "7b-layers": dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=4, num_attention_heads=32,
                      num_key_value_heads=32, vocab_size=32000),
}  # fmt: skip
#: The same for a machine without a GPU.
SMALL: Mapping[str, Mapping[str, int]] = {
    name: dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
               vocab_size=256)
    for name in SHAPES
}  # fmt: skip
#: How often the 7B shape repeats its layers, the LoRAs of the compared model, and those that make 20 variants.
REPEATS, LORAS, VARIANTS = 8, 3, 19
_ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def store_of(settings: RunSettings) -> Store:
    """Open the run's store."""
    return Store.open(settings.folder / "store")


def make_compared(settings: RunSettings) -> Mapping[str, Any]:
    """Make the model that is compared with transformers, in float32, and LoRAs of it."""
    with store_of(settings) as store:
        base = _make_base(store, settings, "compared", torch.float32)
        for number in range(LORAS):
            _make_lora(store, settings.folder, base, f"compared-lora{number}", number, torch.float32)
    return {"bytes": _bytes_below(base)}


def make_1b(settings: RunSettings) -> Mapping[str, Any]:
    """Make the 1B shape in bfloat16, and the LoRAs that make twenty variants of it."""
    with store_of(settings) as store:
        base = _make_base(store, settings, "1b", torch.bfloat16)
        for number in range(VARIANTS):
            _make_lora(store, settings.folder, base, f"1b-lora{number}", number, torch.bfloat16)
    return {"bytes": _bytes_below(base), "variants": VARIANTS + 1}


def make_7b(settings: RunSettings) -> Mapping[str, Any]:
    """Make the 7B shape in bfloat16 from a few layers."""
    with store_of(settings) as store:
        base = _make_base(store, settings, "7b-layers", torch.bfloat16)
        layers = _shape(settings, "7b-layers")["num_hidden_layers"]
        part = {"sources": [{"model": "7b-layers", "layer_range": [0, layers]}]}
        compose(store, parse({"slices": [part] * REPEATS}), "7b")
    return {"bytes": _bytes_below(base), "layers": layers * REPEATS}


def folder_of(settings: RunSettings, name: str) -> Path:
    """Return the folder with a model's checkpoint or adapter."""
    return settings.folder / "models" / name


def _shape(settings: RunSettings, name: str) -> Mapping[str, int]:
    return (SMALL if settings.small else SHAPES)[name]


def _make_base(store: Store, settings: RunSettings, name: str, dtype: torch.dtype) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**_shape(settings, name), max_position_embeddings=4096, tie_word_embeddings=False, dtype=dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(settings.device):  # a GPU draws random weights in no time
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    path = folder_of(settings, name)
    model.save_pretrained(path)
    ingest(store, open_source(str(path)), name=name)
    return path


def _make_lora(store: Store, folder: Path, base: Path, name: str, seed: int, dtype: torch.dtype) -> None:
    """Write a LoRA of rank 16 on all linear layers, without loading its base."""
    from safetensors.torch import save_file

    config = json.loads((base / "config.json").read_text())
    hidden, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv = config["num_key_value_heads"] * (hidden // heads)
    outputs = dict(zip(_ALL, (hidden, kv, kv, hidden, ffn, ffn, hidden), strict=True))
    made, draws = {}, torch.Generator().manual_seed(seed)
    for layer in range(config["num_hidden_layers"]):
        for target in _ALL:
            part = "self_attn" if target in _ALL[:4] else "mlp"
            key = f"base_model.model.model.layers.{layer}.{part}.{target}"
            inputs = ffn if target == "down_proj" else hidden
            made[f"{key}.lora_A.weight"] = (torch.randn(16, inputs, generator=draws) / inputs**0.5).to(dtype)
            made[f"{key}.lora_B.weight"] = (torch.randn(outputs[target], 16, generator=draws) * 0.02).to(dtype)
    path = folder / "models" / name
    path.mkdir(parents=True)
    save_file(made, path / "adapter_model.safetensors", {"format": "pt"})
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 16, "lora_alpha": 16, "target_modules": list(_ALL)}
    (path / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": str(base)}))
    ingest(store, open_source(str(path)), name=name, base=base.name)


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
