"""Components as torch modules, made of transformers' own sub-modules, with the same operations in the same order.

Running all components of a model in order gives the model's logits bit for bit (BL-01).

    embedding(ids, where) -> hidden            ids [B, T] -> [B, T, width]
    attention | ffn | layer(hidden, where)     [B, T, width] -> [B, T, width]
    stitch(hidden, where)                      [B, T, width] -> [B, T, other width]
    lm_head(hidden) -> logits                  [.., width] -> [.., vocabulary]

Modules and weights come from `surgery.modules.skeleton` and `surgery.modules.build`; batches and adapters play no part
here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Where(NamedTuple):
    """Positions of a run's tokens, and what attention needs with them.

    The paged executor sets `positions` and `rotary` only. Stacks also set `mask` and `cache`. The dense executor sets
    all fields, for layers that compute attention themselves (`surgery.modules.masked`).

    Fields:
        positions: Position ids [B, T].
        rotary: For rotary families, (cos, sin), each [B, T, rotary width].
        cache: A `transformers.Cache`, or an object with its `update`.
        keys: Positions [B, cached tokens] of the cache's content after the run, -1 for placeholders.
    """

    positions: Tensor
    rotary: tuple[Tensor, Tensor] | None = None
    mask: Tensor | None = None
    cache: Any = None
    keys: Tensor | None = None


class Embedding(nn.Module):
    """Converts token ids to hidden states, including learned positions and Bloom's norm."""

    def __init__(
        self, table: nn.Module, positions: nn.Module | None, project: nn.Module | None, norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.table = table
        self.position_table = positions
        self.project = project
        self.norm = norm

    def forward(self, ids: Tensor, where: Where) -> Tensor:
        hidden: Tensor = self.table(ids)
        if self.project is not None:
            hidden = self.project(hidden)
        if self.position_table is not None:
            hidden = hidden + self.position_table(where.positions)
        return hidden if self.norm is None else self.norm(hidden)


class OptPositions(nn.Module):
    """OPT's position table, called with explicit positions; the table itself applies OPT's offset of two."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.learned = table

    def forward(self, positions: Tensor) -> Tensor:
        return self.learned(None, 0, position_ids=positions)  # type: ignore[no-any-return]


class ResidualHalf(nn.Module):
    """`hidden + post(body(pre(hidden)))`, then `after`: the form of all sequential families; absent norms are None."""

    def __init__(self, body: nn.Module, pre: nn.Module | None, post: nn.Module | None, after: nn.Module | None) -> None:
        super().__init__()
        self.body = body
        self.pre = pre
        self.post = post
        self.after = after
        #: Function of bottleneck adapters: (output, residual) -> new output; None without any.
        self.side: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        out = self.run(hidden if self.pre is None else self.pre(hidden), where)
        if self.post is not None:
            out = self.post(out)
        if self.side is not None:
            out = self.side(out, hidden)
        out = hidden + out
        return out if self.after is None else self.after(out)

    def run(self, hidden: Tensor, where: Where) -> Tensor:
        return self.body(hidden)  # type: ignore[no-any-return]


class AttentionHalf(ResidualHalf):
    """A half with an attention module as its body, which returns (output, weights) and takes rotary embeddings."""

    def run(self, hidden: Tensor, where: Where) -> Tensor:
        kept = {} if where.cache is None else {"past_key_values": where.cache}
        return self.body(hidden, position_embeddings=where.rotary, attention_mask=where.mask, **kept)[0]  # type: ignore[no-any-return]


class WholeLayer(nn.Module):
    """A layer of a family with parallel residual, run whole.

    Args:
        cache_name: The family's name for the cache argument of its layers.
    """

    def __init__(self, layer: nn.Module, cache_name: str = "past_key_values") -> None:
        super().__init__()
        self.layer = layer
        self.cache_name = cache_name

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        kept = {"use_cache": False} if where.cache is None else {"use_cache": True, self.cache_name: where.cache}
        out = self.layer(
            hidden, attention_mask=where.mask, position_ids=where.positions, position_embeddings=where.rotary, **kept
        )
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]


class LmHead(nn.Module):
    """Final norm, projection and head; `softcap` as Gemma 2 applies it."""

    def __init__(
        self, norm: nn.Module | None, project: nn.Module | None, head: nn.Module, softcap: float | None
    ) -> None:
        super().__init__()
        self.norm = norm
        self.project = project
        self.head = head
        self.softcap = softcap
        #: Torch's `tanh`, or another function of the same signature.
        self.tanh: Callable[[Tensor], Tensor] = torch.tanh

    def states(self, hidden: Tensor) -> Tensor:
        """Return the final hidden states, which the head reads."""
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden if self.project is None else self.project(hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(self.states(hidden))
        if self.softcap is not None:
            logits = self.tanh(logits / self.softcap) * self.softcap
        return logits


class Stitch(nn.Module):
    """A stitching block (BL-09) from one width to another: `W [hidden; position] + b`.

    The position's part is added to the bias.

    Args:
        weight: [width_out, width_in + 1]; its last column belongs to the position.
        bias: [width_out].
    """

    def __init__(self, weight: Tensor, bias: Tensor, position: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(bias, requires_grad=False)
        self.position = position
        #: Torch's `linear`, or another function of the same signature.
        self.multiply: Callable[..., Tensor] = nn.functional.linear

    def forward(self, hidden: Tensor, where: Where) -> Tensor:
        shift = self.bias + self.weight[:, -1] * self.position
        return self.multiply(hidden, self.weight[:, :-1], shift)


class OptFfn(nn.Module):
    """OPT's ffn; its two linear layers are attributes of the layer itself."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = layer.fc1, layer.activation_fn, layer.fc2

    def forward(self, hidden: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(hidden)))  # type: ignore[no-any-return]
