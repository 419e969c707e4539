"""Write a rewriting as a PEFT folder, which `zoo ingest`, `zoo export` and stock peft read.

Ranks differ by matrix (`rank_pattern`), the scaling is 1 (`alpha_pattern` equals it), whole modules are
`modules_to_save`, and changed biases are stored beside them (`bias`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from surgery.adapters.lora_keys import PREFIX
from surgery.deltas.plan import DeltaMatrix, DeltaPlan, WholeTensor
from surgery.deltas.trial import Sides
from surgery.tensors.pool import stored_tensor
from zoo.manifest import ModelManifest
from zoo.store import Store

#: Files of a fine-tune that its rewriting inherits from its base, or does not have.
_NOT_CARRIED = frozenset({"config.json", "model.safetensors.index.json", "adapter_config.json"})


def write_folder(
    folder: Path,
    store: Store,
    exact: ModelManifest,
    base: str,
    plan: DeltaPlan,
    factors: Sequence[Sides],
    ranks: Sequence[int],
) -> None:
    """Write `adapter_config.json`, `adapter_model.safetensors` and the fine-tune's own side files into `folder`.

    The folder must exist.
    """
    given = [(matrix, rank) for matrix, rank in zip(plan.matrices, ranks, strict=True) if rank]
    low_rank = {matrix.path for matrix, _ in given}
    tensors: dict[str, Tensor] = {}
    for matrix, sides, rank in zip(plan.matrices, factors, ranks, strict=True):
        tensors.update(_low_rank(matrix, sides, rank) if rank else {})
    for whole in plan.wholes:
        tensors[_whole_key(whole, whole.path in low_rank)] = stored_tensor(store, whole.digest).clone()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    text = json.dumps(adapter_config(base, exact.family, given, plan.wholes), indent=2, sort_keys=True)
    (folder / "adapter_config.json").write_text(text + "\n")
    for side in exact.side_files:
        if not side.inherited and side.path not in _NOT_CARRIED:
            path = folder / side.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(store.read_blob(side.blob))


def adapter_config(
    base: str, family: str, given: Sequence[tuple[DeltaMatrix, int]], wholes: Sequence[WholeTensor]
) -> dict[str, Any]:
    """Return the config for peft. `given`: matrices and their ranks, without those of rank 0."""
    usual = Counter(rank for _, rank in given).most_common(1)[0][0]
    pattern = {matrix.path: rank for matrix, rank in given if rank != usual}
    saved = sorted({whole.path for whole in wholes if whole.saved})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": usual,
        "lora_alpha": usual,
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
        "target_modules": sorted(matrix.path for matrix, _ in given),
        "modules_to_save": saved or None,
        "bias": "all" if any(not whole.saved for whole in wholes) else "none",
        "fan_in_fan_out": family == "gpt2",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }


def _low_rank(matrix: DeltaMatrix, sides: Sides, rank: int) -> Mapping[str, Tensor]:
    a, b = sides.a[:rank].clone(), sides.b[:, :rank].contiguous()
    names = ("lora_embedding_A", "lora_embedding_B") if matrix.table else ("lora_A.weight", "lora_B.weight")
    return {f"{PREFIX}{matrix.path}.{name}": side for name, side in zip(names, (a, b), strict=True)}


def _whole_key(whole: WholeTensor, below_low_rank: bool) -> str:
    wrapped = ".base_layer" if below_low_rank else ""
    return f"{PREFIX}{whole.path}{wrapped}.{whole.leaf}"
