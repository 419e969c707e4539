"""Attend to a part of a sequence's tokens, and merge parts into attention to all of them (IL-01, IL-02).

    part p:    out_p = softmax(q K_p^T) V_p        lse_p = log sum exp(q K_p^T), natural logarithm
    all:       lse = log sum_p exp(lse_p)          out = sum_p exp(lse_p - lse) out_p

The paper's equations 2 and 3 keep a maximum and a sum for each part; their `lse` says both. Scores include the factor
and the soft cap. A part without tokens for a query has zeros and minus infinity, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.engine.attention.interface import Tokens
from runtime.engine.step.context import AttentionBackend


@dataclass(frozen=True, slots=True)
class PartialAttention:
    """Attention to a part of the tokens.

    Fields:
        out: float32 [tokens, heads, head_dim].
        lse: float32 [tokens, heads]; minus infinity where the part has no tokens for a query.
    """

    out: Tensor
    lse: Tensor


def attend_partly(backend: AttentionBackend, layer: int, now: Tokens) -> PartialAttention:
    """Attend in one layer to the tokens in the pages of a backend's rows (`PagedMetadata.held`).

    K and V of this step are in the pages already; of `now.key` only the shape's heads and the dtype are read. Tokens of
    no row get zeros and minus infinity. Positions of K are those it was rotated to, so that a row's pages may be any
    part of its sequence; a sliding window, which counts tokens in the pages, is not for parts.

    Raises:
        ValueError: The layer has a sliding window.
    """
    if now.how.window is not None:
        raise ValueError("a sliding window cannot be attended to in parts")
    out = torch.zeros(now.query.shape, dtype=torch.float32, device=now.query.device)
    lse = torch.full(now.query.shape[:2], -torch.inf, device=now.query.device)
    backend.decode(layer, now, out, lse)
    backend.chunks(layer, now, out, lse)
    return PartialAttention(out, lse)


def merge(parts: Mapping[int, PartialAttention] | Iterable[tuple[int, PartialAttention]]) -> PartialAttention:
    """Merge parts of the same queries, given with the position of each part's first token.

    They are added in that order, not in that of their arrival, so that the result always has the same bits.

    Raises:
        ValueError: No parts, or two that begin at the same token.
    """
    given = sorted(parts.items() if isinstance(parts, Mapping) else parts, key=lambda each: each[0])
    if not given or len({at for at, _ in given}) != len(given):
        raise ValueError("parts begin at tokens of their own, and there is at least one")
    most = given[0][1].lse
    for _, part in given[1:]:
        most = torch.maximum(most, part.lse)
    base = torch.where(most.isneginf(), 0.0, most)  # -inf - -inf is NaN
    out, total = torch.zeros_like(given[0][1].out), torch.zeros_like(base)
    for _, part in given:
        weight = torch.exp(part.lse - base)
        total += weight
        out += weight[..., None] * part.out
    out /= torch.where(total > 0, total, 1.0)[..., None]
    return PartialAttention(out, base + torch.log(total))


def merge_stacked(outs: Tensor, sums: Tensor) -> PartialAttention:
    """Merge parts [parts, tokens, heads, head_dim] with sums [parts, tokens, heads], in their order."""
    return merge(enumerate(map(PartialAttention, outs, sums)))
