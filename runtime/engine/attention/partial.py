"""Attend to a part of a sequence's tokens, and merge parts into attention to all of it (IL-01, IL-02).

    part p, over its tokens t, with x_t = log2(e) q k_t:
        exponent_p = an integer    sum_p = sum_t 2^(x_t - exponent_p)    values_p = sum_t 2^(x_t - exponent_p) v_t
    all:  exponent = max_p exponent_p    sum, values = sum_p 2^(exponent_p - exponent) (sum_p, values_p)
          attention = values / sum

The paper's equations 2 and 3 keep a maximum and a sum for each part. With powers of two instead nothing is rounded when
parts move to one exponent, and they are added in float64: with the kernels attention has the same bits in any number
of parts, if these end at multiples of 64 tokens (`KEYS` in csrc/attention/softmax.c). Scores include the factor and the
soft cap. A part without tokens for a query has zeros and the exponent minus infinity, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.chains import Array
from runtime.engine.attention.interface import Tokens
from runtime.engine.step.context import AttentionBackend
from runtime.engine.tensors.convert import bytes_of, joined
from runtime.types import LoanLost

#: Where parts of some tokens are among several parts of all: all at one number, or by number and token.
PartPlace = int | tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class PartialAttention:
    """Attention to a part of the tokens.

    Fields:
        values: float64 [tokens, heads, head_dim], not divided by their sum.
        sums: Sum and exponent, float64 [tokens, heads, 2].
    """

    values: Tensor
    sums: Tensor

    @classmethod
    def empty(cls, query: Tensor, *parts: int) -> PartialAttention:
        """Return attention of queries [tokens, heads, head_dim] to no tokens, or several such parts."""
        values = torch.zeros((*parts, *query.shape), dtype=torch.float64, device=query.device)
        sums = torch.zeros((*parts, *query.shape[:2], 2), dtype=torch.float64, device=query.device)
        sums[..., 1] = -torch.inf
        return cls(values, sums)

    @classmethod
    def unwritten(cls, query: Tensor) -> PartialAttention:
        """Return room for attention of queries."""
        values = torch.empty(query.shape, dtype=torch.float64, device=query.device)
        return cls(values, torch.empty((*query.shape[:2], 2), dtype=torch.float64, device=query.device))

    @classmethod
    def of_arrays(cls, arrays: Sequence[Array], query: Tensor) -> PartialAttention:
        """Return what another device made of queries [tokens, heads, head_dim]. Raises LoanLost for another shape."""
        tokens, heads, width = shape = tuple(query.shape)
        if len(arrays) != 2 or arrays[0].shape != shape or arrays[1].shape != (tokens, heads, 2):
            raise LoanLost("the answer of a creditor has another shape")
        dtypes = torch.float32 if arrays[0].dtype == "float32" else torch.float64, torch.float64
        try:
            values, sums = (
                joined([Array(each.dtype, (tokens, wide), each.data)], (tokens, wide), dtype, query.device)
                for each, wide, dtype in zip(arrays, (heads * width, heads * 2), dtypes, strict=True)
            )
        except ValueError as error:
            raise LoanLost(f"the answer of a creditor cannot be used: {error}") from None
        return cls(values.view(shape).double(), sums.view(tokens, heads, 2))

    def part(self, number: int) -> PartialAttention:
        """Return one of several parts, in place."""
        return PartialAttention(self.values[number], self.sums[number])

    def put_parts(self, where: PartPlace, made: PartialAttention) -> None:
        """Set some of several parts."""
        self.values[where], self.sums[where] = made.values, made.sums

    def take_bytes(self, arrays: Sequence[Array]) -> bool:
        """Copy float64 values and sums of these shapes in host memory into this one; False if they are no such."""
        shapes = [("float64", tuple(each.shape)) for each in (self.values, self.sums)]
        if [(each.dtype, each.shape) for each in arrays] != shapes or self.values.device.type != "cpu":
            return False
        for mine, array in zip((self.values, self.sums), arrays, strict=True):
            data = memoryview(array.data)
            if data.nbytes != mine.numel() * 8:
                return False
            bytes_of(mine)[:] = data.cast("B")
        return True

    @property
    def out(self) -> Tensor:
        """Attention, float32 [tokens, heads, head_dim]; zeros where there are no tokens."""
        total = self.sums[..., :1]
        return (self.values / torch.where(total > 0, total, 1.0)).float()


def values_dtype(device: torch.device) -> torch.dtype:
    """Return in which dtype a device sends values: float32 from GPUs, whose attention is not exact to more."""
    return torch.float64 if device.type == "cpu" else torch.float32


def attend_partly(
    backend: AttentionBackend, layer: int, now: Tokens, into: PartialAttention | None = None
) -> PartialAttention:
    """Attend in one layer to the tokens in the pages of a backend's rows (`PagedMetadata.held`).

    K and V of this step are in the pages already; of `now.key` only the shape's heads and the dtype are read. Each
    token is of a row. Positions of K are those it was rotated to, so that a row's pages may be any part of its
    sequence; a sliding window, which counts tokens in the pages, is not for parts. `into`: gets the result.

    Raises:
        ValueError: The layer has a sliding window.
    """
    if now.how.window is not None:
        raise ValueError("a sliding window cannot be attended to in parts")
    part = PartialAttention.unwritten(now.query) if into is None else into
    backend.decode(layer, now, part.values, part.sums)
    backend.chunks(layer, now, part.values, part.sums)
    return part


def merge(values: Tensor, sums: Tensor) -> PartialAttention:
    """Merge parts of the same queries: values [parts, tokens, heads, head_dim] and sums [parts, tokens, heads, 2].

    They are added in their order, so that the result always has the same bits. Raises ValueError for no parts.
    """
    if not len(values):
        raise ValueError("there is at least one part")
    exponents = sums[..., 1]
    most = exponents.amax(0)
    factors = torch.exp2(exponents - torch.where(most.isneginf(), 0.0, most))  # -inf - -inf is NaN
    out, total = torch.zeros_like(values[0]), torch.zeros_like(most)
    for part, factor in enumerate(factors):
        out += values[part] * factor[..., None]
        total += sums[part, ..., 0] * factor
    return PartialAttention(out, torch.stack((total, most), -1))
