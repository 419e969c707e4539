"""What fused layers are made of, as stock torch does it, and as kernels of our own do it where they can (float32 on a CPU).

    operations(kernels, weight) -> Operations          fused.py is written against these alone

A *group* is some linear layers that read the same input. Adapters are the layers' own affair: where one is in use, what it adds is put on
the group's outputs, or the layers run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.engine.frame import Frame
from runtime.engine.linear import SharedLinear
from runtime.engine.native.calls import Kernels, Low, Lows, Parts
from runtime.engine.products import NativeProduct

#: x [1, tokens, in] -> each layer's output [1, tokens, out], which is nobody else's and may be written to.
Group = Callable[[Tensor, Frame], Sequence[Tensor]]
#: x -> act(gate(x)) * up(x).
Gated = Callable[[Tensor, Frame], Tensor]
#: (x, hidden) -> hidden + layer(x).
Onto = Callable[[Tensor, Tensor, Frame], Tensor]


class Operations(Protocol):
    """Over hidden states [1, tokens, width] and heads [tokens, heads, head_dim]."""

    def norm(self, stock: Any) -> nn.Module:
        """The RMSNorm of transformers' module."""
        ...

    def together(self, layers: Sequence[SharedLinear]) -> Group: ...

    def gated(self, gate: SharedLinear, up: SharedLinear, act: nn.Module) -> Gated: ...

    def onto(self, layer: SharedLinear) -> Onto: ...

    def norm_heads(self, norm: nn.Module, heads: Tensor) -> Tensor:
        """Norm each head; may write into what it is given."""
        ...

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary positions, halves against each other; cos, sin [tokens, head_dim]; may write into what it is given."""
        ...


class StockNorm(nn.Module):
    """RMSNorm in one operation in float32; in half precision transformers' own, whose rounding between its two products matters."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.stock = stock

    def forward(self, x: Tensor) -> Tensor:
        weight = self.stock.weight
        if x.dtype != torch.float32 or not isinstance(weight, Tensor):
            return self.stock(x)  # type: ignore[no-any-return]
        return F.rms_norm(x, (x.shape[-1],), weight, float(self.stock.variance_epsilon))


