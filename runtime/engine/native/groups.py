"""Linear layers that read the same input, as the kernels take them: their packed weights together, and what adapters add to them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from runtime.engine.frame import Frame
from runtime.engine.linear import SharedLinear
from runtime.engine.native.calls import Kernels, Low, Lows, Parts
from runtime.engine.products import NativeProduct


class Added:
    """What the low-rank adapters of a group add to its outputs. Each is packed when it is first used, until one comes or goes."""

    def __init__(self, kernels: Kernels, layers: Sequence[SharedLinear], parts: Parts) -> None:
        self._kernels, self._layers, self._parts = kernels, layers, parts
        self._packed: dict[str, Low] = {}
        self._changes: tuple[int, ...] = ()
        self._names: tuple[str, ...] = ()
        self._lows: Lows | None = None

    def to_(self, made: Tensor, x: Tensor, frame: Frame) -> None:
        """Add to made [1, tokens, sum of outputs], of x [1, tokens, in]."""
        lows = self.lows(frame)
        if lows is not None:
            self._kernels.adapt_(made, x, self._parts, lows, frame.spanned[1])

    def lows(self, frame: Frame) -> Lows | None:
        """What the frame's adapters have here; None where nobody has anything."""
        if not frame.adapters or not any(layer.adapters for layer in self._layers):
            return None
        names, _ = frame.spanned
        if (changes := tuple(layer.changes for layer in self._layers)) != self._changes:
            self._packed, self._lows, self._changes = {}, None, changes
        if self._lows is None or names != self._names:
            self._lows, self._names = Lows([self._low(name) for name in names]), names
        return self._lows

    def _low(self, name: str) -> Low:
        if name not in self._packed:
            there = [layer.adapters.get(name) for layer in self._layers]
            self._packed[name] = Low(self._kernels, [None if one is None else (one.a, one.b, one.bias) for one in there])
        return self._packed[name]


def parts_of(layers: Sequence[SharedLinear]) -> Parts | None:
    """Their packed weights for one call; None where one is not packed for the kernels."""
    products = [layer.product for layer in layers]
    packed = [product for product in products if isinstance(product, NativeProduct)]
    if len(packed) < len(products):
        return None
    return Parts([one.packed for one in packed], [one.outputs for one in packed], [one.bias for one in packed])


def is_silu(act: nn.Module) -> bool:
    """Whether this is the gate that the kernels know."""
    from transformers.activations import ACT2FN

    return isinstance(act, nn.SiLU | type(ACT2FN["silu"]))
