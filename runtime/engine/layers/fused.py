"""Fused half layers of the common shape: RMSNorm, rotary positions, grouped heads, gated FFN (llama, mistral, qwen).

They compute the same as the stock half in fewer and larger operations (`engine.layers.operations`), without the calls
of transformers in between. The linear layers are the modules of the stock half, so weights and adapters stay shared.
`EngineConfig.layers` chooses between stock and fused; tests compare both with transformers. A half that cannot be
expressed this way stays stock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from runtime.engine.adapters.bottleneck import BottleneckRows
from runtime.engine.attention.interface import AttentionSettings, attend
from runtime.engine.kernels.linear_groups import Added, Grouped
from runtime.engine.layers.operations import Gated, Group, Onto, Operations
from runtime.engine.step.context import current
from surgery.modules.components import AttentionHalf, LmHead, ResidualHalf, Where
from zoo.manifest import Component

_ATTENTION = frozenset({"llama", "mistral", "qwen2", "qwen3", "mixtral"})
_FFN = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_FUSED: Mapping[str, frozenset[str]] = {"attention": _ATTENTION, "ffn": _FFN, "lm_head": _FFN}


def fuses(component: Component) -> bool:
    """Return whether components of this kind and family have a fused form."""
    return component.family in _FUSED.get(component.kind, ())


def grouped_layers(component: Component) -> tuple[tuple[str, ...], ...]:
    """Return the linear layers of a component that one operation of its fused form reads together, by name."""
    if not fuses(component):
        return ()
    if component.kind == "attention":
        return (("q_proj", "k_proj", "v_proj"),)
    silu = json.loads(component.spec).get("hidden_act", "silu") == "silu"
    return (("gate_proj", "up_proj"),) if component.kind == "ffn" and silu else ()


def can_fuse(component: Component, module: nn.Module) -> bool:
    """Return whether `fuse` has a form for a component's module."""
    match component.kind:
        case "attention":
            return fuses(component) and isinstance(module, AttentionHalf)
        case "ffn":
            return fuses(component) and isinstance(module, ResidualHalf)
        case "lm_head":
            return fuses(component) and isinstance(module, LmHead) and module.norm is not None
    return False


def fuse(component: Component, module: nn.Module, ops: Operations, widened: bool = False) -> nn.Module:
    """Return the fused form of a component's module, or the module itself if there is none.

    `widened`: activations are float32 over bfloat16 weights (`engine.layers.mixed_precision`).
    """
    if not can_fuse(component, module):
        return module
    if isinstance(module, AttentionHalf):
        return FusedAttention(component.family, module, ops, widened)
    if isinstance(module, ResidualHalf):
        return FusedFfn(module, ops, widened)
    if isinstance(module, LmHead):
        module.norm = ops.norm(module.norm)
    return module


def added_of(module: nn.Module) -> tuple[Added, ...]:
    """Return the packed adapters of a component's module; empty where adapters are not packed for the kernels."""
    groups: tuple[object, ...] = module.groups if isinstance(module, FusedAttention | FusedFfn) else ()
    return tuple(group.added for group in groups if isinstance(group, Grouped))


class FusedAttention(nn.Module):
    """`hidden + o(attend(rope(q, k), v))` of the normed input. hidden [1, tokens, width] -> the same shape."""

    def __init__(self, family: str, half: AttentionHalf, ops: Operations, widened: bool = False) -> None:
        super().__init__()
        stock: Any = half.body
        self.ops, self.widened = ops, widened
        self.norm = ops.norm(half.pre) if half.pre is not None else nn.Identity()
        self.qkv = ops.together((stock.q_proj, stock.k_proj, stock.v_proj))
        self.o, self.onto = stock.o_proj, ops.onto(stock.o_proj)
        self.q_norm = ops.norm(stock.q_norm) if family == "qwen3" else None
        self.k_norm = ops.norm(stock.k_norm) if family == "qwen3" else None
        self.head_dim = int(stock.head_dim)
        self.how = AttentionSettings(float(stock.scaling), _window(family, stock), None)
        self.side = half.side if isinstance(half.side, BottleneckRows) else None
        self.layers = nn.ModuleList(
            (stock.q_proj, stock.k_proj, stock.v_proj)
        )  # registers their parameters with this module

    @property
    def groups(self) -> tuple[Group, Onto]:
        """The operations that read its input and that write its output."""
        return self.qkv, self.onto

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        frame = current()
        if where.rotary is None:
            raise RuntimeError("this segment was given no rotary tables")
        q, k, v = (made[0].view(made.shape[1], -1, self.head_dim) for made in self.qkv(self.norm(hidden), frame))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.ops.norm_heads(self.q_norm, q), self.ops.norm_heads(self.k_norm, k)
        q, k = self.ops.rotate(q, k, where.rotary[0][0], where.rotary[1][0])
        if self.widened:  # K and V are kept in bfloat16
            k, v = k.to(torch.bfloat16), v.to(torch.bfloat16)
        out = attend(frame, q, k, v, self.how)
        out = out.reshape(1, hidden.shape[1], -1)
        out = self.onto(out, hidden, frame, self.side)
        return self.ops.round_(out) if self.widened else out


class FusedFfn(nn.Module):
    """`hidden + down(act(gate(x)) * up(x))` of the normed input. hidden [1, tokens, width] -> the same shape."""

    def __init__(self, half: ResidualHalf, ops: Operations, widened: bool = False) -> None:
        super().__init__()
        stock: Any = half.body
        self.ops, self.widened = ops, widened
        self.norm = ops.norm(half.pre) if half.pre is not None else nn.Identity()
        self.gated = ops.gated(stock.gate_proj, stock.up_proj, stock.act_fn)
        self.down, self.onto = stock.down_proj, ops.onto(stock.down_proj)
        self.side = half.side if isinstance(half.side, BottleneckRows) else None
        self.layers = nn.ModuleList((stock.gate_proj, stock.up_proj))

    @property
    def groups(self) -> tuple[Gated, Onto]:
        """The operations that read its input and that write its output."""
        return self.gated, self.onto

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        frame = current()
        made = self.gated(self.norm(hidden), frame)
        out = self.onto(made, hidden, frame, self.side)
        return self.ops.round_(out) if self.widened else out


def _window(family: str, attention: Any) -> int | None:
    """Return the sliding window that the family's own attention passes on."""
    if family in ("mistral", "mixtral"):
        return getattr(attention.config, "sliding_window", None)
    return getattr(attention, "sliding_window", None) if family in ("qwen2", "qwen3") else None
