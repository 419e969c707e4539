"""The operations that fused layers are made of: stock torch, or native kernels where possible (float32 on a CPU).

`engine.layers.fused` is written against the protocol `Operations`, which `StockOperations` and `NativeOperations`
implement.

A *group* is a set of linear layers that read the same input. Where an adapter is in use, its output is added to the
group's outputs, or the layers run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.engine.adapters.bottleneck import BottleneckRows
from runtime.engine.attention.partial import merge
from runtime.engine.kernels.bindings import Kernels, back_to_back
from runtime.engine.kernels.linear_groups import NativeGated, NativeGroup, NativeOnto, is_silu, parts_of
from runtime.engine.kernels.signatures import MOST_BEST, PenaltiesData
from runtime.engine.layers.linear import SharedLinear
from runtime.engine.sampling.choice import NO_COLUMNS, NO_MASKS, Masks, SamplingColumns, StockChoice, TokenChoice
from runtime.engine.sampling.penalties import RowPenalties
from runtime.engine.step.context import ForwardContext
from runtime.grammars.state import TokenMask

#: x [1, tokens, in] -> each layer's output [1, tokens, out], which the caller may write to.
Group = Callable[[Tensor, ForwardContext], Sequence[Tensor]]
#: x -> act(gate(x)) * up(x).
Gated = Callable[[Tensor, ForwardContext], Tensor]


class Onto(Protocol):
    """(x, hidden) -> hidden + layer(x), or hidden + side(layer(x), hidden) on rows with a bottleneck adapter."""

    def __call__(
        self, x: Tensor, hidden: Tensor, frame: ForwardContext, side: BottleneckRows | None = None
    ) -> Tensor: ...


class Operations(TokenChoice, Protocol):
    """The operations of fused layers, over hidden states [1, tokens, width] and heads [tokens, heads, head_dim]."""

    def norm(self, stock: Any) -> nn.Module:
        """Return the RMSNorm for transformers' module."""
        ...

    def together(self, layers: Sequence[SharedLinear]) -> Group: ...

    def gated(self, gate: SharedLinear, up: SharedLinear, act: nn.Module) -> Gated: ...

    def onto(self, layer: SharedLinear) -> Onto: ...

    def norm_heads(self, norm: nn.Module, heads: Tensor) -> Tensor:
        """Return the heads normed one by one; may write into the argument."""
        ...

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Apply rotary positions, pairing the halves of a head; cos, sin [tokens, head_dim].

        May write into the arguments.
        """
        ...

    def merge(self, values: Tensor, sums: Tensor, out: Tensor, total: Tensor | None) -> None:
        """Merge attention to parts of the tokens (`engine.attention.partial.merge`).

        Contiguous float64 values [parts, tokens, heads, head_dim] and sums [parts, tokens, heads, 2], in the order of
        the tokens. A part without tokens for a query has zeros and the exponent minus infinity. `out`, contiguous, gets
        attention in float32; with `total`, float64 [tokens, heads, 2], its values in float64, and that their sums.
        """
        ...

    def round_(self, x: Tensor) -> Tensor:
        """Round contiguous float32 values to bfloat16, in place; return x."""
        ...


class StockNorm(nn.Module):
    """RMSNorm in one operation in float32.

    In half precision it is transformers' own, because the rounding between its two products matters.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.stock = stock

    def forward(self, x: Tensor) -> Tensor:
        weight = self.stock.weight
        if x.dtype != torch.float32 or not isinstance(weight, Tensor):
            return self.stock(x)  # type: ignore[no-any-return]
        return F.rms_norm(x, (x.shape[-1],), weight, float(self.stock.variance_epsilon))


