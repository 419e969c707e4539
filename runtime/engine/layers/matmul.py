"""Products with a weight [out, in], stored plainly or in a faster layout: x [.., in] -> [.., out].

    WeightLayout.pack(weight) -> packed tensor, shared by all users of this weight
    WeightLayout.product(packed, out, bias) -> Product

`engine.layers.packed_weights` decides which layout is used. This module is independent of layers and models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.engine.kernels.bindings import Kernels, can_be_read
from runtime.engine.kernels.operands import Parts

#: (x [.., in], weight [out, in], bias [out] or None) -> [.., out], as torch's `linear`.
Multiply = Callable[..., Tensor]


class Product(Protocol):
    """A weight and bias that a linear layer multiplies by."""

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def outputs(self) -> int: ...

    @property
    def weight(self) -> Tensor:
        """[out, in]; unpacked into a new tensor if it is packed."""
        ...

    def multiply(self, x: Tensor) -> Tensor: ...

    def with_bias(self, bias: Tensor) -> Product:
        """Return the product with another bias [out]."""
        ...


class WeightLayout(Protocol):
    """A layout of weights."""

    @property
    def name(self) -> str: ...

    def takes(self, dtype: torch.dtype) -> bool: ...

    def pack(self, weight: Tensor) -> Tensor:
        """Pack a weight.

        Raises RuntimeError or AttributeError if this build of torch cannot, for this dtype and processor.
        """
        ...

    def product(self, packed: Tensor, outputs: int, bias: Tensor | None) -> Product: ...


# -- as stored -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turned:
    """The range of rows in which a transposed product (W X^T instead of X W^T) is faster.

    Fields:
        first_small, first_large: First number of rows for small and for large matrices.
        last: Last number of rows.
    """

    first_small: int
    first_large: int
    last: int


#: On a CPU, where stock products of few rows are far below memory bandwidth; measured by
#: `benchmarks/serving/skinny.py`.
TURNED: Mapping[torch.dtype, Turned] = {torch.float32: Turned(12, 6, 48), torch.bfloat16: Turned(2, 2, 256)}
#: Elements from which a matrix counts as large.
LARGE = 1 << 19


@dataclass(frozen=True, slots=True)
class PlainProduct:
    """A product with a weight [out, in] as it is stored; from `first` to `last` rows it is computed transposed."""

    weight: Tensor
    bias: Tensor | None
    first: int
    last: int

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    def multiply(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:  # bfloat16 weights, float32 activations
            out = replace(self, bias=None).multiply(x.to(self.weight.dtype)).to(x.dtype)
            return out if self.bias is None else out + self.bias
        if not (self.first <= x.shape[-2] <= self.last and x.dim() == 3 and x.shape[0] == 1):
            return F.linear(x, self.weight, self.bias)
        out = torch.mm(self.weight, x[0].t()).t()[None]
        return out if self.bias is None else out + self.bias

    def with_bias(self, bias: Tensor) -> PlainProduct:
        return replace(self, bias=bias)


def plain_product(weight: Tensor, bias: Tensor | None) -> PlainProduct:
    """Return the product for a weight [out, in] as it is stored."""
    turned = TURNED.get(weight.dtype) if weight.device.type == "cpu" and weight.is_contiguous() else None
    if turned is None:
        return PlainProduct(weight, bias, 1, 0)
    return PlainProduct(
        weight, bias, turned.first_large if weight.numel() >= LARGE else turned.first_small, turned.last
    )


# -- oneDNN's layout -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OneDnnProduct:
    packed: Tensor
    bias: Tensor | None

    @property
    def outputs(self) -> int:
        return self.packed.shape[0]

    @property
    def weight(self) -> Tensor:
        return self.packed.to_dense()

    def multiply(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out

    def with_bias(self, bias: Tensor) -> OneDnnProduct:
        return replace(self, bias=bias)


@dataclass(frozen=True, slots=True)
class OneDnn:
    """Blocks chosen by oneDNN. The packed tensor has the shape [out, in] but is opaque.

    `smallest`: elements below which a call costs more than it gains.
    """

    name: str = "oneDNN"
    smallest: int = 1 << 18

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.bfloat16)

    def pack(self, weight: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 16)
        return packed

    def product(self, packed: Tensor, outputs: int, bias: Tensor | None) -> OneDnnProduct:
        return OneDnnProduct(packed, bias)


# -- the kernels' layout ---------------------------------------------------------------------------------------------


def in_float32(multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Call a product of the kernels, which take and give float32; the result has the dtype of x."""
    return multiply(x) if x.dtype == torch.float32 else multiply(x.float()).to(x.dtype)