class StockOperations:
    """Torch's own operations, on any device and in any dtype."""

    def norm(self, stock: Any) -> nn.Module:
        return StockNorm(stock)

    def together(self, layers: Sequence[SharedLinear]) -> Group:
        return lambda x, frame: [layer(x) for layer in layers]

    def gated(self, gate: SharedLinear, up: SharedLinear, act: nn.Module) -> Gated:
        return lambda x, frame: act(gate(x)).mul_(up(x))

    def onto(self, layer: SharedLinear) -> Onto:
        return lambda x, hidden, frame: hidden + layer(x)

    def norm_heads(self, norm: nn.Module, heads: Tensor) -> Tensor:
        return norm(heads)  # type: ignore[no-any-return]

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x, cos, sin = torch.cat((query, key), dim=1), cos[:, None, :], sin[:, None, :]
        half = x.shape[-1] // 2
        out = x * cos
        out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        out[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return out[:, : query.shape[1]], out[:, query.shape[1] :]


class NativeNorm(StockNorm):
    """RMSNorm by a kernel."""

    def __init__(self, stock: Any, kernels: Kernels) -> None:
        super().__init__(stock)
        self._kernels = kernels
        self.eps = float(stock.variance_epsilon)

    def serves(self, x: Tensor) -> bool:
        """Whether the kernel does: everything is float32."""
        weight = self.stock.weight
        return x.dtype == torch.float32 and isinstance(weight, Tensor) and weight.dtype == torch.float32

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.norm(x, self.stock.weight, self.eps) if self.serves(x) else super().forward(x)


class NativeOperations(StockOperations):
    """Kernels where all that is needed is float32 on this CPU and packed for them; else as stock.

    Which of both a layer takes is decided when it is built: the engine loads weights in one dtype.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def norm(self, stock: Any) -> nn.Module:
        return NativeNorm(stock, self._kernels)

    def together(self, layers: Sequence[SharedLinear]) -> Group:
        parts = _parts(layers)
        if parts is None:
            return super().together(layers)
        stock, kernels, added = super().together(layers), self._kernels, _Added(self._kernels, layers, parts)

        def run(x: Tensor, frame: Frame) -> Sequence[Tensor]:
            if frame.adapters and not all(layer.added_only for layer in layers):
                return stock(x, frame)
            made = kernels.linear(x, parts)
            if frame.adapters:
                added.to_(made, x, frame)
            return torch.split(made, list(parts.sizes), dim=-1)

        return run

    def gated(self, gate: SharedLinear, up: SharedLinear, act: nn.Module) -> Gated:
        parts = _parts((gate, up))
        stock, kernels = super().gated(gate, up, act), self._kernels
        if parts is None or not _is_silu(act):
            return stock
        added = _Added(kernels, (gate, up), parts)

        def run(x: Tensor, frame: Frame) -> Tensor:
            if gate.untouched(frame) and up.untouched(frame):
                return kernels.gated(x, parts)
            if not (gate.added_only and up.added_only):
                return stock(x, frame)
            made = kernels.linear(x, parts)
            added.to_(made, x, frame)
            low, high = torch.split(made, list(parts.sizes), dim=-1)
            return F.silu(low).mul_(high)

        return run

    def onto(self, layer: SharedLinear) -> Onto:
        parts = _parts((layer,))
        stock, kernels = super().onto(layer), self._kernels
        if parts is None:
            return stock
        added = _Added(kernels, (layer,), parts)

        def run(x: Tensor, hidden: Tensor, frame: Frame) -> Tensor:
            if frame.adapters and not layer.added_only:
                return stock(x, hidden, frame)
            made = kernels.linear(x, parts, hidden)
            if frame.adapters:
                added.to_(made, x, frame)
            return made

        return run

    def norm_heads(self, norm: nn.Module, heads: Tensor) -> Tensor:
        if not (isinstance(norm, NativeNorm) and norm.serves(heads) and _fits(heads)):
            return norm(heads)  # type: ignore[no-any-return]
        self._kernels.norm_heads_(heads, norm.stock.weight, norm.eps)
        return heads

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        tables = cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
        if not (tables and cos.shape[-1] == query.shape[-1] and _fits(query) and _fits(key)):
            return super().rotate(query, key, cos, sin)
        self._kernels.rotate_(query, cos, sin)
        self._kernels.rotate_(key, cos, sin)
        return query, key


class _Added:
    """What the low-rank adapters of a group add to its outputs. Each is packed when it is first used, until one comes or goes."""

    def __init__(self, kernels: Kernels, layers: Sequence[SharedLinear], parts: Parts) -> None:
        self._kernels, self._layers, self._parts = kernels, layers, parts
        self._packed: dict[str, Low] = {}
        self._changes: tuple[int, ...] = ()
        self._names: tuple[str, ...] = ()
        self._lows: Lows | None = None

    def to_(self, made: Tensor, x: Tensor, frame: Frame) -> None:
        """Add to made [1, tokens, sum of outputs], of x [1, tokens, in]."""
        if not any(layer.adapters for layer in self._layers):
            return
        names, bounds = frame.spanned
        if (changes := tuple(layer.changes for layer in self._layers)) != self._changes:
            self._packed, self._lows, self._changes = {}, None, changes
        if self._lows is None or names != self._names:
            self._lows, self._names = Lows([self._low(name) for name in names]), names
        self._kernels.adapt_(made, x, self._parts, self._lows, bounds)

    def _low(self, name: str) -> Low:
        if name not in self._packed:
            there = [layer.adapters.get(name) for layer in self._layers]
            self._packed[name] = Low(self._kernels, [None if one is None else (one.a, one.b, one.bias) for one in there])
        return self._packed[name]


def _parts(layers: Sequence[SharedLinear]) -> Parts | None:
    """Their packed weights for one call; None where one is not packed for the kernels."""
    products = [layer.product for layer in layers]
    packed = [product for product in products if isinstance(product, NativeProduct)]
    if len(packed) < len(products):
        return None
    return Parts([one.packed for one in packed], [one.outputs for one in packed], [one.bias for one in packed])


def _is_silu(act: nn.Module) -> bool:
    from transformers.activations import ACT2FN

    return isinstance(act, nn.SiLU | type(ACT2FN["silu"]))


def _fits(heads: Tensor) -> bool:
    """Whether a token's heads [heads, head_dim] lie back to back, in float32."""
    return heads.dtype == torch.float32 and heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
