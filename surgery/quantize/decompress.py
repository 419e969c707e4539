"""Compute the weights that quantised tensors stand for, with the bits that compressed-tensors gives.

    weight = (code - zero point) * scale, rounded to the dtype of the component's exact tensors

Every shape is checked against each other one before memory is allocated: a file's own statement of a shape
(`weight_shape`) is compared, never followed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.families.quantized import CODES, PACKED, SCALE, SHAPE, ZERO, CodedWeights, coded_modules, form_of, is_coded
from zoo.errors import MalformedCheckpoint
from zoo.manifest import Component

#: Elements that are decompressed at a time, in float32.
_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A quantised weight [outputs, inputs].

    Fields:
        codes: As stored.
        scale, zero: As stored; no zero points where it is symmetric.
    """

    form: CodedWeights
    outputs: int
    inputs: int
    codes: Tensor
    scale: Tensor
    zero: Tensor | None

    def row_scales(self) -> Tensor:
        """Return the scale of each row [outputs], float32; only without groups."""
        return self.scale.float().reshape(-1).expand(self.outputs).contiguous()

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [outputs, inputs]."""
        made = torch.empty(self.outputs, self.inputs, dtype=dtype)
        scale = self.scale.float().reshape(-1, self.scale.shape[-1] if self.scale.dim() > 1 else 1)
        zero = self._zero_points()
        step = max(1, _AT_ONCE // max(self.inputs, 1))
        for lo in range(0, self.outputs, step):
            hi = min(lo + step, self.outputs)
            codes = self.codes[lo:hi]
            part = (codes if self.form.layout != PACKED else _unpacked(codes, self.form.bits, self.inputs)).float()
            if zero is not None:
                part -= self._spread(zero, lo, hi)
            made[lo:hi] = (part * self._spread(scale, lo, hi)).to(dtype)
        return made

    def _spread(self, each: Tensor, lo: int, hi: int) -> Tensor:
        """Return the value of each element, or of each row, of rows [lo, hi), from one per row and group."""
        rows = each[lo:hi] if each.shape[0] > 1 else each
        if self.form.group <= 0:
            return rows
        return rows.repeat_interleave(self.form.group, dim=1)[:, : self.inputs]

    def _zero_points(self) -> Tensor | None:
        if self.zero is None:
            return None
        zero = self.zero
        if self.form.layout == PACKED and self.form.group >= 0:
            shape = zero.shape if zero.dim() == 2 else (zero.shape[0], 1)
            zero = _unpacked(zero.reshape(shape).t().contiguous(), self.form.bits, self.outputs).t()
        return zero.float().reshape(-1, zero.shape[-1] if zero.dim() > 1 else 1)


def _unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` values of each row of int32 words, int8; values of 4 or 8 bits, the lowest first."""
    data = words.contiguous().view(torch.uint8)
    if bits == 4:
        data = torch.stack((data & 0xF, data >> 4), dim=-1).flatten(1)
    return (data[:, :count] ^ (1 << (bits - 1))).view(torch.int8) if bits == 8 else data[:, :count].to(torch.int8) - 8


def coded_weights_of(component: Component, tensors: Mapping[str, Tensor]) -> dict[str, CodedWeight]:
    """Return the quantised weights of a component by the names of the weights that they stand for.

    Args:
        tensors: Name within the component -> tensor.

    Raises:
        NotServable: A form that is not computed here.
        MalformedCheckpoint: Tensors that are missing, or do not fit each other.
    """
    modules = coded_modules(tensors)
    form = form_of(json.loads(component.spec))
    if form is None:
        if modules:
            raise MalformedCheckpoint(f"{min(modules)!r} is quantized, but config.json does not say so")
        return {}
    return {f"{module}.weight": _coded(form, module, tensors) for module in sorted(modules)}


def decompressed(component: Component, tensors: Mapping[str, Tensor], left: Collection[str] = ()) -> dict[str, Tensor]:
    """Return a component's tensors by the names of its modules' parameters, quantised ones as the weights themselves.

    Args:
        left: Names of weights that are computed with as they are: only their shapes are right, in no memory.

    Raises as `coded_weights_of`.
    """
    coded = coded_weights_of(component, tensors)
    if not coded:
        return dict(tensors)
    dtype, made = exact_dtype(tensors), exact_tensors(tensors)
    for name, weight in coded.items():
        shape = weight.outputs, weight.inputs
        made[name] = torch.zeros(1, dtype=dtype).expand(shape) if name in left else weight.values(dtype)
    return made


def exact_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a component that are not quantised."""
    modules = coded_modules(tensors)
    return {name: tensor for name, tensor in tensors.items() if not is_coded(name, modules)}


def exact_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype that a component computes in: that of its exact tensors, else that of its scales."""
    plain = exact_tensors(tensors) or {name: each for name, each in tensors.items() if name.endswith(SCALE)}
    return max(plain.values(), key=torch.numel).dtype


def _coded(form: CodedWeights, module: str, tensors: Mapping[str, Tensor]) -> CodedWeight:
    packed = form.layout == PACKED
    codes, scale = tensors.get(module + (CODES if packed else ".weight")), tensors.get(module + SCALE)
    zero = None if form.symmetric else tensors.get(module + ZERO)
    if codes is None or scale is None or codes.dim() != 2 or (zero is None and not form.symmetric):
        raise MalformedCheckpoint(f"{module!r} has no codes, no scale or no zero points of its {form.layout} weight")
    outputs, inputs = codes.shape
    if packed:
        inputs = _stated_inputs(form, module, codes, tensors.get(module + SHAPE))
    scales, zeros = form.scale_shapes(outputs, inputs), form.zero_shapes(outputs, inputs)
    if tuple(scale.shape) not in scales or (zero is not None and tuple(zero.shape) not in zeros):
        raise MalformedCheckpoint(
            f"{module!r}: a scale {list(scale.shape)} is not that of a weight {[outputs, inputs]}, or its zero points "
            "are not"
        )
    floats = form.layout == "float-quantized"
    wanted = codes.is_floating_point() if floats else codes.dtype == (torch.int32 if packed else torch.int8)
    if not wanted or not scale.is_floating_point() or (zero is not None and zero.is_floating_point()):
        raise MalformedCheckpoint(
            f"{module!r}: codes of {codes.dtype} and scales of {scale.dtype} are not {form.layout}"
        )
    return CodedWeight(form, outputs, inputs, codes, scale, zero)


def _stated_inputs(form: CodedWeights, module: str, codes: Tensor, shape: Tensor | None) -> int:
    """Return the number of inputs that a file states, if its packed codes have it."""
    stated = [] if shape is None or shape.is_floating_point() or shape.numel() != 2 else shape.tolist()
    if not stated or stated[0] != codes.shape[0] or stated[1] < 1 or form.packed_width(stated[1]) != codes.shape[1]:
        raise MalformedCheckpoint(f"{module!r} states the shape {stated}, but its codes are {list(codes.shape)}")
    return int(stated[1])
