"""A transformers model as the source of components' modules, without weights or around a loaded one.

Holds each family's module names, and chooses the attention function that a model without weights calls. It does not
depend on the store or on tensors' bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from surgery.families.plain import PlainSettings
from surgery.families.table import DENSE_ONLY, FAMILIES, Family, family_of
from surgery.modules.components import (
    AttentionHalf,
    Embedding,
    LmHead,
    OptFfn,
    OptPositions,
    ResidualHalf,
    WholeLayer,
)
from surgery.modules.masked import Alibi, alibi_of, masked_part
from surgery.modules.plain import PlainModel, PlainRotary
from zoo.errors import NotServable
from zoo.manifest import ComponentKind


@dataclass(frozen=True, slots=True)
class _Half:
    """Names of a half's modules within a layer."""

    body: str
    pre: str | None = None
    post: str | None = None


_PRE_NORM = (_Half("self_attn", "input_layernorm"), _Half("mlp", "post_attention_layernorm"))

#: (attention, ffn) by family. Families cut at whole layers, and OPT, where the config places the norms, are handled
#: separately.
_HALVES: Mapping[str, tuple[_Half, _Half]] = {
    "llama": _PRE_NORM,
    "mistral": _PRE_NORM,
    "qwen2": _PRE_NORM,
    "qwen3": _PRE_NORM,
    "phi3": _PRE_NORM,
    "mixtral": _PRE_NORM,
    "gemma2": (
        _Half("self_attn", "input_layernorm", "post_attention_layernorm"),
        _Half("mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    "glm4": (
        _Half("self_attn", "input_layernorm", "post_self_attn_layernorm"),
        _Half("mlp", "post_attention_layernorm", "post_mlp_layernorm"),
    ),
    "olmo2": (_Half("self_attn", None, "post_attention_layernorm"), _Half("mlp", None, "post_feedforward_layernorm")),
    "gpt2": (_Half("attn", "ln_1"), _Half("mlp", "ln_2")),
}


def halves_of(family: str, kind: ComponentKind) -> tuple[str, str]:
    """Return the names of a half's sub-layer and of the norm before it, within a layer.

    Raises NotServable if the family has no such norm.
    """
    half = _HALVES[family][0 if kind == "attention" else 1] if family in _HALVES else None
    if half is None or half.pre is None:
        raise NotServable(f"{family}: its layers do not norm before their sub-layers")
    return half.body, half.pre


class Skeleton:
    """A transformers model on the meta device: modules without weights, and rotary tables with their values.

    Args:
        config: The model's `config.json`.
        attention: Name of the attention function (registered with transformers) that its layers call.
        masked: Whether the caller can give layers an explicit mask and a cache, for families that compute attention
            themselves.

    Raises:
        NotServable: The family's layers do not use the attention interface, and `masked` is false.
    """

    def __init__(self, config: Mapping[str, Any], attention: str = "sdpa", masked: bool = False) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        self.family: Family = family_of(config) if masked else _served_family(config)
        if self.family.masked:
            attention = (
                "sdpa" if self.family.name == "falcon" else "eager"
            )  # falcon has one class for both; the rest support eager only
        cleaned = {key: value for key, value in config.items() if key not in ("auto_map", "quantization_config")}
        self.config = CONFIG_MAPPING[self.family.name].from_dict(cleaned)
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(self.config, attn_implementation=attention).eval()
        self.stem = self.model.get_submodule(self.family.prefix.rstrip("."))
        self.rotary = _real_rotary(self.stem, self.config)
        self.alibi: Alibi | None = alibi_of(self.family.name, self.config)

    @classmethod
    def of_parts(cls, plain: PlainSettings) -> Skeleton:
        """Return a skeleton for callers that use only the parts of plain halves (`surgery.modules.plain`).

        It does not need transformers.
        """
        made = cls.__new__(cls)
        made.family, made.config, made.alibi = FAMILIES[plain.family], plain, None
        with torch.device("meta"):
            made.model = PlainModel(plain).eval()
        made.stem, made.rotary = made.model.model, PlainRotary(plain)
        return made

    @classmethod
    def around(cls, model: Any) -> Skeleton:
        """Return the parts of a loaded model, with its weights (and adapters injected by peft).

        Raises:
            NotServable: As the constructor, and for virtual tokens around the model, which belong to no component.
        """
        if hasattr(model, "prompt_encoder"):
            raise NotServable(
                "this model begins with virtual tokens (prompt or prefix tuning): its components alone are not the "
                "model"
            )
        made = cls.__new__(cls)
        made.family = _served_family(model.config.to_dict())
        made.config = model.config
        made.model = model
        made.stem = model.get_submodule(made.family.prefix.rstrip("."))
        made.rotary = getattr(made.stem, "rotary_emb", None)
        made.alibi = None
        return made

    def layer(self, index: int) -> nn.Module:
        layer: nn.Module = self.stem.get_submodule(f"{self.family.stack}.{index}")
        return layer

    def part(self, kind: ComponentKind, layer: int | None) -> nn.Module:
        """Return the runnable module of one component, with its parameters still on meta."""
        if kind == "embedding":
            return self._embedding()
        if kind == "lm_head":
            return self._head()
        if layer is None:
            raise ValueError(f"a component of kind {kind} needs a layer")
        if self.family.masked:
            return masked_part(self.family.name, kind, self.layer(layer), self.alibi)
        if kind == "layer":
            return WholeLayer(self.layer(layer), "layer_past" if self.family.name == "gpt_neox" else "past_key_values")
        return self._half(kind, layer)

    def owner(self, kind: ComponentKind, layer: int | None) -> nn.Module:
        """Return the module that a component's tensor names are relative to."""
        return self.stem if layer is None else self.layer(layer)

    def _embedding(self) -> nn.Module:
        name = self.family.embedding[0]
        table = self.stem.get_submodule(name)
        if hasattr(table, "scalar_embed_scale") and table.embed_scale.is_meta:
            table.embed_scale = torch.tensor(table.scalar_embed_scale)
        positions: nn.Module | None = None
        if self.family.name == "gpt2":
            positions = self.stem.get_submodule("wpe")
        elif self.family.name == "opt":
            positions = OptPositions(self.stem.get_submodule("embed_positions"))
        norm = getattr(self.stem, "word_embeddings_layernorm", None)
        return Embedding(table, positions, getattr(self.stem, "project_in", None), norm)

    def _head(self) -> nn.Module:
        norm = getattr(self.stem, self.family.final[0], None)
        softcap = getattr(self.config, "final_logit_softcapping", None)
        return LmHead(norm, getattr(self.stem, "project_out", None), self.model.lm_head, softcap)

    def _half(self, kind: ComponentKind, index: int) -> nn.Module:
        layer = self.layer(index)
        if self.family.name == "opt":
            return _opt_half(layer, kind)
        half = _HALVES[self.family.name][0 if kind == "attention" else 1]
        pre, post = (None if name is None else layer.get_submodule(name) for name in (half.pre, half.post))
        shape = AttentionHalf if kind == "attention" else ResidualHalf
        return shape(layer.get_submodule(half.body), pre, post, None)


def _served_family(config: Mapping[str, Any]) -> Family:
    family = family_of(config)
    if family.masked:
        raise NotServable(f"{family.name}: {DENSE_ONLY}")
    return family


def _opt_half(layer: Any, kind: ComponentKind) -> nn.Module:
    norm = layer.self_attn_layer_norm if kind == "attention" else layer.final_layer_norm
    pre, after = (norm, None) if layer.do_layer_norm_before else (None, norm)
    if kind == "attention":
        return AttentionHalf(layer.self_attn, pre, None, after)
    return ResidualHalf(OptFfn(layer), pre, None, after)


def _real_rotary(stem: Any, config: Any) -> nn.Module | None:
    """Return a rotary module with computed tables: those made on the meta device hold no data."""
    rotary = getattr(stem, "rotary_emb", None)
    return None if rotary is None else type(rotary)(config=config)
