"""Run bfloat16 models with float32 activations inside a step (CPU, native kernels).

Weights, K and V, and the hidden states between stages stay bfloat16. Inside a step hidden states are float32, and every
component rounds its output to bfloat16. So norms, rotary positions, softmax and all sums are float32, and a chain gives
the same bits wherever it is cut.

    own modules (fused halves, the head)    float32 in, rounded float32 out; weights are packed bfloat16
    all others (`Widened`)                  bfloat16 inside, as transformers computes them
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runtime.engine.layers.linear import SharedEmbedding, SharedLinear
from surgery.modules.components import Where


class Widened(nn.Module):
    """Run a bfloat16 module on float32 hidden states, and return float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, hidden: Tensor, where: Where | None = None) -> Tensor:
        """Return the module's output for hidden states or token ids, with the rotary tables rounded, too."""
        given = _narrow(hidden) if hidden.is_floating_point() else hidden
        if where is None:
            out: Tensor = self.module(given)
        else:
            rotary = None if where.rotary is None else (_narrow(where.rotary[0]), _narrow(where.rotary[1]))
            out = self.module(given, where._replace(rotary=rotary))
        return out.float()


def widen_parameters_(module: nn.Module) -> int:
    """Convert the bfloat16 parameters of a module to float32, but for weights of linear layers and tables.

    Returns the bytes of the converted parameters.
    """
    nbytes = 0
    for each in module.modules():
        for name, value in list(each._parameters.items()):
            kept = isinstance(each, SharedLinear | SharedEmbedding | nn.Embedding) and name == "weight"
            if value is not None and value.dtype == torch.bfloat16 and not kept:
                wide = nn.Parameter(value.data.float(), requires_grad=False)
                each._parameters[name] = wide
                nbytes += wide.numel() * wide.element_size()
        if isinstance(each, SharedLinear) and each.product.bias is not None:
            each.use_bias(each.product.bias.float())
    return nbytes


def _narrow(x: Tensor) -> Any:
    return x.to(torch.bfloat16)
