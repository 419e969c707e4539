"""Linear layers that read the same input, as the kernels take them: their packed weights together, and what
adapters add to them.

    NativeGroup    x -> each layer's output          NativeGated    x -> silu(gate(x)) * up(x)          NativeOnto    x,
                                                                    h -> h + layer(x)

They are what `engine.layers.operations` gives to fused layers, and what a program's halves point to
(`native.program`): an adapter is packed once per group, whichever segments it runs in. Where one does more than add
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
    """The adapters of a frame's spans, and the first token and the end of each, back to back."""

    def __init__(self, frame: ForwardContext) -> None:
        edges = [edge for span in frame.adapters for edge in (span.lo, span.hi)]
        self.names = tuple(span.adapter for span in frame.adapters)
        self.bounds = (ctypes.c_int64 * len(edges))(*edges)


def spans_of(frame: ForwardContext) -> AdapterSpans:
    """A frame's, made once."""
    found = frame.notes.get(AdapterSpans)
    if found is None:
        found = frame.notes[AdapterSpans] = AdapterSpans(frame)
    return found


@dataclass(frozen=True, slots=True)
class PackedLowRank:
    """`engine.layers.linear.LowRank` of one layer of a group: the matrices are made anew for who wants them plain. Its
    bytes are the group's.
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
    """What low-rank adapters add to a group's outputs. Each is packed when it is attached, and the layers let their own
    copy go.
    """

    def __init__(self, kernels: Kernels, layers: Sequence[SharedLinear]) -> None:
        self._kernels, self._layers = kernels, tuple(layers)
        self._packed: dict[str, Low] = {}
        self._nothing = Low(kernels, [None] * len(layers))
        self._last: tuple[tuple[str, ...], Lows] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all that adapters have here."""
        return sum(low.nbytes for low in self._packed.values())

    def attach(self, adapter: str) -> None:
        """Pack what an adapter has been given on the group's layers."""
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
        """Let go of an adapter, whom the layers have let go of."""
        if self._packed.pop(adapter, None) is not None:
            self._last = None

    def lows(self, frame: ForwardContext) -> Lows | None:
        """What the frame's adapters have here, in the order of its spans; None where none of them has anything."""
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
    """Layers over packed weights in one product. `added`: what adapters add to it. `stock`: the same without
    kernels.
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
        """x [1, tokens, in] -> [1, tokens, sum of outputs], each layer's beside the last one's; plus `add` of that
        shape.
        """
        made = self.kernels.linear(x, self.parts, add)
        lows = self.added.lows(frame)
        if lows is not None:
            self.kernels.adapt_(made, x, self.parts, lows, spans_of(frame).bounds)
        return made


class NativeGroup(Grouped[Callable[[Tensor, ForwardContext], Sequence[Tensor]]]):
    """`engine.layers.operations.Group`."""

    def __call__(self, x: Tensor, frame: ForwardContext) -> Sequence[Tensor]:
        if frame.adapters and not self.added_only:
            return self.stock(x, frame)
        return torch.split(self.product(x, frame), list(self.parts.sizes), dim=-1)


class NativeGated(Grouped[Callable[[Tensor, ForwardContext], Tensor]]):
    """`engine.layers.operations.Gated`, of a gate and what it lets through."""

    def __call__(self, x: Tensor, frame: ForwardContext) -> Tensor:
        if frame.adapters and not self.added_only:
            return self.stock(x, frame)
        if self.added.lows(frame) is None:
            return self.kernels.gated(x, self.parts)
        return self.kernels.gate(self.product(x, frame))


class NativeOnto(Grouped[Callable[[Tensor, Tensor, ForwardContext], Tensor]]):
    """`engine.layers.operations.Onto`, of one layer."""

    def __call__(self, x: Tensor, hidden: Tensor, frame: ForwardContext) -> Tensor:
        if frame.adapters and not self.added_only:
            return self.stock(x, hidden, frame)
        return self.product(x, frame, hidden)


def parts_of(layers: Sequence[SharedLinear]) -> Parts | None:
    """Their packed weights for one call; None where one is not packed for the kernels."""
    products = [layer.product for layer in layers]
    packed = [product for product in products if isinstance(product, NativeProduct)]
    if len(packed) < len(products):
        return None
    return Parts([one.packed for one in packed], [one.outputs for one in packed], [one.bias for one in packed])


def is_silu(act: nn.Module) -> bool:
    """Whether this is the gate that the kernels know: torch's, or transformers' where that is there at all."""
    known = sys.modules.get("transformers.activations")
    return isinstance(act, nn.SiLU) or (known is not None and isinstance(act, type(known.ACT2FN["silu"])))
