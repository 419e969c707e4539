"""Schemes of quantisation: a weight [outputs, inputs] -> codes and scales, by round-to-nearest, one scale for each row.

Pure functions of a tensor's values and a scheme: nothing is calibrated, so equal tensors of two models give equal bits,
whichever model they are met in first. Sums play no part, and rows are independent, so the bits do not depend on
threads or on how many rows are computed at a time.

    int8   pack-quantized, 8 bits         weight_packed, weight_scale, weight_shape       W8A16 of compressed-tensors
    fp8    float-quantized, float8 e4m3   weight, weight_scale                            W8A16 of compressed-tensors
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.errors import InputError

#: Elements that are quantised at a time, in float32.
_AT_ONCE = 1 << 24
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
#: Bumped when a scheme's bits change, so that what was derived before is not taken for it.
VERSION = 1


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """A scheme.

    Fields:
        top: The largest code.
        weights: `weights` of compressed-tensors' config groups.
        layout: The format in compressed-tensors' words.
    """

    name: str
    top: float
    layout: str
    weights: Mapping[str, Any]
    code: Callable[[Tensor], Tensor]
    finish: Callable[[Tensor, Tensor], dict[str, Tensor]]

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the tensors that stand for a weight [outputs, inputs], by the ends of their names.

        Raises InputError for a weight that is no matrix of floats, or has values that are not finite.
        """
        if weight.dim() != 2 or weight.dtype not in _FLOATS or weight.numel() == 0:
            raise InputError(f"{weight.dtype} of shape {list(weight.shape)} is no matrix that can be quantized")
        step = max(1, _AT_ONCE // weight.shape[1])
        parts = [self._rows(weight[lo : lo + step]) for lo in range(0, weight.shape[0], step)]
        codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
        return self.finish(codes, scales)

    def _rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        wide = rows.float()
        most = wide.abs().amax(dim=1, keepdim=True)
        if not bool(torch.isfinite(most).all()):
            raise InputError("a tensor has values that are not finite: it cannot be quantized")
        # Rounded to the weight's own dtype first, so that the codes fit the scale that is stored.
        scale = (most / self.top).clamp_min(torch.finfo(rows.dtype).tiny).to(rows.dtype)
        codes = (wide / scale.float()).clamp_(-self.top, self.top)
        return self.code(codes), scale

    def config(self, exact: list[str]) -> dict[str, Any]:
        """Return the `quantization_config` of a model with quantised linear layers, but for `exact` ones."""
        group = {"targets": ["Linear"], "weights": dict(self.weights), "input_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": self.layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {**group, "output_activations": None, "format": self.layout}},
            "ignore": exact,
            "kv_cache_scheme": None,
        }


def _packed(codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Return int8 codes as compressed-tensors packs them: offset by 128, four to an int32, the first one lowest."""
    outputs, inputs = codes.shape
    width = -(-inputs // 4)
    padded = torch.zeros(outputs, 4 * width, dtype=torch.uint8)
    padded[:, :inputs] = codes.view(torch.uint8) ^ 128
    shape = torch.tensor([outputs, inputs], dtype=torch.int64)
    return {"weight_packed": padded.view(torch.int32), "weight_scale": scales, "weight_shape": shape}


def _described(kind: str) -> dict[str, Any]:
    return {
        "num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "group_size": None,
        "block_structure": None, "dynamic": False, "actorder": None, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip


SCHEMES: Mapping[str, QuantizationScheme] = {
    "int8": QuantizationScheme(
        "int8", 127.0, "pack-quantized", _described("int"), lambda x: x.round_().to(torch.int8), _packed
    ),
    "fp8": QuantizationScheme(
        "fp8",
        448.0,
        "float-quantized",
        _described("float"),
        lambda x: x.to(torch.float8_e4m3fn),
        lambda codes, scales: {"weight": codes, "weight_scale": scales},
    ),
}
