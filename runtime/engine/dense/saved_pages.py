"""Convert saved K and V of a dense batch to pages and back, for host memory (BA-15, QL-10).

A page has K, then V, of `width` tokens of one layer, each in `half` bytes; pages are ordered by token, then by layer,
as `StageEngine.read_pages` returns them. So agents count and keep both executors' K and V alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.engine.dense.kv_store import KVLayout, SavedKV


def as_pages(saved: SavedKV, width: int, half: int) -> Tensor:
    """Return the pages of K and V: uint8 [page sets * layers, 2 * half], on the host."""
    sets, layers = -(-saved.tokens // width), len(saved.k)
    out = torch.zeros((sets, layers, 2, half), dtype=torch.uint8)
    for layer in range(layers):
        for side, given in enumerate((saved.k[layer], saved.v[layer])):
            tokens = given.cpu().contiguous().view(torch.uint8).view(saved.tokens, -1)
            size = tokens.shape[1]
            padded = torch.zeros((sets * width, size), dtype=torch.uint8)
            padded[: saved.tokens] = tokens
            out[:, layer, side, : width * size] = padded.view(sets, width * size)
    return out.view(sets * layers, 2 * half)


def from_pages(pages: Tensor, tokens: int, width: int, layouts: Sequence[KVLayout]) -> SavedKV:
    """Return the K and V of the first `tokens` tokens. Raises ValueError for pages of another number."""
    sets, layers = -(-tokens // width), len(layouts)
    if pages.shape[0] != sets * layers:
        raise ValueError(f"{pages.shape[0]} pages are not those of {tokens} tokens in {layers} layers")
    halves = pages.view(sets, layers, 2, -1)
    saved = SavedKV(tokens, [], [])
    for layer, layout in enumerate(layouts):
        for side, (kept, one) in enumerate(((saved.k, layout.k), (saved.v, layout.v))):
            part = halves[:, layer, side, : width * one.nbytes].reshape(sets * width, one.nbytes)[:tokens].contiguous()
            kept.append(part.view(one.dtype).view(tokens, one.heads, one.head_dim))
    return saved
