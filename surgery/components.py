"""Components as torch modules, made of transformers' own sub-modules: the same operations in the same order as the whole model.

A `Skeleton` is a model without weights; `build` takes the modules of one component out of it and gives them their tensors. Running
all components of a model in order gives the model's logits bit for bit (BL-01).

    embedding(ids, where) -> hidden            ids [1, T] -> [1, T, width]
    attention | ffn | layer(hidden, where)     [1, T, width] -> [1, T, width]
    lm_head(hidden) -> logits                  [.., width] -> [.., vocabulary]

Knows nothing of the store, of batches, caches or adapters; the attention function is chosen by name when the skeleton is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surgery.families import FAMILIES, Family, family_of
from zoo.errors import MalformedCheckpoint, NotServable
from zoo.manifest import Component, ComponentKind


@dataclass(frozen=True, slots=True)
class Where:
    """Where a run's tokens stand: position ids [1, T] and, for rotary families, (cos, sin) of shape [1, T, rotary width]."""

    positions: Tensor
    rotary: tuple[Tensor, Tensor] | None = None


class Embedding(nn.Module):
    """Token ids to hidden states, learned positions included."""

    def __init__(self, table: nn.Module, positions: Callable[[Tensor], Tensor] | None, project: nn.Module | None) -> None:
        super().__init__()
        self.table = table
        self.position_table = positions
        self.project = project

    def forward(self, ids: Tensor, where: Where) -> Tensor:
        hidden: Tensor = self.table(ids)
        if self.project is not None:
            hidden = self.project(hidden)
        if self.position_table is not None:
            hidden = hidden + self.position_table(where.positions)
        return hidden


class _OptPositions(nn.Module):
    """OPT's table hides an offset of two and a mask-driven call: facts, "Cutting transformers models"."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.learned = table

    def forward(self, positions: Tensor) -> Tensor:
        return self.learned(None, 0, position_ids=positions)  # type: ignore[no-any-return]


class ResidualHalf(nn.Module):
    """`hidden + post(body(pre(hidden)))`, then `after`: the one shape of all sequential families; absent norms are None."""

    def __init__(self, body: nn.Module, pre: nn.Module | None, post: nn.Module | None, after: nn.Module | None) -> None:
        super().__init__()
        self.body = body
        self.pre = pre
        self.post = post
        self.after = after

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        out = self.run(hidden if self.pre is None else self.pre(hidden), where)
        if self.post is not None:
            out = self.post(out)
        out = hidden + out
        return out if self.after is None else self.after(out)

    def run(self, hidden: Tensor, where: Where) -> Tensor:
        return self.body(hidden)  # type: ignore[no-any-return]


class AttentionHalf(ResidualHalf):
    """A half whose body is an attention module: it returns (output, weights) and takes rotary embeddings."""

    def run(self, hidden: Tensor, where: Where) -> Tensor:
        return self.body(hidden, position_embeddings=where.rotary, attention_mask=None)[0]  # type: ignore[no-any-return]


class WholeLayer(nn.Module):
    """A layer without a seam (parallel residual)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        out = self.layer(hidden, attention_mask=None, position_ids=where.positions, position_embeddings=where.rotary, use_cache=False)
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]


class Head(nn.Module):
    """Final norm, projection and head; `softcap` as Gemma 2 applies it."""

    def __init__(self, norm: nn.Module | None, project: nn.Module | None, head: nn.Module, softcap: float | None) -> None:
        super().__init__()
        self.norm = norm
        self.project = project
        self.head = head
        self.softcap = softcap

    def forward(self, hidden: Tensor) -> Tensor:
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.project is not None:
            hidden = self.project(hidden)
        logits: Tensor = self.head(hidden)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


class _OptFfn(nn.Module):
    """OPT keeps its two linear layers on the layer itself."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = layer.fc1, layer.activation_fn, layer.fc2

    def forward(self, hidden: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(hidden)))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Half:
    """Names of a half's modules within a layer."""

    body: str
    pre: str | None = None
    post: str | None = None


_PRE_NORM = (_Half("self_attn", "input_layernorm"), _Half("mlp", "post_attention_layernorm"))

#: (attention, ffn) by family; families cut at whole layers and OPT, whose norms move by config, are handled apart.
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


