"""Groups of linear layers that read the same input, with packed weights and adapters, for the kernels.

    NativeGroup    x -> each layer's output
    NativeGated    x -> silu(gate(x)) * up(x)
    NativeOnto     x, h -> h + layer(x)

`engine.layers.operations` gives them to fused layers, and the halves of a program (`kernels.program`) point to them. An
adapter is packed once per group, whatever segments it runs in. Each adapter is applied to its own rows, in an order of
operations that depends neither on the other rows nor on what else is loaded.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.operands import Low, Lows, Parts, Widths
from runtime.engine.layers.activations import Uniform
from runtime.engine.layers.linear import SharedLinear
from runtime.engine.layers.matmul import NativeProduct
from runtime.engine.step.context import ForwardContext


class SideAdapters(Protocol):
    """Adapters between a layer's output and the residual connection (`engine.adapters.bottleneck.BottleneckRows`)."""

    def applies(self, frame: ForwardContext) -> bool:
        """Return whether a row of the context uses one."""
        ...

    def replace_(self, out: Tensor, output: Tensor, hidden: Tensor, frame: ForwardContext) -> None:
        """Set `out` [1, tokens, width] on the rows that use one, from the layer's output and the residual."""
        ...


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
        self._widths = Widths(layers[0].width_in, [layer.product.outputs for layer in layers])
        for layer in layers:
            layer.low_ranks = self if len(layers) == 1 else None
        self._packed: dict[str, Low] = {}
        self._nothing = Low(kernels, [None] * len(layers))
        self._last: tuple[tuple[str, ...], Lows] | None = None

    @property
    def layers(self) -> tuple[SharedLinear, ...]:
        return self._layers

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

    def add_(self, out: Tensor, x: Tensor, frame: ForwardContext) -> None:
        """Add the adapters' outputs for x [1, tokens, in] to the contiguous `out` [1, tokens, sum of outputs]."""
        lows = self.lows(frame)
        if lows is not None:
            self._kernels.adapt_(out, x, self._widths, lows, spans_of(frame).bounds)

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


class Grouped:
    """Layers over packed weights that run as one product. `added` has their adapters."""

    def __init__(self, kernels: Kernels, layers: Sequence[SharedLinear], parts: Parts) -> None:
        self.kernels, self.parts = kernels, parts
        self.added = Added(kernels, layers)
        self._layers = tuple(layers)

    @property
    def added_only(self) -> bool:
        """Whether adapters add to the outputs and do nothing else."""
        return all(layer.added_only for layer in self._layers)

    def product(self, x: Tensor, frame: ForwardContext, add: Tensor | None = None) -> Tensor:
        """Return x [1, tokens, in] times each layer's weight, side by side: [1, tokens, sum of outputs]; plus `add`.

        With adapters, in this order: product and bias, scaled; plus `add`; plus the low-rank part.
        """
        if frame.adapters and not self.added_only:
            made = self._scaled(x, frame) if add is None else self._scaled(x, frame) + add
        else:
            made = self.kernels.linear(x, self.parts, add)
        self.added.add_(made, x, frame)
        return made

    def _scaled(self, x: Tensor, frame: ForwardContext) -> Tensor:
        made = [layer.scaled_product(x, frame) for layer in self._layers]
        return made[0] if len(made) == 1 else torch.cat(made, dim=-1)


class NativeGroup(Grouped):
    """`engine.layers.operations.Group` with kernels."""

    def __call__(self, x: Tensor, frame: ForwardContext) -> Sequence[Tensor]:
        return torch.split(self.product(x, frame), list(self.parts.sizes), dim=-1)


class NativeGated(Grouped):
    """`engine.layers.operations.Gated` with kernels: a gate and an up projection."""

    def __call__(self, x: Tensor, frame: ForwardContext) -> Tensor:
        if frame.adapters and (self.added.lows(frame) is not None or not self.added_only):
            return self.kernels.gate(self.product(x, frame))
        return self.kernels.gated(x, self.parts)


class NativeOnto(Grouped):
    """`engine.layers.operations.Onto` with kernels, for one layer."""

    def __call__(self, x: Tensor, hidden: Tensor, frame: ForwardContext, side: SideAdapters | None = None) -> Tensor:
        if side is None or not side.applies(frame):
            return self.product(x, frame, hidden)
        output = self._scaled(x, frame)
        out = output + hidden
        self.added.add_(out, x, frame)
        side.replace_(out, output, hidden, frame)
        return out


def parts_of(layers: Sequence[SharedLinear]) -> Parts | None:
    """Return the layers' packed weights for one call; None if one is not packed for the kernels, or two differently."""
    products = [layer.product for layer in layers]
    packed = [product for product in products if isinstance(product, NativeProduct)]
    if len(packed) < len(products) or len({one.packed.dtype for one in packed}) > 1:
        return None
    return Parts([one.packed for one in packed], [one.outputs for one in packed], [one.bias for one in packed])


def is_silu(act: nn.Module) -> bool:
    """Return whether this is the SiLU activation, torch's or transformers'; does not import transformers."""
    act = act.function if isinstance(act, Uniform) and isinstance(act.function, nn.Module) else act
    known = sys.modules.get("transformers.activations")
    return isinstance(act, nn.SiLU) or (known is not None and isinstance(act, type(known.ACT2FN["silu"])))
