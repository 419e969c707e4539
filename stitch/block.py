"""The trainable stitching block (BL-09): one linear map of `[hidden; position]`, and its stored form.

In training, the position is measured from the middle of the places in units of their spread: with a raw position of 60,
its column would learn sixty times faster than the rest. `folded` undoes this and gives a plain linear map of the raw
position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Folded:
    """A stitch in its stored form.

    Fields:
        weight: [d_b, d_a + 1]; the last column is for the position.
        bias: [d_b].
    """

    weight: Tensor
    bias: Tensor

    def __call__(self, hidden: Tensor, position: float) -> Tensor:
        """Map hidden states [.., d_a] -> [.., d_b], as `surgery.modules.components.Stitch` does."""
        weight = self.weight.to(hidden)
        return nn.functional.linear(hidden, weight[:, :-1], self.bias.to(hidden) + weight[:, -1] * position)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Folded:
        return Folded(self.weight.to(device=device, dtype=dtype), self.bias.to(device=device, dtype=dtype))


@dataclass(frozen=True, slots=True)
class Ruler:
    """Scales positions: distance from their middle in units of their spread."""

    centre: float
    unit: float

    @classmethod
    def from_positions(cls, positions: Sequence[float]) -> Ruler:
        low, high = min(positions), max(positions)
        return cls((low + high) / 2, max((high - low) / 2, 1.0))

    def read(self, position: float) -> float:
        return (position - self.centre) / self.unit


class Learner(nn.Module):
    """The trainable stitch, in float32.

    Without `with_position` (the control) the position's column stays zero, whatever the start.
    """

    def __init__(self, start: Folded, ruler: Ruler, with_position: bool = True) -> None:
        super().__init__()
        place = start.weight[:, -1].float()
        self.ruler = ruler
        self.with_position = with_position
        self.matrix = nn.Parameter(start.weight[:, :-1].float().clone())
        self.shift = nn.Parameter(start.bias.float() + place * ruler.centre)
        self.place = nn.Parameter(
            place * ruler.unit if with_position else torch.zeros_like(place), requires_grad=with_position
        )

    def forward(self, hidden: Tensor, position: float) -> Tensor:
        """Map hidden states [.., d_a] -> [.., d_b], float32."""
        return nn.functional.linear(hidden.float(), self.matrix, self.shift + self.place * self.ruler.read(position))

    @torch.no_grad()
    def folded(self) -> Folded:
        """Return the same map as a function of raw positions."""
        column = self.place / self.ruler.unit
        weight = torch.cat([self.matrix, column.unsqueeze(1)], dim=1)
        return Folded(weight.clone(), self.shift - column * self.ruler.centre)