class Skeleton:
    """A transformers model on the meta device: modules without weights, and the real rotary tables.

    Args:
        config: the model's `config.json`.
        attention: name of the attention function (registered with transformers) that its layers call.

    Raises:
        NotServable: the family's layers do not go through the attention interface.
    """

    def __init__(self, config: Mapping[str, Any], attention: str = "sdpa") -> None:
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        self.family: Family = family_of(config)
        if self.family.unserved is not None:
            raise NotServable(f"{self.family.name}: {self.family.unserved}")
        cleaned = {key: value for key, value in config.items() if key not in ("auto_map", "quantization_config")}
        self.config = CONFIG_MAPPING[self.family.name].from_dict(cleaned)
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(self.config, attn_implementation=attention).eval()
        self.stem = self.model.get_submodule(self.family.prefix.rstrip("."))
        self.rotary = _real_rotary(self.stem, self.config)

    def layer(self, index: int) -> nn.Module:
        layer: nn.Module = self.stem.get_submodule(f"{self.family.stack}.{index}")
        return layer

    def part(self, kind: ComponentKind, layer: int | None) -> nn.Module:
        """The runnable module of one component, its parameters still on meta."""
        if kind == "embedding":
            return self._embedding()
        if kind == "lm_head":
            return self._head()
        if layer is None:
            raise ValueError(f"a component of kind {kind} needs a layer")
        if kind == "layer":
            return WholeLayer(self.layer(layer))
        return self._half(kind, layer)

    def owner(self, kind: ComponentKind, layer: int | None) -> nn.Module:
        """The module that a component's tensor names are relative to."""
        return self.stem if layer is None else self.layer(layer)

    def _embedding(self) -> nn.Module:
        name = self.family.embedding[0]
        table = self.stem.get_submodule(name)
        if hasattr(table, "scalar_embed_scale"):
            table.embed_scale = torch.tensor(table.scalar_embed_scale)
        positions: nn.Module | None = None
        if self.family.name == "gpt2":
            positions = self.stem.get_submodule("wpe")
        elif self.family.name == "opt":
            positions = _OptPositions(self.stem.get_submodule("embed_positions"))
        return Embedding(table, positions, getattr(self.stem, "project_in", None))

    def _head(self) -> nn.Module:
        norm = getattr(self.stem, self.family.final[0], None)
        softcap = getattr(self.config, "final_logit_softcapping", None)
        return Head(norm, getattr(self.stem, "project_out", None), self.model.lm_head, softcap)

    def _half(self, kind: ComponentKind, index: int) -> nn.Module:
        layer = self.layer(index)
        if self.family.name == "opt":
            return _opt_half(layer, kind)
        half = _HALVES[self.family.name][0 if kind == "attention" else 1]
        pre, post = (None if name is None else layer.get_submodule(name) for name in (half.pre, half.post))
        shape = AttentionHalf if kind == "attention" else ResidualHalf
        return shape(layer.get_submodule(half.body), pre, post, None)


def _opt_half(layer: Any, kind: ComponentKind) -> nn.Module:
    norm = layer.self_attn_layer_norm if kind == "attention" else layer.final_layer_norm
    pre, after = (norm, None) if layer.do_layer_norm_before else (None, norm)
    if kind == "attention":
        return AttentionHalf(layer.self_attn, pre, None, after)
    return ResidualHalf(_OptFfn(layer), pre, None, after)


def _real_rotary(stem: Any, config: Any) -> nn.Module | None:
    """A rotary module with computed tables: those made on the meta device hold nothing."""
    rotary = getattr(stem, "rotary_emb", None)
    return None if rotary is None else type(rotary)(config=config)


def build(skeleton: Skeleton, component: Component, layer: int | None, tensors: Mapping[str, Tensor]) -> nn.Module:
    """One component as a runnable module.

    Args:
        skeleton: of a model with this component at `layer`; the modules are taken out of it for good.
        tensors: name within the component -> tensor, all that the component lists.

    Raises:
        MalformedCheckpoint: a tensor without a parameter, of another shape, or a parameter left without a tensor.
    """
    module = skeleton.part(component.kind, layer)
    owner = skeleton.owner(component.kind, layer)
    for name, tensor in module_tensors(component.family, tensors).items():
        target = skeleton.model.lm_head if name.startswith("lm_head.") else owner
        _assign(target, name.removeprefix("lm_head."), tensor)
    left = [name for name, value in (*module.named_parameters(), *module.named_buffers()) if value.is_meta]
    if left:
        raise MalformedCheckpoint(f"{component.kind} of layer {layer} has no tensor for {', '.join(sorted(left))}")
    return module.requires_grad_(False)


def _assign(owner: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    try:
        module = owner.get_submodule(path)
        old = getattr(module, leaf)
    except AttributeError:
        raise MalformedCheckpoint(f"the architecture has no parameter {name!r}") from None
    if tuple(old.shape) != tuple(tensor.shape):
        raise MalformedCheckpoint(f"{name!r} has shape {list(tensor.shape)}, the config wants {list(old.shape)}")
    if isinstance(old, nn.Parameter):
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
    else:
        module.register_buffer(leaf, tensor)


def module_tensors(family: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Disk names to module names. Only Mixtral's differ: its experts are single matrices on disk and stacked in memory."""
    if family != "mixtral" or not any(".experts." in name for name in tensors):
        return dict(tensors)
    out: dict[str, Tensor] = {}
    experts: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            index, which, _ = name.split(".experts.")[1].split(".")
            experts.setdefault(int(index), {})[which] = tensor
        else:
            out[name.replace("block_sparse_moe.", "mlp.")] = tensor
    order = [experts[index] for index in sorted(experts)]
    out["mlp.experts.gate_up_proj"] = torch.stack([torch.cat((e["w1"], e["w3"])) for e in order])
    out["mlp.experts.down_proj"] = torch.stack([e["w2"] for e in order])
    return out


def served_families() -> tuple[str, ...]:
    """Families that a paged executor can run."""
    return tuple(name for name, family in FAMILIES.items() if family.unserved is None)
