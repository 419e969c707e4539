"""The engine's attention behind transformers' attention interface: write this step's K and V into pages, attend through
the tables.

Registered under a name of its own and with no mask function, so that no mask is built outside; everything it needs is
in the current frame; where that has dense batches instead of pages, they do it (`engine.dense.kv_store`). How a device
attends over pages is its own affair (`engine.attention.gathered` anywhere, `engine.kernels.paged_attention` by
kernels).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.engine.step.context import ForwardContext, current

NAME = "blockzoo_paged"


def register() -> str:
    """Make the function known to transformers; returns its name. Registering twice does no harm."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)
    return NAME


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """A layer's way of attending: factor on the logits (None: 1 / sqrt(head_dim)), window in tokens, soft cap."""

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None

    def factor(self, head_dim: int) -> float:
        """The factor on the logits of heads so wide."""
        return head_dim**-0.5 if self.scaling is None else self.scaling


class Tokens(NamedTuple):
    """What a layer's attention is given: query [tokens, heads, head_dim], key and value [tokens, kv_heads,
    head_dim].
    """

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
    """Attention of one layer over the current frame, as transformers calls it.

    Args:
        query: [1, heads, tokens, head_dim]; key, value: [1, kv_heads, tokens, head_dim].
        scaling: as the model passes it (OPT passes 1.0).

    Returns:
        [1, tokens, heads, head_dim] and None for the weights.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(current(), q, k, v, AttentionSettings(scaling, sliding_window, softcap))[None], None


def attend(frame: ForwardContext, query: Tensor, key: Tensor, value: Tensor, how: AttentionSettings) -> Tensor:
    """Keep this step's K and V, then attend. query [tokens, heads, head_dim], key and value [tokens, kv_heads,
    head_dim] -> as query.

    K and V of a prefix's virtual tokens are the prefix's, as they are: they were never meant to be rotated.

    Raises:
        RuntimeError: the frame has no pages.
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
    """K and V with the prefixes' own at their virtual tokens."""
    key, value = key.clone(), value.clone()
    for span in frame.virtual:
        prefix = frame.prefixes.get(span.adapter)
        if prefix is not None:
            for into, given in zip((key, value), prefix, strict=True):
                into[span.lo : span.hi] = given[span.source].view(-1, *into.shape[1:])
    return key, value


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, how: AttentionSettings) -> Tensor:
    """Softmax attention; with a soft cap as Gemma 2's eager code does it, which fused kernels ignore."""
    if how.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=how.scaling)
    scores = torch.matmul(q, k.transpose(-1, -2)) * how.factor(q.shape[-1])
    scores = torch.tanh(scores / how.softcap) * how.softcap + mask
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)
