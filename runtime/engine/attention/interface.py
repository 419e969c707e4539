"""The engine's attention behind transformers' attention interface: write this step's K and V, then attend.

It is registered under a name of its own and without a mask function, so that transformers builds no mask; all it needs
is in the current forward context. A context over dense batches attends through `engine.dense.kv_store`; one over pages
through the device's backend (`engine.attention.gathered` anywhere, `engine.kernels.paged_attention` with kernels).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.engine.step.context import ForwardContext, current

NAME = "blockzoo_paged"


def register() -> str:
    """Register the function with transformers and return its name. May be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)
    return NAME


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """How a layer attends.

    Fields:
        scaling: Factor on the logits; None for 1 / sqrt(head_dim).
        window: Sliding window in tokens; None for none.
        softcap: Soft cap on the logits; None for none.
    """

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None

    def factor(self, head_dim: int) -> float:
        """Return the factor on the logits for heads of this width."""
        return head_dim**-0.5 if self.scaling is None else self.scaling


class Tokens(NamedTuple):
    """Input of a layer's attention: query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim]."""

    query: Tensor
    key: Tensor
    value: Tensor
    how: AttentionSettings


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend in one layer over the current forward context, with the signature that transformers calls.

    Args:
        query: [1, heads, tokens, head_dim]; key, value: [1, kv_heads, tokens, head_dim].
        scaling: as the model passes it (OPT passes 1.0).

    Returns:
        [1, tokens, heads, head_dim] and None for the weights.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(current(), q, k, v, AttentionSettings(scaling, sliding_window, softcap))[None], None


def attend(frame: ForwardContext, query: Tensor, key: Tensor, value: Tensor, how: AttentionSettings) -> Tensor:
    """Write this step's K and V, then attend; returns the shape of the query.

    query: [tokens, heads, head_dim]; key, value: [tokens, kv_heads, head_dim]. At the virtual tokens of a prefix
    (prefix tuning) K and V are replaced by the prefix's, which are not rotated.

    Raises:
        RuntimeError: the forward context has no pages.
    """
    if frame.virtual and frame.prefixes:
        key, value = _prefixed(frame, key, value)
    now = Tokens(query, key, value, how)
    if frame.dense is not None:
        return frame.dense.attend(now)
    if not frame.paging:
        raise RuntimeError("this segment was given no pages")
    layer = frame.layer
    for pages in frame.paging:
        pages.write_kv(layer, key, value)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for pages in frame.paging:
        pages.decode(layer, now, out)
        pages.chunks(layer, now, out)
    return out


def _prefixed(frame: ForwardContext, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V with the prefixes' own values at their virtual tokens."""
    key, value = key.clone(), value.clone()
    for span in frame.virtual:
        prefix = frame.prefixes.get(span.adapter)
        if prefix is not None:
            for into, given in zip((key, value), prefix, strict=True):
                into[span.lo : span.hi] = given[span.source].view(-1, *into.shape[1:])
    return key, value


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, how: AttentionSettings) -> Tensor:
    """Compute softmax attention; with a soft cap, as Gemma 2's eager code does, because fused kernels ignore it."""
    if how.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=how.scaling)
    scores = _scores(q, k, mask, how)
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def softmax_attention_with_sums(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, how: AttentionSettings
) -> tuple[Tensor, Tensor]:
    """Compute attention in float32, not divided by the sum of its weights, as `engine.attention.partial` keeps it.

    Returns:
        float64 [..., queries, head_dim], zeros where nothing is visible; sums and exponents, float64 [..., queries, 2],
        zero and minus infinity there.
    """
    scores = _scores(q.float(), k.float(), mask.float(), how)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse.isneginf(), 0.0, lse)[..., None])  # -inf - -inf is NaN
    power = lse.double() / math.log(2)
    exponent = power.ceil()
    total = torch.exp2(power - torch.where(exponent.isneginf(), 0.0, exponent))
    return torch.matmul(weights, v.float()) * total[..., None], torch.stack((total, exponent), -1)


def _scores(q: Tensor, k: Tensor, mask: Tensor, how: AttentionSettings) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * how.factor(q.shape[-1])
    return (scores if how.softcap is None else torch.tanh(scores / how.softcap) * how.softcap) + mask