class StockOperations(StockChoice):
    """Torch's own operations, on any device and in any dtype."""

    def norm(self, stock: Any) -> nn.Module:
        return StockNorm(stock)

    def together(self, layers: Sequence[SharedLinear]) -> Group:
        return lambda x, frame: [layer(x) for layer in layers]

    def gated(self, gate: SharedLinear, up: SharedLinear, act: nn.Module) -> Gated:
        return lambda x, frame: act(gate(x)).mul_(up(x))

    def onto(self, layer: SharedLinear) -> Onto:
        def onto(x: Tensor, hidden: Tensor, frame: ForwardContext, side: BottleneckRows | None = None) -> Tensor:
            return hidden + (side(layer(x), hidden) if side else layer(x))

        return onto

    def norm_heads(self, norm: nn.Module, heads: Tensor) -> Tensor:
        return norm(heads)  # type: ignore[no-any-return]

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x, cos, sin = torch.cat((query, key), dim=1), cos[:, None, :], sin[:, None, :]
        half = x.shape[-1] // 2
        out = x * cos
        out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        out[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return out[:, : query.shape[1]], out[:, query.shape[1] :]

    def merge(self, values: Tensor, sums: Tensor, out: Tensor, total: Tensor | None) -> None:
        whole = merge(values, sums)
        out.copy_(whole.out if total is None else whole.values)
        if total is not None:
            total.copy_(whole.sums)

    def round_(self, x: Tensor) -> Tensor:
        return x.copy_(x.to(torch.bfloat16))


class NativeNorm(StockNorm):
    """RMSNorm with a kernel."""

    def __init__(self, stock: Any, kernels: Kernels) -> None:
        super().__init__(stock)
        self._kernels = kernels
        self.eps = float(stock.variance_epsilon)

    @property
    def ready(self) -> bool:
        """Whether the kernel can read its weight."""
        weight = self.stock.weight
        return isinstance(weight, Tensor) and weight.dtype == torch.float32 and weight.is_contiguous()

    def serves(self, x: Tensor) -> bool:
        """Return whether the kernel can be used: everything is float32."""
        return x.dtype == torch.float32 and self.ready

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.norm(x, self.stock.weight, self.eps) if self.serves(x) else super().forward(x)


class NativeOperations(StockOperations):
    """Kernels where everything needed is float32 on this CPU and packed for them; else as stock.

    A layer's choice is made when it is built, because the engine loads weights in one dtype.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def norm(self, stock: Any) -> nn.Module:
        return NativeNorm(stock, self.kernels)

    def together(self, layers: Sequence[SharedLinear]) -> Group:
        parts, stock = parts_of(layers), super().together(layers)
        return stock if parts is None else NativeGroup(self.kernels, layers, parts)

    def gated(self, gate: SharedLinear, up: SharedLinear, act: nn.Module) -> Gated:
        parts, stock = parts_of((gate, up)), super().gated(gate, up, act)
        return stock if parts is None or not is_silu(act) else NativeGated(self.kernels, (gate, up), parts)

    def onto(self, layer: SharedLinear) -> Onto:
        parts, stock = parts_of((layer,)), super().onto(layer)
        return stock if parts is None else NativeOnto(self.kernels, (layer,), parts)

    def norm_heads(self, norm: nn.Module, heads: Tensor) -> Tensor:
        if not (isinstance(norm, NativeNorm) and norm.serves(heads) and back_to_back(heads)):
            return norm(heads)  # type: ignore[no-any-return]
        self.kernels.norm_heads_(heads, norm.stock.weight, norm.eps)
        return heads

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        tables = cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
        if not (tables and cos.shape[-1] == query.shape[-1] and back_to_back(query) and back_to_back(key)):
            return super().rotate(query, key, cos, sin)
        self.kernels.rotate_(query, cos, sin)
        self.kernels.rotate_(key, cos, sin)
        return query, key

    def merge(self, values: Tensor, sums: Tensor, out: Tensor, total: Tensor | None) -> None:
        self.kernels.merge(values, sums, out, total)

    def round_(self, x: Tensor) -> Tensor:
        return self.kernels.round_(x)

    def allow_(self, logits: Tensor, masks: Mapping[int, TokenMask]) -> None:
        if logits.dtype == torch.float32 and logits.is_contiguous():
            self.kernels.logits.allow_(logits, masks)
        else:
            super().allow_(logits, masks)

    def penalise_(self, logits: Tensor, penalties: Sequence[RowPenalties]) -> None:
        if not (logits.dtype == torch.float32 and logits.is_contiguous()):
            super().penalise_(logits, penalties)
            return
        rows = [
            PenaltiesData(
                logits[each.row].data_ptr(), each.ids.ctypes.data, each.counts.ctypes.data, len(each.ids),
                each.repetition, each.frequency, each.presence,
            )
            for each in penalties
        ]  # fmt: skip
        self.kernels.logits.penalise_(logits, rows)

    def scored(self, logits: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        if logits.dtype != torch.float32 or count > MOST_BEST:
            return super().scored(logits, chosen, count)
        return self.kernels.logits.scored(logits, chosen, count)

    def chosen(self, logits: Tensor, by: SamplingColumns = NO_COLUMNS, masks: Masks = NO_MASKS) -> Tensor:
        if logits.dtype != torch.float32:
            return super().chosen(logits, by, masks)
        return self.kernels.logits.chosen(logits, by, masks)
