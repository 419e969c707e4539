"""Groups of linear layers that read the same input, with packed weights and adapters, for the kernels.

    NativeGroup    x -> each layer's output
    NativeGated    x -> silu(gate(x)) * up(x)
    NativeOnto     x, h -> h + layer(x)

`engine.layers.operations` gives them to fused layers, and the halves of a program (`kernels.program`) point to them. An
adapter is packed once per group, whatever segments it runs in. With an adapter that does more than add to the output
(IA3, DoRA), the layers run as stock.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from runtime.engine.kernels.bindings import Kernels, Low, Lows, Parts
from runtime.engine.layers.linear import SharedLinear
from runtime.engine.layers.matmul import NativeProduct
from runtime.engine.step.context import ForwardContext

Stock = TypeVar("Stock")


class AdapterSpans:
    """The adapters of a forward context's spans, and the first token and end of each as a C array."""

    def __init__(self, frame: ForwardContext) -> None:
        edges = [edge for span in frame.adapters for edge in (span.lo, span.hi)]
        self.names = tuple(span.adapter for span in frame.adapters)
        self.bounds = (ctypes.c_int64 * len(edges))(*edges)


def spans_of(frame: ForwardContext) -> AdapterSpans:
    """Return a forward context's `AdapterSpans`, made once."""
    found = frame.notes.get(AdapterSpans)
    if found is None:
        found = frame.notes[AdapterSpans] = AdapterSpans(frame)
    return found


@dataclass(frozen=True, slots=True)
class PackedLowRank:
    """`engine.layers.linear.LowRank` of one layer of a group, over the group's packed matrices.

    Reading `a` or `b` unpacks them anew. The bytes are counted by the group, so `nbytes` is 0.
    """

    low: Low
    at: int
    outputs: int
    nbytes: int = 0

    @property
    def a(self) -> Tensor:
        return self.low.a(self.at)

    @property
    def b(self) -> Tensor:
        return self.low.b(self.at, self.outputs)

    @property
    def bias(self) -> Tensor | None:
        return self.low.bias(self.at)


class Added:
    """The low-rank adapters of a group, packed for the kernels.

    An adapter is packed when it is attached; the layers then drop their own copies.
    """

    def __init__(self, kernels: Kernels, layers: Sequence[SharedLinear]) -> None:
        self._kernels, self._layers = kernels, tuple(layers)
        self._packed: dict[str, Low] = {}
        self._nothing = Low(kernels, [None] * len(layers))
        self._last: tuple[tuple[str, ...], Lows] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all adapters of the group."""
        return sum(low.nbytes for low in self._packed.values())

    def attach(self, adapter: str) -> None:
        """Pack an adapter that has been attached to the group's layers."""
        there = [layer.adapters.get(adapter) for layer in self._layers]
        if all(part is None for part in there):
            return
        low = self._packed[adapter] = Low(
            self._kernels, [None if part is None else (part.a, part.b, part.bias) for part in there]
        )
        self._last = None
        for at, (layer, part) in enumerate(zip(self._layers, there, strict=True)):
            if part is not None:
                layer.attach(adapter, PackedLowRank(low, at, layer.product.outputs))

    def detach(self, adapter: str) -> None:
        """Drop an adapter that has been detached from the layers."""
        if self._packed.pop(adapter, None) is not None:
            self._last = None

    def lows(self, frame: ForwardContext) -> Lows | None:
        """Return the packed adapters in the order of the context's spans; None if none applies to this group."""
        if not self._packed or not frame.adapters:
            return None
        names = spans_of(frame).names
        if self._packed.keys().isdisjoint(names):
            return None
        last = self._last
        if last is None or names != last[0]:
            last = self._last = names, Lows([self._packed.get(name, self._nothing) for name in names])
        return last[1]


class Grouped(Generic[Stock]):
    """Layers over packed weights that run as one product.

    `added` has their adapters; `stock` computes the same without kernels.
    """

    def __init__(self, kernels: Kernels, layers: Sequence[SharedLinear], parts: Parts, stock: Stock) -> None:
        self.kernels, self.parts, self.stock = kernels, parts, stock
        self.added = Added(kernels, layers)
        self._layers = tuple(layers)

    @property
    def added_only(self) -> bool:
        """Whether adapters add to the outputs and do nothing else."""
        return all(layer.added_only for layer in self._layers)

    def product(self, x: Tensor, frame: ForwardContext, add: Tensor | None = None) -> Tensor:
        """Return x [1, tokens, in] times each layer's weight, side by side: [1, tokens, sum of outputs]; plus `add`."""
        made = self.kernels.linear(x, self.parts, add)
        lows = self.added.lows(frame)
        if lows is not None:
            self.kernels.adapt_(made, x, self.parts, lows, spans_of(frame).bounds)
        return made


class NativeGroup(Grouped[Callable[[Tensor, ForwardContext], Sequence[Tensor]]]):
    """`engine.layers.operations.Group` with kernels."""

    def __call__(self, x: Tensor, frame: ForwardContext) -> Sequence[Tensor]:
        if frame.adapters and not self.added_only:
            return self.stock(x, frame)
        return torch.split(self.product(x, frame), list(self.parts.sizes), dim=-1)


class NativeGated(Grouped[Callable[[Tensor, ForwardContext], Tensor]]):
    """`engine.layers.operations.Gated` with kernels: a gate and an up projection."""

    def __call__(self, x: Tensor, frame: ForwardContext) -> Tensor:
        if frame.adapters and not self.added_only:
            return self.stock(x, frame)
        if self.added.lows(frame) is None:
            return self.kernels.gated(x, self.parts)
        return self.kernels.gate(self.product(x, frame))


class NativeOnto(Grouped[Callable[[Tensor, Tensor, ForwardContext], Tensor]]):
    """`engine.layers.operations.Onto` with kernels, for one layer."""

    def __call__(self, x: Tensor, hidden: Tensor, frame: ForwardContext) -> Tensor:
        if frame.adapters and not self.added_only:
            return self.stock(x, hidden, frame)
        return self.product(x, frame, hidden)


def parts_of(layers: Sequence[SharedLinear]) -> Parts | None:
    """Return the layers' packed weights for one call; None if one of them is not packed for the kernels."""
    products = [layer.product for layer in layers]
    packed = [product for product in products if isinstance(product, NativeProduct)]
    if len(packed) < len(products):
        return None
    return Parts([one.packed for one in packed], [one.outputs for one in packed], [one.bias for one in packed])


def is_silu(act: nn.Module) -> bool:
    """Return whether this is the SiLU activation, torch's or transformers'; does not import transformers."""
    known = sys.modules.get("transformers.activations")
    return isinstance(act, nn.SiLU) or (known is not None and isinstance(act, type(known.ACT2FN["silu"])))
