"""A chain as a `PreTrainedModel`, for generate, Trainer, peft and lm-eval; its exports can be loaded again.

    import zoo.integrations                                  # registers the architecture with transformers
    AutoModelForCausalLM.from_pretrained("exported-chain")

The weights on disk are keyed `parts.<i>.<name within the component>`, as `surgery.models.put` writes them. This module
does not depend on the store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from transformers.utils import can_return_tuple

from surgery.chains.files import check_parts, place_parts
from surgery.chains.plan import CHAIN, is_chain, parse_chain
from surgery.modules.stack import Stack, assemble
from surgery.sources.base import Source
from surgery.sources.local import SINGLE, open_local
from surgery.sources.strict_json import parse_object
from surgery.tensors.pool import dtype_of
from zoo.errors import InputError, MalformedCheckpoint

#: Options of `from_pretrained` that would change what is loaded; they are refused.
_NOT_OFFERED = (
    "quantization_config",
    "load_in_8bit",
    "load_in_4bit",
    "gguf_file",
    "state_dict",
    "output_loading_info",
    "subfolder",
)


class BlockZooChainConfig(PretrainedConfig):  # type: ignore[misc]
    """The config of a chain (`surgery.chains.plan`).

    Fields:
        sources: Whole configs of the models that the components come from.
        chain: One entry per component.
    """

    model_type = CHAIN

    def __init__(
        self, sources: list[dict[str, Any]] | None = None, chain: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> None:
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
    def from_stack(
        cls, config: Mapping[str, Any], stack: Stack, generation: dict[str, Any] | None = None
    ) -> BlockZooChainForCausalLM:
        """Wrap a stack.

        Args:
            config: The chain's `config.json`.
            generation: Its `generation_config.json`.
        """
        made = cls(BlockZooChainConfig.from_dict(dict(config)), stack)
        if generation is not None:
            made.generation_config = GenerationConfig.from_dict(generation)
        made.eval()
        return made

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> BlockZooChainForCausalLM:
        """Load an exported chain from a local folder, for training or inference.

        `dtype` (or `torch_dtype`) casts, `device_map` names one device; other options that would change what is loaded
        are refused.

        Raises:
            MalformedCheckpoint: The folder holds no chain, or its weights do not fit it.
            InputError: An option that is not supported for chains.
        """
        if refused := next((name for name in _NOT_OFFERED if kwargs.get(name)), None):
            raise InputError(f"{refused} is not offered for chains of several models")
        folder = Path(pretrained_model_name_or_path)
        if not folder.is_dir():
            raise MalformedCheckpoint(f"{folder} is no folder: chains load from local folders")
        source = open_local(folder)
        config = source.config or {}
        if source.adapter is not None or not is_chain(config):
            raise MalformedCheckpoint(f"{folder} holds no chain, but {config.get('model_type')!r}")
        check_parts(config, {tensor.key: tensor.shape for tensor in source.tensors()})
        dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
        weights = _read_weights(source, None if dtype in (None, "auto") else dtype_of(dtype))
        # The keys themselves take the place of digests: each component has weights of its own.
        stack = assemble(parse_chain(config), place_parts(config, {key: key for key in weights}), weights)
        generation = source.side("generation_config.json")
        made = cls.from_stack(
            config, stack, None if generation is None else parse_object(generation, "generation_config.json")
        )
        made.requires_grad_(True).to(_device(kwargs.get("device_map")))
        return made

    def save_pretrained(
        self, save_directory: Any, *args: Any, state_dict: Mapping[str, Tensor] | None = None, **kwargs: Any
    ) -> None:
        """Write `config.json`, `generation_config.json` and one safetensors file, readable by `from_pretrained`.

        Args:
            state_dict: This module's state dict, if a trainer gathered it.

        Raises:
            NotServable: A component keeps its weights in another form than its checkpoint (stacked experts).
        """
        from safetensors.torch import save_file

        held = self.state_dict() if state_dict is None else state_dict
        tensors = {key: held[path].detach().cpu().clone() for key, path in self._paths().items()}
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        config = {**self.config.to_dict(), "model_type": CHAIN, "architectures": [type(self).__name__]}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if self.generation_config is not None:
            self.generation_config.save_pretrained(folder)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict; keys as in a chain's files are accepted too, which is how Trainer resumes from them."""
        paths = self._paths() if any(key.startswith("parts.") for key in state_dict) else {}
        return super().load_state_dict(
            {paths.get(key, key): value for key, value in state_dict.items()}, *args, **kwargs
        )

    def _paths(self) -> dict[str, str]:
        """Return key in a chain's files -> key in this module's state dict."""
        own = {id(value): path for path, value in self.state_dict(keep_vars=True).items()}
        return {key: own[id(value)] for key, value in self.stack.named_tensors().items()}

    def get_input_embeddings(self) -> Any:
        return self.stack.parts[0].table

    def get_output_embeddings(self) -> Any:
        return self.stack.parts[self.stack.end].head

    @can_return_tuple  # type: ignore[untyped-decorator]
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
        """Compute ids [B, T] -> logits [B, T, vocabulary], as every causal language model of transformers.

        With `labels` the output also holds the loss.
        """
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
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=past_key_values, hidden_states=tuple(states) or None
        )


def _loss_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that Trainer passes through the model to the loss."""
    return {key: value for key, value in kwargs.items() if key in ("num_items_in_batch", "ignore_index")}


def _device(device_map: Any) -> str | torch.device:
    """Return the one device that a device map names. Raises InputError for several."""
    if device_map is None:
        return "cpu"
    if device_map == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    named = set(device_map.values()) if isinstance(device_map, Mapping) else {device_map}
    if len(named) != 1:
        raise InputError("a chain of several models lies on one device: device_map must name one")
    return torch.device(named.pop())


def _read_weights(source: Source, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return key -> tensor over all files; their headers were checked before."""
    from safetensors.torch import load_file

    weights = {
        key: tensor for file in source.weights for key, tensor in load_file(Path(source.origin, file.path)).items()
    }
    return {
        key: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        for key, tensor in weights.items()
    }


def register() -> None:
    """Register the architecture with transformers' automatic classes. Registering twice is harmless."""
    AutoConfig.register(CHAIN, BlockZooChainConfig, exist_ok=True)
    AutoModelForCausalLM.register(BlockZooChainConfig, BlockZooChainForCausalLM, exist_ok=True)
