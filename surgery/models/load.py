"""Load a stored model as a working `PreTrainedModel`, for Trainer, peft, generate and lm-eval.

The weights go through transformers' own loading, under their names on disk; on a CPU they are mapped, not copied. An
adapter's model is its base with the adapter injected by peft; with virtual tokens, peft's model around the base.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from surgery.adapters.bottleneck_module import hook_bottlenecks
from surgery.chains.plan import is_chain
from surgery.families.quantized import why_not_computed
from surgery.families.settings import config_of, side_json
from surgery.families.table import FAMILIES, Family
from surgery.ingest.cut import disk_key
from surgery.quantize.decompress import decompressed
from surgery.tensors.pool import dtype_of, stored_tensor, stored_tensors
from zoo.errors import InputError, NotServable, WrongBase
from zoo.manifest import ModelKind, ModelManifest, Placed
from zoo.store import Store

#: Kinds with files that hold only an adapter: the weights are the base's, and peft adds the adapter.
ADAPTERS: frozenset[ModelKind] = frozenset({"lora", "ia3", "ln", "prompt", "prefix", "adapter", "delta"})
#: Kinds that are not part of any module: the model is peft's own, with the base inside.
_VIRTUAL: frozenset[ModelKind] = frozenset({"prompt", "prefix"})
#: Fields of peft's configs that exclude some of the modules that `target_modules` names.
_SELECTING = frozenset({"exclude_modules", "layers_to_transform", "layers_pattern"})
#: A key of a tensor that peft adds to a module.
_PART = re.compile(r"(?P<module>.+)\.(lora_A|lora_embedding_A|ia3_l|ln_tuning_layers)(\..+)?")


def load_model(
    store: Store, manifest: ModelManifest, device: str = "cpu", dtype: str | torch.dtype | None = None
) -> Any:
    """Return the model, in eval mode.

    Args:
        dtype: Cast to this dtype ("bfloat16" or a torch dtype); None keeps the stored one.

    Raises:
        DamagedObject: A stored tensor does not match its digest.
        InputError: An unknown dtype, or a stitch, which is not a model by itself.
    """
    kind = None if dtype is None else dtype_of(dtype)
    if manifest.kind == "lengths":
        raise InputError(f"{manifest.name} predicts lengths of answers: it is not a model")
    if manifest.kind == "stitch":
        raise InputError(
            f"{manifest.name} is a stitch, not a model: `zoo compose` puts it between the layers of two models"
        )
    config = config_of(store, manifest)
    if is_chain(config):
        return _chain_model(store, manifest, config, kind).to(device)
    model = _full_model(store, manifest, kind)
    if manifest.kind in ADAPTERS:
        model = (
            _bottlenecked(store, manifest, model) if manifest.kind == "adapter" else _adapted(store, manifest, model)
        )
    return model.to(device).eval()


def load_chain(store: Store, manifest: ModelManifest) -> Any:
    """Return a model of a checkpoint's family from the weights of its components, without their adapters.

    Raises as `load_model`.
    """
    return _full_model(store, dataclasses.replace(manifest, kind="delta"), None).eval()


def _chain_model(store: Store, manifest: ModelManifest, config: dict[str, Any], dtype: torch.dtype | None) -> Any:
    from surgery.chains.hf_model import BlockZooChainForCausalLM
    from surgery.modules.stack import build_stack

    generation = side_json(store, manifest, "generation_config.json")
    return BlockZooChainForCausalLM.from_stack(config, build_stack(store, manifest, dtype), generation).requires_grad_(
        True
    )


def _full_model(store: Store, manifest: ModelManifest, dtype: torch.dtype | None) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    given = config_of(store, manifest)
    if reason := why_not_computed(given):
        raise NotServable(f"{manifest.name}: {reason}")
    settings = {key: value for key, value in given.items() if key not in ("auto_map", "quantization_config")}
    config = CONFIG_MAPPING[manifest.family].from_dict(settings)
    encoded = "quantization_config" in given or any(file.is_encoded for file in manifest.weight_files)
    own = manifest.kind not in ADAPTERS and not encoded
    state = (
        _files_state(store, manifest) if own else _chain_state(store, manifest.components, FAMILIES[manifest.family])
    )
    wanted = dtype or max(state.values(), key=torch.numel).dtype
    # Use the class for this config: unlike the Auto class, it accepts a state dict without a folder.
    architecture = AutoModelForCausalLM._model_mapping[type(config)]
    model = architecture.from_pretrained(None, config=config, state_dict=state, dtype=wanted)
    generation = side_json(store, manifest, "generation_config.json")
    if generation is not None:
        model.generation_config = GenerationConfig.from_dict(generation)
    return model


def _files_state(store: Store, manifest: ModelManifest) -> dict[str, torch.Tensor]:
    """Return every tensor under its key on disk."""
    return _state(store, [entry for file in manifest.weight_files for entry in file.entries])


def _chain_state(store: Store, components: Iterable[Placed], family: Family) -> dict[str, torch.Tensor]:
    """Return the weights of a chain, decompressed, under the names of a checkpoint of the family."""
    placed = list(components)
    read = iter(stored_tensors(store, [digest for each in placed for _, digest in each.component.tensors]))
    state: dict[str, torch.Tensor] = {}
    for each in placed:
        weights = decompressed(each.component, {name: next(read) for name, _ in each.component.tensors})
        state.update((disk_key(family, each.layer, name), tensor) for name, tensor in weights.items())
    return state


def _state(store: Store, entries: Sequence[tuple[str, str]]) -> dict[str, torch.Tensor]:
    tensors = stored_tensors(store, [digest for _, digest in entries])
    return {key: tensor for (key, _), tensor in zip(entries, tensors, strict=True)}


def _adapted(store: Store, manifest: ModelManifest, model: Any) -> Any:
    """Return the base with the adapter added by peft. Raises WrongBase if a tensor finds no place."""
    from peft import PeftConfig, get_peft_model, inject_adapter_in_model, set_peft_model_state_dict

    settings = side_json(store, manifest, "adapter_config.json")
    if settings is None:
        raise InputError(f"{manifest.name} has no adapter_config.json")
    state = {key.removeprefix("base_model.model."): tensor for key, tensor in _files_state(store, manifest).items()}
    if manifest.kind in _VIRTUAL:
        model = get_peft_model(model, PeftConfig.from_peft_type(**{**settings, "inference_mode": True}))
    else:
        config = PeftConfig.from_peft_type(**{**_named(settings, state), "inference_mode": True})
        inject_adapter_in_model(config, model, adapter_name="default")
    outcome = set_peft_model_state_dict(model, state, adapter_name="default")
    if (
        outcome.unexpected_keys and manifest.kind not in _VIRTUAL
    ):  # peft also reports the virtual tokens, which it has loaded, as unexpected
        raise WrongBase(f"{manifest.name}: {outcome.unexpected_keys[0]} has no place in its base")
    return model


def _named(settings: Mapping[str, Any], state: Iterable[str]) -> dict[str, Any]:
    """Return an adapter's config with its targets replaced by the modules that its keys name.

    The targets in the config may be an untrusted regular expression.
    """
    found = sorted({match["module"] for match in map(_PART.fullmatch, state) if match})
    changes: dict[str, Any] = dict.fromkeys(_SELECTING & settings.keys())
    inputs = settings.get("feedforward_modules")
    if isinstance(inputs, list):  # peft requires them to be among the targets, under the same names
        changes["feedforward_modules"] = [module for module in found if module.endswith(tuple(inputs))]
    if found or isinstance(settings.get("target_modules"), str):  # otherwise the adapter holds whole tensors only
        changes["target_modules"] = found
    return {**settings, **changes}


def _bottlenecked(store: Store, manifest: ModelManifest, model: Any) -> Any:
    """Return the base with hooks: the `adapters` library itself needs another version of transformers."""
    hook_bottlenecks(model, manifest.family, manifest.components, lambda digest: stored_tensor(store, digest))
    return model
