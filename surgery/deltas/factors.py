"""Factors of one matrix: delta ~ B A, with the least error in the outputs on the inputs that the layer receives.

With C = E[x x^T], the rank-r B A that minimises E|delta x - B A x|^2 is the truncated SVD of delta C^1/2, multiplied by
C^-1/2 from the right. With fewer outputs than inputs, its left vectors U are the eigenvectors of delta C delta^T, and B
= U, A = U^T delta: no root, no inverse. Otherwise B = delta C^1/2 V and A = V^T C^-1/2. With C = 1 both are the plain
truncated SVD, the control.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Shrinkage of full moments towards their diagonal: correlations of few tokens are partly chance, and outlier channels
#: must not dominate.
SHRINKAGE = 0.05
#: Added to the diagonal, as a share of its mean, so that directions absent from the text stay invertible.
FLOOR = 1e-6
#: Elements of a delta held in float64 at once.
_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class Factors:
    """a [k, in], b [out, k], ordered by usefulness: any prefix of ranks is a best approximation.

    Fields:
        gains: [k], the share of the expected squared error of the outputs that each rank removes.
    """

    a: Tensor
    b: Tensor
    gains: Tensor


def regular(moment: Tensor) -> Tensor:
    """Return the moments [in, in] or [in], regularised so that they are invertible."""
    diagonal = moment if moment.dim() == 1 else moment.diagonal()
    floor = FLOOR * diagonal.mean()
    floor = torch.where(floor > 0, floor, torch.ones_like(floor))
    if moment.dim() == 1:
        return moment + floor
    return (1 - SHRINKAGE) * moment + torch.diag(SHRINKAGE * diagonal + floor)


def factorise(delta: Tensor, moment: Tensor | None, limit: int) -> Factors:
    """Return the first `limit` ranks of a delta.

    Args:
        delta: Fine-tune minus base, [out, in].
        moment: E[x x^T] [in, in], its diagonal [in], or None for the plain truncated SVD.

    Returns:
        Factors in float32, with each rank's norm split evenly between A and B, so that neither exceeds the range of a
        half. They are computed in float64, one slice of the delta at a time, since heads and tables are large.
    """
    moment = (
        torch.ones(delta.shape[1], dtype=torch.float64, device=delta.device)
        if moment is None
        else regular(moment.double())
    )
    a, b, values = (_from_the_left if delta.shape[0] <= delta.shape[1] else _from_the_right)(delta, moment, limit)
    _even_(a, b)
    shares = values.flip(0).clamp_min(0) / values.clamp_min(0).sum().clamp_min(1e-300)
    return Factors(a, b, shares[:limit])


def _from_the_left(delta: Tensor, moment: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (A, B, all squared singular values, ascending), from delta C delta^T [out, out]."""
    columns = _slices(delta.shape[1], delta.shape[0])
    if moment.dim() == 1:
        square = torch.zeros(delta.shape[0], delta.shape[0], dtype=torch.float64, device=delta.device)
        for each in columns:
            part = delta[:, each].double()
            square += _on(part, moment[each]) @ part.t()
    else:
        whole = delta.double()
        square = _on(whole, moment) @ whole.t()
    values, vectors = torch.linalg.eigh(square)
    kept = vectors.flip(1)[:, :limit]
    a = torch.empty(kept.shape[1], delta.shape[1], device=delta.device)
    for each in columns:
        a[:, each] = (kept.t() @ delta[:, each].double()).float()
    return a, kept.float().contiguous(), values


def _from_the_right(delta: Tensor, moment: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as `_from_the_left`, from C^1/2 delta^T delta C^1/2 [in, in]."""
    root, inverse = _roots(moment)
    rows = _slices(delta.shape[0], delta.shape[1])
    square = torch.zeros(delta.shape[1], delta.shape[1], dtype=torch.float64, device=delta.device)
    for each in rows:
        part = _on(delta[each].double(), root)
        square += part.t() @ part
    values, vectors = torch.linalg.eigh(square)
    kept = vectors.flip(1)[:, :limit]
    back = _on(kept.t(), root).t()  # C^1/2 V
    b = torch.empty(delta.shape[0], kept.shape[1], device=delta.device)
    for each in rows:
        b[each] = (delta[each].double() @ back).float()
    return _on(kept.t(), inverse).float().contiguous(), b, values


def _slices(length: int, width: int) -> list[slice]:
    """Return slices of lines with about `_AT_ONCE` elements each."""
    step = max(1, _AT_ONCE // width)
    return [slice(lo, lo + step) for lo in range(0, length, step)]


def _on(x: Tensor, moment: Tensor) -> Tensor:
    """Return x C for a full or diagonal C."""
    return x * moment if moment.dim() == 1 else x @ moment


def _roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return C^1/2 and C^-1/2."""
    if moment.dim() == 1:
        return moment.sqrt(), moment.rsqrt()
    values, vectors = torch.linalg.eigh(moment)
    root = values.clamp_min(float(values[-1]) * 1e-12).sqrt()
    return (vectors * root) @ vectors.t(), (vectors / root) @ vectors.t()


def _even_(a: Tensor, b: Tensor) -> None:
    """Scale rows of A and columns of B in place to equal norms, leaving their products unchanged."""
    of_a, of_b = a.norm(dim=1), b.norm(dim=0)
    scale = torch.where((of_a > 0) & (of_b > 0), (of_b / of_a).sqrt(), torch.ones_like(of_a))
    a.mul_(scale[:, None])
    b.div_(scale)
