"""Make a store with many fine-tunes of one checkpoint: full ones that share the first half of its layers, and LoRAs.

    python -m benchmarks.residency.family FOLDER STORE [--full 40] [--lora 40]

FOLDER is a Llama checkpoint in Hugging Face's layout. A full fine-tune has small noise, deterministic by its number,
on all weights of the second half of the layers; embedding, final norm and head are shared. A LoRA has random A and B
on the attention's matrices. What the models answer is of no use, but each answers differently, so an answer by
weights of another model is noticed. Models that the store already has are not made again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from zoo.api import Zoo

BASE = "base"
#: Noise of a fine-tune, as a share of a weight's standard deviation.
_NOISE = 0.05
_RANK = 8
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def names(full: int, lora: int) -> tuple[str, ...]:
    """Return the names of the fine-tunes, of both kinds in turn; the foundation is not one of them."""
    kinds = [*((number, "full") for number in range(full)), *((number, "lora") for number in range(lora))]
    return tuple(f"{kind}{number:02}" for number, kind in sorted(kinds))


def make(folder: Path, store: Path, full: int, lora: int) -> tuple[str, ...]:
    """Put the foundation and its fine-tunes into a store; return the names of the fine-tunes."""
    wanted = names(full, lora)
    weights = _weights(folder)
    layers = int(json.loads((folder / "config.json").read_text())["num_hidden_layers"])
    with Zoo(store) as zoo, tempfile.TemporaryDirectory(dir=store) as scratch:
        there = {model.name for model in zoo.models()}
        if BASE not in there:
            zoo.ingest(folder, BASE)
        for seed, name in enumerate(wanted):
            if name in there:
                continue
            made = Path(scratch) / name
            if name.startswith("full"):
                _write_full(folder, weights, layers, seed, made)
            else:
                _write_lora(folder, weights, seed, made)
            zoo.ingest(made, name, BASE)
            shutil.rmtree(made)
    return wanted


def _weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _write_full(folder: Path, weights: Mapping[str, Tensor], layers: int, seed: int, made: Path) -> None:
    """Write a checkpoint with the side files of the foundation."""
    shutil.copytree(folder, made, ignore=shutil.ignore_patterns("*.safetensors*"))
    random = torch.Generator().manual_seed(seed)
    moved = dict(weights)
    for name in sorted(weights):
        parts = name.split(".")
        if parts[:2] == ["model", "layers"] and int(parts[2]) >= layers // 2:
            whole = weights[name].float()
            noise = torch.randn(whole.shape, generator=random) * (_NOISE * float(whole.std()))
            moved[name] = (whole + noise).to(weights[name].dtype)
    save_file(moved, made / "model.safetensors", {"format": "pt"})


def _write_lora(folder: Path, weights: Mapping[str, Tensor], seed: int, made: Path) -> None:
    """Write a PEFT folder with an adapter in float32."""
    made.mkdir()
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name in sorted(weights):
        if name.removesuffix(".weight").rpartition(".")[2] not in _TARGETS:
            continue
        rows, columns = weights[name].shape
        path = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{path}.lora_A.weight"] = torch.randn((_RANK, columns), generator=random) / columns**0.5
        tensors[f"{path}.lora_B.weight"] = torch.randn((rows, _RANK), generator=random) * _NOISE
    save_file(tensors, made / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(folder.resolve()),
        "r": _RANK,
        "lora_alpha": _RANK,
        "target_modules": list(_TARGETS),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (made / "adapter_config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("--full", type=int, default=40)
    parser.add_argument("--lora", type=int, default=40)
    given = parser.parse_args()
    print(f"{len(make(given.folder, given.store, given.full, given.lora))} fine-tunes")


if __name__ == "__main__":
    main()