class NativeProduct:
    """A product with panels, of float32, bfloat16 or int8 weights."""

    def __init__(self, kernels: Kernels, packed: Tensor, outputs: int, bias: Tensor | None) -> None:
        self._kernels = kernels
        self._parts = Parts([packed], [outputs], [bias])
        self.packed, self.outputs, self.bias = packed, outputs, bias

    @property
    def weight(self) -> Tensor:
        return self._kernels.unpack(self.packed, self.outputs)

    def multiply(self, x: Tensor) -> Tensor:
        return in_float32(lambda x: self._kernels.linear(x, self._parts), x)

    def with_bias(self, bias: Tensor) -> NativeProduct:
        return NativeProduct(self._kernels, self.packed, self.outputs, bias)


@dataclass(frozen=True, slots=True)
class StoredProduct:
    """A product with a weight [out, in] that must stay as stored because another unit reads it (a tied head's table).

    The kernels lay it out on the fly: the same bits as with a packed weight, for any number of rows.
    """

    kernels: Kernels
    plain: Product

    @property
    def weight(self) -> Tensor:
        return self.plain.weight

    @property
    def bias(self) -> Tensor | None:
        return self.plain.bias

    @property
    def outputs(self) -> int:
        return self.plain.outputs

    def multiply(self, x: Tensor) -> Tensor:
        return in_float32(lambda x: self.kernels.stored(x, self.plain.weight, self.plain.bias), x)

    def with_bias(self, bias: Tensor) -> StoredProduct:
        return StoredProduct(self.kernels, self.plain.with_bias(bias))


def takes_stored(product: Product) -> bool:
    """Return whether the kernels can read a product's weight as it is stored."""
    if not isinstance(product, PlainProduct):
        return False
    held = [x for x in (product.weight, product.bias) if x is not None]
    known = can_be_read(product.weight) and all(x.device.type == "cpu" for x in held)
    return known and product.weight.dtype in (torch.float32, torch.bfloat16)


def native_linear(kernels: Kernels) -> Multiply:
    """Return torch's `linear` with the kernels, whose sums do not depend on the number of rows; in x's dtype."""

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not can_be_read(weight) or weight.dtype not in (torch.float32, torch.bfloat16):
            return F.linear(x, weight, bias)
        wide = None if bias is None else bias.float().contiguous()
        return in_float32(lambda x: kernels.stored(x, weight, wide), x)

    return multiply


@dataclass(frozen=True, slots=True)
class CodedPanels:
    """The kernels' layout of an int8 weight, with its scales (`engine/kernels/csrc/coded_product.c`)."""

    kernels: Kernels
    name: str = "int8 panels"

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype == torch.int8

    def pack(self, weight: Tensor) -> Tensor:
        raise RuntimeError("an int8 weight has scales: PackedWeights.acquire_coded packs it")

    def product(self, packed: Tensor, outputs: int, bias: Tensor | None) -> NativeProduct:
        return NativeProduct(self.kernels, packed, outputs, None if bias is None else bias.float().contiguous())


@dataclass(frozen=True, slots=True)
class Panels:
    """The kernels' layout, read front to back (`engine/kernels/csrc/float32_product.c`)."""

    kernels: Kernels
    name: str = "panels"
    #: Whether bfloat16 weights are packed, for float32 activations.
    narrow: bool = False

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32 or (self.narrow and dtype == torch.bfloat16)

    def pack(self, weight: Tensor) -> Tensor:
        return self.kernels.pack(weight.detach())

    def product(self, packed: Tensor, outputs: int, bias: Tensor | None) -> NativeProduct:
        return NativeProduct(self.kernels, packed, outputs, None if bias is None else bias.float().contiguous())
