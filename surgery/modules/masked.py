"""Components of families that compute attention themselves (bloom, falcon, gptj, mpt), around transformers' own layers.

Such a layer takes an additive mask and a cache (`Where.mask`, `Where.cache`). Layers with linear biases (ALiBi) use the
positions of the cached tokens (`Where.keys`), never their columns: in a batch with rows of different start times,
columns do not correspond to positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from surgery.modules.components import Where
from zoo.manifest import ComponentKind

T = TypeVar("T")


class Alibi:
    """Linear biases of all layers of a model, by the positions of the keys; computed once per batch and step.

    Args:
        slopes: [heads].
        rounded: Whether slopes and biases pass through bfloat16, as Falcon's do.
    """

    def __init__(self, slopes: Tensor, rounded: bool = False) -> None:
        self._slopes = slopes.bfloat16() if rounded else slopes
        self._last: tuple[Tensor, Tensor] | None = None

    def make_bias(self, where: Where) -> Tensor:
        """Return the biases [rows, heads, 1, keys]; those of placeholders are hidden by the mask."""
        keys = _given(where.keys)
        if self._last is None or self._last[0] is not keys:
            slopes = self._slopes.to(keys.device)
            self._last = keys, slopes[None, :, None, None] * keys.clamp_min(0)[:, None, None, :]
        return self._last[1]


class BloomAttention(nn.Module):
    """Bloom's attention, which adds the residual itself; the config decides which residual."""

    def __init__(self, layer: Any, alibi: Alibi) -> None:
        super().__init__()
        self.norm, self.body = layer.input_layernorm, layer.self_attention
        self.after_norm = bool(layer.apply_residual_connection_post_layernorm)
        self.alibi = alibi

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        normed = self.norm(hidden)
        bias = self.alibi.make_bias(where).to(hidden.dtype).flatten(0, 1)
        residual = normed if self.after_norm else hidden
        out: Tensor = self.body(normed, residual, alibi=bias, attention_mask=where.mask, layer_past=where.cache)[0]
        return out


class BloomFfn(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.norm, self.body = layer.post_attention_layernorm, layer.mlp
        self.after_norm = bool(layer.apply_residual_connection_post_layernorm)

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        normed = self.norm(hidden)
        return self.body(normed, normed if self.after_norm else hidden)  # type: ignore[no-any-return]


class FalconLayer(nn.Module):
    """Falcon's layer. Linear biases, if any, are added to the mask, as Falcon does for its fused attention.

    Without linear biases the layer uses rotary embeddings.
    """

    def __init__(self, layer: Any, alibi: Alibi | None) -> None:
        super().__init__()
        self.layer, self.alibi = layer, alibi
        self.root = math.sqrt(layer.self_attention.head_dim)

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        mask, bias = _given(where.mask), None
        if self.alibi is not None:
            bias = self.alibi.make_bias(where).to(hidden.dtype)
            mask = bias / self.root + mask
        out: Tensor = self.layer(
            hidden,
            alibi=bias,
            attention_mask=mask,
            position_ids=where.positions,
            layer_past=where.cache,
            position_embeddings=where.rotary,
        )[0]
        return out


class GptjLayer(nn.Module):
    """GPT-J's layer, which rotates by a table of its own, read at each row's positions.

    The stock layer copies its whole table once per row. If fewer entries are read than the table has, the layer gets
    only these entries instead.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions

        self.layer = layer
        attention = layer.attn
        self.table = nn.Buffer(
            create_sinusoidal_positions(attention.max_positions, attention.pos_embd_dim), persistent=False
        )
        attention.embed_positions = self.table  # the stock table was computed on the meta device and holds no data

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        positions = where.positions.clamp_min(0)
        table: Tensor = self.table
        if positions.numel() < table.shape[0]:
            table = table[positions.flatten()]
            positions = torch.arange(positions.numel(), device=positions.device).view_as(positions)
        self.layer.attn.embed_positions = table
        out: Tensor = self.layer(hidden, layer_past=where.cache, attention_mask=where.mask, position_ids=positions)[0]
        return out


class MptAttention(nn.Module):
    """MPT's attention with biases by each row's positions.

    The stock attention takes one bias for all rows, by column, so its operations are repeated here.
    """

    def __init__(self, layer: Any, alibi: Alibi) -> None:
        super().__init__()
        self.norm, self.alibi = layer.norm_1, alibi
        stock = layer.attn
        self.qkv, self.out = stock.Wqkv, stock.out_proj
        self.heads, self.head_dim = int(stock.n_heads), int(stock.head_dim)
        self.scale, self.clip = float(stock.softmax_scale), stock.clip_qkv

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        rows, count = hidden.shape[:2]
        mixed = self.qkv(self.norm(hidden))
        if self.clip:
            mixed = mixed.clamp(min=-self.clip, max=self.clip)
        query, key, value = (
            x.reshape(rows, count, self.heads, self.head_dim).transpose(1, 2) for x in mixed.chunk(3, dim=2)
        )
        if where.cache is not None:
            key, value = where.cache.update(key, value, 0)
        scores = (
            torch.matmul(query, key.transpose(-1, -2)) * self.scale + self.alibi.make_bias(where) + _given(where.mask)
        )
        weights = torch.softmax(scores.float(), dim=-1).to(value.dtype)
        context = torch.matmul(weights, value).permute(0, 2, 1, 3).reshape(rows, count, -1)
        return hidden + self.out(context)  # type: ignore[no-any-return]


class MptFfn(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.norm, self.body = layer.norm_2, layer.ffn

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        return self.body(self.norm(hidden), hidden)  # type: ignore[no-any-return]


def alibi_of(family: str, config: Any) -> Alibi | None:
    """Return the linear biases of a model, with transformers' own slopes; None if it has none."""
    one = torch.ones((1, 2), dtype=torch.int64)
    if family == "bloom":
        from transformers.models.bloom.modeling_bloom import build_alibi_tensor

        return Alibi(build_alibi_tensor(one, config.n_head, torch.float32)[:, 0, 1])
    if family == "falcon" and config.alibi:
        from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi

        return Alibi(falcon_alibi(one, config.num_attention_heads, torch.float32)[:, 0, 1], rounded=True)
    if family == "mpt":
        from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

        return Alibi(-build_mpt_alibi_tensor(config.n_heads, 2)[:, 0, 0])
    return None


def masked_part(family: str, kind: ComponentKind, layer: Any, alibi: Alibi | None) -> nn.Module:
    """Return one layer's component."""
    makers: dict[tuple[str, str], Callable[[], nn.Module]] = {
        ("bloom", "attention"): lambda: BloomAttention(layer, _given(alibi)),
        ("bloom", "ffn"): lambda: BloomFfn(layer),
        ("falcon", "layer"): lambda: FalconLayer(layer, alibi),
        ("gptj", "layer"): lambda: GptjLayer(layer),
        ("mpt", "attention"): lambda: MptAttention(layer, _given(alibi)),
        ("mpt", "ffn"): lambda: MptFfn(layer),
    }
    return makers[family, kind]()


def _given(value: T | None) -> T:
    if value is None:
        raise RuntimeError("this layer needs an explicit mask and the positions of its keys")
    return value
