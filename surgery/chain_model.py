"""A chain of its own kind as a `PreTrainedModel`: generate, Trainer, peft and lm-eval work on it, and its exports load again.

    import zoo.integrations                                  # makes the architecture known to transformers
    AutoModelForCausalLM.from_pretrained("exported-chain")

The weights on disk are keyed `parts.<i>.<name within the component>`, as `surgery.making` writes them. Knows nothing of the store.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from surgery.chains import CHAIN, STITCH, parse_chain
from surgery.cut import layer_kinds
from surgery.families import family_of
from surgery.specs import spec_of
from surgery.stack import Stack, assemble
from zoo.errors import MalformedCheckpoint
from zoo.manifest import Component, Placed, canonical_json

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class BlockZooChainConfig(PretrainedConfig):  # type: ignore[misc]
    """The config of a chain (`surgery.chains`): `sources`, whole configs, and `chain`, one entry per component."""

    model_type = CHAIN

    def __init__(self, sources: list[dict[str, Any]] | None = None, chain: list[dict[str, Any]] | None = None, **kwargs: Any) -> None:
        self.sources = sources or []
        self.chain = chain or []
        self.vocab_size = kwargs.pop("vocab_size", None)
        self.max_position_embeddings = kwargs.pop("max_position_embeddings", None)
        self.num_hidden_layers = kwargs.pop("num_hidden_layers", 0)
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)


class BlockZooChainForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A stack behind transformers' interface. Use `from_stack` or `from_pretrained`."""

    config_class = BlockZooChainConfig
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_cache_class = True
    _no_split_modules = ("AttentionHalf", "ResidualHalf", "WholeLayer")

    def __init__(self, config: BlockZooChainConfig, stack: Stack) -> None:
        super().__init__(config)
        self.stack = stack

    @classmethod
    def from_stack(cls, config: dict[str, Any], stack: Stack, generation: dict[str, Any] | None = None) -> BlockZooChainForCausalLM:
        """Wrap a stack. `config`: the chain's `config.json`; `generation`: its `generation_config.json`."""
        made = cls(BlockZooChainConfig.from_dict(config), stack)
        if generation is not None:
            made.generation_config = GenerationConfig.from_dict(generation)
        made.eval()
        return made

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> BlockZooChainForCausalLM:
        """Load an exported chain from a local folder. `dtype` (or `torch_dtype`) casts; other loading options are not offered.

        Raises:
            MalformedCheckpoint: the folder holds no chain, or its weights do not fit it.
        """
        folder = Path(pretrained_model_name_or_path)
        if not (folder / "config.json").is_file():
            raise MalformedCheckpoint(f"{folder} holds no config.json: chains load from local folders")
        config = json.loads((folder / "config.json").read_text())
        weights = _read_weights(folder)
        dtype = _dtype(kwargs.get("dtype", kwargs.get("torch_dtype")))
        if dtype is not None:
            weights = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in weights.items()}
        plan = parse_chain(config)
        stack = assemble(plan, _placed(config, weights), weights)
        path = folder / "generation_config.json"
        return cls.from_stack(config, stack, json.loads(path.read_text()) if path.is_file() else None)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Write `config.json`, `generation_config.json` and one safetensors file in the form that `from_pretrained` reads.

        Raises:
            MalformedCheckpoint: a component keeps its weights in another form than its checkpoint (stacked experts).
        """
        from safetensors.torch import save_file

        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {key: tensor.detach().cpu().clone() for key, tensor in self.stack.named_tensors().items()}
        save_file(tensors, folder / _SINGLE, metadata={"format": "pt"})
        config = {**self.config.to_dict(), "model_type": CHAIN, "architectures": [type(self).__name__]}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if self.generation_config is not None:
            self.generation_config.save_pretrained(folder)

    def get_input_embeddings(self) -> Any:
        return self.stack.parts[0].table

    def get_output_embeddings(self) -> Any:
        return self.stack.parts[self.stack.end].head

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As every causal language model of transformers: ids [B, T] -> logits [B, T, vocabulary], loss where labels are given."""
        if input_ids is None:
            raise ValueError("a chain runs on input_ids")
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        stack = self.stack
        course = stack.course(input_ids, attention_mask, past_key_values, position_ids)
        states: list[Tensor] = []
        hidden = input_ids
        for index in range(stack.end):
            hidden = stack.run(hidden, course, index, index + 1)
            if output_hidden_states:
                states.append(hidden)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = stack.head(hidden[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **_loss_kwargs(kwargs))
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values, hidden_states=tuple(states) or None)


def _loss_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """What Trainer passes through the model to the loss."""
    return {key: value for key, value in kwargs.items() if key in ("num_items_in_batch", "ignore_index")}


def _dtype(value: Any) -> torch.dtype | None:
    if value is None or value == "auto" or isinstance(value, torch.dtype):
        return None if value == "auto" else value
    found = getattr(torch, str(value), None)
    if not isinstance(found, torch.dtype):
        raise MalformedCheckpoint(f"{str(value)[:40]!r} is no dtype")
    return found


def _read_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    if (folder / _SINGLE).is_file():
        return dict(load_file(folder / _SINGLE))
    if not (folder / _INDEX).is_file():
        raise MalformedCheckpoint(f"{folder} holds no {_SINGLE} and no {_INDEX}")
    names = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
    if any("/" in name or "\\" in name or name.startswith(".") for name in names):
        raise MalformedCheckpoint(f"{_INDEX} names files outside its folder")
    return {key: tensor for name in names for key, tensor in load_file(folder / name).items()}


def _placed(config: dict[str, Any], weights: dict[str, Tensor]) -> tuple[Placed, ...]:
    """The components that config and keys describe. Their "digests" are the keys themselves: only `assemble` reads them."""
    plan = parse_chain(config)
    names: list[dict[str, str]] = [{} for _ in plan.links]
    for key in weights:
        head, at, name = [*key.split(".", 2), "", ""][:3]
        if head != "parts" or not at.isdecimal() or int(at) >= len(names):
            raise MalformedCheckpoint(f"tensor {key[:100]!r} has no place in a chain of {len(names)} components")
        names[int(at)][name] = key
    placed = []
    for index, link in enumerate(plan.links):
        tensors = tuple(sorted(names[index].items()))
        if link.source is None:
            entry = config["chain"][index]
            spec = canonical_json({"in": entry["in"], "out": entry["out"], "position": entry["position"]})
            placed.append(Placed(None, Component("stitch", STITCH, spec, tensors)))
            continue
        source = plan.sources[link.source]
        family = family_of(source)
        if link.kind not in ("embedding", "lm_head", *layer_kinds(family)):
            raise MalformedCheckpoint(f"component {index} of the chain is a {link.kind}, which {family.name} models do not have")
        spec = canonical_json(spec_of(source, family, link.kind, link.layer))
        placed.append(Placed(link.layer, Component(link.kind, family.name, spec, tensors)))
    return tuple(placed)


def register() -> None:
    """Make the architecture known to transformers' automatic classes. Registering twice does no harm."""
    AutoConfig.register(CHAIN, BlockZooChainConfig, exist_ok=True)
    AutoModelForCausalLM.register(BlockZooChainConfig, BlockZooChainForCausalLM, exist_ok=True)
