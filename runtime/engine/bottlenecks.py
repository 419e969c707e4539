"""Bottleneck adapters of one half, each on its own rows; the half's own products are the base's, over all rows.

Knows which tokens use which adapter; what an adapter computes is `surgery.bottleneck_module`'s affair.
"""

from __future__ import annotations

from torch import Tensor

from runtime.engine.frame import current
from surgery.bottleneck_module import Bottleneck


class Bottlenecks:
    """Stands between a half's sub-layer and its residual. A loop over the adapters in the batch, not over its rows.

    No module: one that is called for every half of every step costs as much as a small product.
    """

    def __init__(self) -> None:
        self.parts: dict[str, Bottleneck] = {}

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def __call__(self, output: Tensor, residual: Tensor) -> Tensor:
        """output, residual [1, tokens, width] -> what is to be added to the residual."""
        if not self.parts:
            return output
        spans = [span for span in current().adapters if span.adapter in self.parts]
        if not spans:
            return output
        out = output.clone()
        for span in spans:
            mine = slice(span.lo, span.hi)
            out[:, mine] = self.parts[span.adapter](output[:, mine], residual[:, mine])
        return out
