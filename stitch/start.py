"""The start of a stitch: least squares from `[hidden of A; position; 1]` to the hidden states of B at the same depth.

It is fitted over all places (the pseudo-inverse of SN-Net, arXiv:2302.06586, with a ridge). Only the normal equations
are kept, in float64, so memory does not grow with the text. Each place is weighted by the size of B's states there:
deep states of a residual stream are many times larger and would otherwise dominate the fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stitch.block import Folded
from stitch.pair import ModelPair
from stitch.points import StitchPoint
from zoo.errors import TrainingFailed

#: Tokens that go through both models at once.
_TOKENS = 512


class Normal:
    """Weighted normal equations `(X^T X) S = X^T Y`; a row of `X` is `[hidden; position; 1]`."""

    def __init__(self, width_a: int, width_b: int, device: torch.device | str = "cpu") -> None:
        self._gram = torch.zeros(width_a + 2, width_a + 2, dtype=torch.float64, device=device)
        self._cross = torch.zeros(width_a + 2, width_b, dtype=torch.float64, device=device)

    def add_(self, hidden: Tensor, position: float, wanted: Tensor, weight: float = 1.0) -> None:
        """Add rows of one place: `hidden` [n, width_a], `wanted` [n, width_b]."""
        x = hidden.double()
        ones = x.new_ones(len(x), 1)
        x = torch.cat([x, ones * position, ones], dim=1)
        self._gram += weight * (x.T @ x)
        self._cross += weight * (x.T @ wanted.double())

    def solve(self, ridge: float, with_position: bool = True) -> Folded:
        """Return the map that fits best.

        Args:
            ridge: In units of the mean square of an input; it applies to the matrix and the position, not the bias.
            with_position: If off, return the best map without a position.

        Raises:
            TrainingFailed: The added states are not finite.
        """
        gram, cross = self._gram.clone(), self._cross
        place = len(gram) - 2
        mean = gram.diagonal()[:place].mean().clamp_min(torch.finfo(torch.float64).tiny)
        gram.diagonal()[: place + 1] += max(ridge, 1e-12) * mean
        if not with_position:
            keep = [at for at in range(len(gram)) if at != place]
            solved = cross.new_zeros(cross.shape)
            solved[keep] = torch.linalg.solve(gram[keep][:, keep], cross[keep])
        else:
            solved = torch.linalg.solve(gram, cross)
        if not torch.isfinite(solved).all():
            raise TrainingFailed(
                "the hidden states of one of the models are not finite: no stitch can be fitted to them"
            )
        weight = solved[:-1].T.float().contiguous()
        return Folded(weight, solved[-1].float().contiguous())


def fit(
    pair: ModelPair, windows: Tensor, points: Sequence[StitchPoint], advance: Callable[[int], None] | None = None
) -> Normal:
    """Build the normal equations over windows [n, length] at the given places.

    `advance` is called with the windows done.
    """
    device = pair.b.device
    rows = max(1, _TOKENS // windows.shape[1])
    normal: Normal | None = None
    weights: dict[int, float] = {}
    for lo in range(0, len(windows), rows):
        ids = windows[lo : lo + rows].to(device)
        entries, _ = pair.passes(ids, {point.b_layer for point in points})
        for layer, entry in entries.items():
            # The first batch fixes a place's weight, which must not change while equations are summed.
            weights.setdefault(layer, 1.0 / max(float(entry.float().square().mean()), 1e-30))
        for layer, hidden in pair.heads(ids, {point.a_layer for point in points}):
            flat = hidden.flatten(0, 1)
            for point in (point for point in points if point.a_layer == layer):
                wanted = entries[point.b_layer].flatten(0, 1)
                normal = normal or Normal(flat.shape[1], wanted.shape[1], device)
                normal.add_(flat, point.position, wanted, weights[point.b_layer])
        if advance is not None:
            advance(min(lo + rows, len(windows)))
    if normal is None:
        raise ValueError("least squares need a window and a place")
    return normal
