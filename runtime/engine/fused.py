"""Fused halves of a layer for the common shape: RMSNorm, rotary positions, grouped heads, gated FFN (llama, mistral, qwen2, qwen3).

The same arithmetic as the stock half in fewer and larger operations, without transformers' calls in between; the linear layers are the
very modules of the stock half, so weights and adapters are shared as before. Stock is the oracle: `EngineConfig.layers` chooses, tests
hold both against transformers. What a half cannot express stays stock.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.engine.attention import How, attend
from runtime.engine.frame import current
from surgery.components import AttentionHalf, ResidualHalf, Where
from zoo.manifest import Component

_ATTENTION = frozenset({"llama", "mistral", "qwen2", "qwen3", "mixtral"})
_FFN = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def fuse(component: Component, module: nn.Module) -> nn.Module:
    """The fused form of a component's module, or the module itself where there is none."""
    if component.kind == "attention" and component.family in _ATTENTION and isinstance(module, AttentionHalf):
        return FusedAttention(component.family, module)
    if component.kind == "ffn" and component.family in _FFN and isinstance(module, ResidualHalf):
        return FusedFfn(module)
    return module


class _Norm(nn.Module):
    """RMSNorm in one operation in float32; in half precision transformers' own, whose rounding between its two products matters."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.stock = stock

    def forward(self, x: Tensor) -> Tensor:
        weight = self.stock.weight
        if x.dtype != torch.float32 or not isinstance(weight, Tensor):
            return self.stock(x)  # type: ignore[no-any-return]
        return F.rms_norm(x, (x.shape[-1],), weight, float(self.stock.variance_epsilon))


class FusedAttention(nn.Module):
    """`hidden + o(attend(rope(q, k), v))` of the normed input. hidden [1, tokens, width] -> the same."""

    def __init__(self, family: str, half: AttentionHalf) -> None:
        super().__init__()
        stock: Any = half.body
        self.norm = _Norm(half.pre) if half.pre is not None else nn.Identity()
        self.q, self.k, self.v, self.o = stock.q_proj, stock.k_proj, stock.v_proj, stock.o_proj
        self.q_norm = _Norm(stock.q_norm) if family == "qwen3" else None
        self.k_norm = _Norm(stock.k_norm) if family == "qwen3" else None
        self.head_dim = int(stock.head_dim)
        self.how = How(float(stock.scaling), _window(family, stock), None)
        self.side = half.side

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        x = self.norm(hidden)
        tokens = x.shape[1]
        q, k, v = (project(x).view(tokens, -1, self.head_dim) for project in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        heads = q.shape[1]
        both = _rope(torch.cat((q, k), dim=1), where)
        out = attend(current(), both[:, :heads], both[:, heads:], v, self.how)
        made: Tensor = self.o(out.reshape(1, tokens, heads * self.head_dim))
        return hidden + (made if self.side is None else self.side(made, hidden))


class FusedFfn(nn.Module):
    """`hidden + down(act(gate(x)) * up(x))` of the normed input. hidden [1, tokens, width] -> the same."""

    def __init__(self, half: ResidualHalf) -> None:
        super().__init__()
        stock: Any = half.body
        self.norm = _Norm(half.pre) if half.pre is not None else nn.Identity()
        self.gate, self.up, self.down, self.act = stock.gate_proj, stock.up_proj, stock.down_proj, stock.act_fn
        self.side = half.side

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        x = self.norm(hidden)
        made: Tensor = self.down(self.act(self.gate(x)).mul_(self.up(x)))
        return hidden + (made if self.side is None else self.side(made, hidden))


def _rope(x: Tensor, where: Where) -> Tensor:
    """Rotate all heads at once, halves against each other. x [tokens, heads, head_dim]."""
    if where.rotary is None:
        raise RuntimeError("this segment was given no rotary tables")
    cos, sin = (table[0][:, None, :] for table in where.rotary)
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def _window(family: str, attention: Any) -> int | None:
    """The window that the family's own attention would pass on."""
    if family in ("mistral", "mixtral"):
        return getattr(attention.config, "sliding_window", None)
    return getattr(attention, "sliding_window", None) if family in ("qwen2", "qwen3") else None
