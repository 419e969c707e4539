"""Write a model as a folder for stock vLLM: config, tokenizer and `blockzoo.json`, but no weights.

    zoo export NAME DIR --for vllm          vllm serve DIR          (with this package installed beside vLLM)

Any stored model that is a checkpoint of one architecture goes through vLLM's own model classes. A chain of several
models (`blockzoo_chain`) runs as `surgery.vllm.chain_model`, for the families there. A LoRA is added to its base's
weights when they are read; to switch between LoRAs, serve the base so and its LoRAs as PEFT folders (`zoo export`).

Needs no torch and no vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surgery.chains.files import part_key
from surgery.chains.plan import ChainPlan, is_chain, parse_chain
from surgery.families.settings import config_of, context_length
from surgery.families.table import FAMILIES, family_of
from surgery.ingest.cut import disk_key
from surgery.models.export import ExportReport, appearing, checked_path, write_file
from surgery.vllm.stored_weights import FILE, LowRankPart, StoredWeights
from zoo.errors import NotServable
from zoo.manifest import ModelManifest, Placed
from zoo.store import Store

#: Families of the components that `surgery.vllm.chain_model` builds from vLLM's modules.
CHAIN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
#: Kinds of models with adapters that change more than weights.
_NOT_WEIGHTS = frozenset({"prompt", "prefix", "adapter", "ia3"})
#: Torch's names of the dtypes that vLLM computes in.
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: Side files that would let a reader look for weight files or an adapter.
_LEFT_OUT = ("config.json", "adapter_config.json")


def export_for_vllm(store: Store, name: str, folder: Path) -> ExportReport:
    """Write a model's folder for vLLM. The folder appears whole or not at all.

    Args:
        name: The model's name or a unique ending of it.

    Raises:
        NotServable: vLLM cannot run it: adapters that are no weights, DoRA, chains of other families.
        InputError: The folder is not empty or cannot be made.
        As `surgery.models.export.export`.
    """
    target = folder.expanduser().absolute()
    with store.keeping():
        with store.catalog.reading() as reader:
            manifest = reader.model(reader.resolve(name))
        if manifest.kind in ("stitch", "lengths", *_NOT_WEIGHTS):
            raise NotServable(f"{manifest.name}: vLLM runs models and LoRAs, not a {manifest.kind}")
        config = config_of(store, manifest)
        plan = parse_chain(config) if is_chain(config) else None
        weights = StoredWeights(manifest.name, store.root, *_weights(manifest, plan))
        contents = {FILE: weights.encode(), "config.json": _json(_config(config, plan, manifest))}
        for side in manifest.side_files:
            if side.path not in _LEFT_OUT and not side.path.endswith(".index.json"):
                contents[checked_path(side.path)] = store.read_blob(side.blob)
        with appearing(target) as made:
            sizes = {path: write_file(made / path, [content]) for path, content in sorted(contents.items())}
    return ExportReport(manifest.name, tuple(sizes), sum(sizes.values()))


def _weights(manifest: ModelManifest, plan: ChainPlan | None) -> tuple[dict[str, str], dict[str, LowRankPart]]:
    """Return key -> digest, and key -> low-rank part."""
    tensors: dict[str, str] = {}
    low_rank: dict[str, LowRankPart] = {}
    for at, placed in enumerate(manifest.components):
        for name, digest in placed.component.tensors:
            tensors[_key(placed, at, name, plan)] = digest
        for name, part in _low_rank(manifest.name, placed):
            low_rank[_key(placed, at, f"{name}.weight", plan)] = part
    return tensors, low_rank


def _key(placed: Placed, at: int, name: str, plan: ChainPlan | None) -> str:
    if plan is not None:
        return part_key(at, name)
    return disk_key(FAMILIES[placed.component.family], placed.layer, name)


def _low_rank(model: str, placed: Placed) -> list[tuple[str, LowRankPart]]:
    adapter = placed.component.adapter
    if adapter is None:
        return []
    if adapter.kind != "lora":
        raise NotServable(f"{model}: vLLM runs models and LoRAs, not adapters of kind {adapter.kind}")
    named = dict(adapter.tensors)
    parts = []
    for module, how in json.loads(adapter.config)["modules"].items():
        if how.get("dora") or how.get("embedding") or f"{module}.lora_B.bias" in named:
            raise NotServable(f"{model}: the adapter on {module} is more than a low-rank part of its weight")
        a, b = (named[f"{module}.lora_{side}.weight"] for side in "AB")
        parts.append((module, LowRankPart(a, b, float(how["scaling"]), bool(how.get("fan_in_fan_out")))))
    return parts


def _config(config: Mapping[str, Any], plan: ChainPlan | None, manifest: ModelManifest) -> dict[str, Any]:
    largest = max(manifest.tensors, key=lambda tensor: tensor.nbytes)
    if largest.dtype not in _DTYPES:
        raise NotServable(f"{manifest.name}: vLLM computes in no such dtype as {largest.dtype}")
    made = {key: value for key, value in config.items() if key not in ("auto_map", "torch_dtype")}
    made["dtype"] = _DTYPES[largest.dtype]
    if plan is None:
        made.setdefault("architectures", [_architecture(manifest.family)])
        return made
    _check_chain(manifest.name, plan)
    # vLLM plans memory by one width and one number of heads; the layers have their own.
    head = plan.sources[plan.links[-1].source or 0]
    named = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    sizes = {key: head[key] for key in named if key in head and key not in made}
    made.setdefault("max_position_embeddings", context_length(config))
    return {**made, **sizes}


def _architecture(family: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])


def _check_chain(name: str, plan: ChainPlan) -> None:
    for config in plan.sources:
        family = family_of(config).name
        if family not in CHAIN_FAMILIES:
            raise NotServable(
                f"{name}: of chains of several models vLLM runs those of {', '.join(CHAIN_FAMILIES)}, not {family}"
            )
        if _has_windows(config, family):
            raise NotServable(f"{name}: in chains of several models vLLM runs layers without sliding windows only")


def _has_windows(config: Mapping[str, Any], family: str) -> bool:
    types: Sequence[str] | None = config.get("layer_types")
    if family == "mistral":
        return config.get("sliding_window", 4096) is not None
    return bool(config.get("use_sliding_window")) or (types is not None and "sliding_attention" in types)


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
