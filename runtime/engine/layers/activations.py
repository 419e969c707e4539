"""Torch's activation functions with the same bits for a value wherever it stands in a tensor.

Torch computes what is left over at the end of a tensor, or of a thread's part of it, with other functions than whole
vectors; the results differ in the last bit. `Uniform` calls the function on whole vectors only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Values of the longest vectors that torch's loops process at once, and most values that one thread takes in one call.
_VECTOR, _PIECE = 64, 1 << 15
#: Modules that hold transformers' and torch's activation functions.
_HOMES = ("transformers.activations", "torch.nn.modules.activation")


class Uniform(nn.Module):
    """An elementwise function on a CPU, called on pieces of whole vectors."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        count = x.numel()
        flat = F.pad(x.reshape(-1), (0, -count % _VECTOR))
        made = [self.function(piece) for piece in torch.split(flat, _PIECE)]
        out = made[0] if len(made) == 1 else torch.cat(made)
        return out[:count].view(x.shape)


def make_uniform_(module: nn.Module) -> None:
    """Replace the activation functions below `module` by their `Uniform` form, in place."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__module__ in _HOMES and not list(child.parameters()):
                setattr(parent, name, Uniform(child))
