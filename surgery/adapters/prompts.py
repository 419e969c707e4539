"""Place PEFT's adapters of virtual tokens on their base's components (BL-03): prompt tuning, p-tuning, prefix tuning.

    prompt_embeddings [virtual, width]                   prompt, p-tuning: embeddings of tokens placed before every
                                                         prompt
    prompt_embeddings [virtual, 2 * layers * kv width]   prefix: their K and V of each layer as in a KV cache, already
                                                         rotated

A sequence of such a model begins with this number of virtual positions; its prompt follows them. peft saves the output
of its encoders, so projections and LSTMs need not be run. Works on names and shapes only; the reference is what peft
0.21 does with the same folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from surgery.adapters.fields import count
from surgery.adapters.overlay import AdapterBase, OfferedTensor, Overlay
from surgery.families.shapes import dims_of
from zoo.errors import MalformedCheckpoint, UnsupportedAdapter, WrongBase
from zoo.manifest import Placed

_KEY = "prompt_embeddings"


@dataclass(frozen=True)
class PromptConfig:
    """The part of the config that inference depends on.

    Fields:
        virtual: Number of virtual tokens.
        layers: Number of layers; None if the base decides, as for `width` and `heads`.
        heads: Number of K and V heads; for a prefix only.
    """

    virtual: int
    layers: int | None
    width: int | None
    heads: int | None

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> PromptConfig:
        """Read an `adapter_config.json`.

        Raises:
            UnsupportedAdapter: Another task than causal language modelling, or whole modules beside the virtual tokens.
            MalformedCheckpoint: Values of the wrong type.
        """
        if config.get("task_type") != "CAUSAL_LM":
            raise UnsupportedAdapter(
                f"this adapter's task_type is {str(config.get('task_type'))[:40]!r}; only CAUSAL_LM is supported"
            )
        if config.get("num_transformer_submodules") not in (None, 1):
            raise UnsupportedAdapter(
                "this adapter's num_transformer_submodules is not 1, which only encoder-decoders have"
            )
        if config.get("modules_to_save"):
            raise UnsupportedAdapter("virtual tokens together with modules_to_save are not supported")
        sizes = {name: config.get(name) for name in ("num_layers", "token_dim", "num_attention_heads")}
        layers, width, heads = (None if value is None else count(value, name) for name, value in sizes.items())
        return cls(count(config.get("num_virtual_tokens"), "num_virtual_tokens"), layers, width, heads)


def place_prompt(config: PromptConfig, offered: Mapping[str, OfferedTensor], base: AdapterBase) -> tuple[Placed, ...]:
    """Place prompt embeddings on a base.

    Its embedding gets an `Adapter(kind="prompt")` with the config `{"virtual": tokens}`.

    Raises:
        WrongBase: The embeddings do not have the base's width.
        MalformedCheckpoint: Keys that PEFT would not write, or another shape than the config says.
    """
    over = Overlay(base)
    table = f"{over.family.prefix}{over.family.embedding[0]}"
    width = over.shape(over.spot(table), table)[1]
    tensor = _only(config, offered)
    if tensor.shape != (config.virtual, width):
        raise WrongBase(
            f"{_KEY} have shape {list(tensor.shape)}; for {base.name} they must be {[config.virtual, width]}"
        )
    over.add(("embedding", None), {_KEY: tensor.digest}, {"virtual": config.virtual})
    return over.finished("prompt")


def place_prefix(config: PromptConfig, offered: Mapping[str, OfferedTensor], base: AdapterBase) -> tuple[Placed, ...]:
    """Place a prefix on a base. Raises as `place_prompt`.

    Every attention gets an `Adapter(kind="prefix")` with the same tensor and the config `{"virtual": tokens, "layer":
    index among the attentions, "layers": number of attentions}`.
    """
    over = Overlay(base)
    tensor = _only(config, offered)
    attends = [placed for placed in base.components if placed.component.kind in ("attention", "layer")]
    _check_geometry(config, tensor, over, len(attends))
    for number, placed in enumerate(attends):
        settings = {"virtual": config.virtual, "layer": number, "layers": len(attends)}
        over.add((placed.component.kind, placed.layer), {_KEY: tensor.digest}, settings)
    return over.finished("prefix")


def _check_geometry(config: PromptConfig, tensor: OfferedTensor, over: Overlay, layers: int) -> None:
    if config.layers not in (None, layers):
        raise WrongBase(f"the prefix is for {config.layers} layers, {over.base.name} has {layers}")
    width, heads = config.width, config.heads
    dims = dims_of(over.base.config, over.family)
    if dims is not None and not over.family.masked:
        if heads not in (None, dims.kv_heads) or width not in (None, dims.kv):
            raise WrongBase(
                f"the prefix has {heads} heads, {width} wide together; {over.base.name} has {dims.kv_heads}, "
                f"{dims.kv} wide"
            )
        width = dims.kv
    if width is None or tensor.shape != (config.virtual, 2 * layers * width):
        raise WrongBase(
            f"{_KEY} have shape {list(tensor.shape)}; for {over.base.name} and {config.virtual} virtual tokens they "
            "must be "
            f"{[config.virtual, 2 * layers * (width or 0)]}"
        )


def _only(config: PromptConfig, offered: Mapping[str, OfferedTensor]) -> OfferedTensor:
    """Return the only tensor that the file may hold."""
    for key in sorted(offered):
        if key != _KEY:
            raise MalformedCheckpoint(
                f"{key[:200]!r} is not a key that PEFT writes for virtual tokens: {_KEY} is the only one"
            )
    tensor = offered[_KEY]
    if len(tensor.shape) != 2 or tensor.shape[0] != config.virtual:
        raise MalformedCheckpoint(
            f"{_KEY} have shape {list(tensor.shape)}, but the config says num_virtual_tokens {config.virtual}"
        )
    return tensor


def virtual_tokens(components: Iterable[Placed]) -> int:
    """Return the number of virtual tokens before every prompt of a model with these components; 0 for most models."""
    for placed in components:
        adapter = placed.component.adapter
        if adapter is not None and adapter.kind in ("prompt", "prefix"):
            return int(json.loads(adapter.config)["virtual"])
    return 0
