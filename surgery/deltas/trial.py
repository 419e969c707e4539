"""A rewriting at any rank as a running model: the base's weights, the tensors carried whole, and factors.

The ranks in use are changed in place, so that one loaded model is used for the whole curve. It computes the same as
peft and the engine do for the stored result: the low-rank part in float32 from factors rounded to the dtype they are
stored in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.deltas.plan import DeltaMatrix, DeltaPlan
from surgery.models.load import load_chain
from surgery.modules.stack import Stack, stack_of
from zoo.manifest import Component, ModelManifest, Placed
from zoo.store import Store


@dataclasses.dataclass(frozen=True, slots=True)
class Sides:
    """The factors of one matrix as stored: a [k, in], b [out, k]."""

    a: Tensor
    b: Tensor


class RankedDelta(nn.Module):
    """A linear layer or a table plus the first `rank` ranks of its factors."""

    def __init__(self, base: nn.Module, sides: Sides, table: bool) -> None:
        super().__init__()
        self.base = base
        self.sides = sides
        self.rank = 0
        self._table = table

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        if self.rank == 0:
            return out
        a, b = (
            side.to(device=out.device, dtype=torch.float32)
            for side in (self.sides.a[: self.rank], self.sides.b[:, : self.rank])
        )
        if not self._table:
            return (out + F.linear(F.linear(x.float(), a), b)).to(out.dtype)
        added = F.linear(F.embedding(x, a.t()), b)
        scale = getattr(self.base, "embed_scale", None)
        return (out + (added if scale is None else added * scale.to(added.dtype))).to(out.dtype)


class Trial:
    """A fine-tune's rewriting as a running model.

    `stack` computes it with the ranks of the last `use_`; all are zero at first.
    """

    def __init__(
        self, store: Store, exact: ModelManifest, plan: DeltaPlan, factors: Sequence[Sides], device: str = "cpu"
    ) -> None:
        components = carried(exact, plan)
        model = load_chain(store, dataclasses.replace(exact, components=components)).to(device)
        self._ranked = [_put_(model, matrix, sides) for matrix, sides in zip(plan.matrices, factors, strict=True)]
        self.stack: Stack = stack_of(model, components)

    def use_(self, ranks: Sequence[int]) -> None:
        """Set every matrix's rank."""
        for module, rank in zip(self._ranked, ranks, strict=True):
            module.rank = rank


def _put_(model: Any, matrix: DeltaMatrix, sides: Sides) -> RankedDelta:
    parent, _, name = matrix.path.rpartition(".")
    ranked = RankedDelta(model.get_submodule(matrix.path), sides, matrix.table)
    setattr(model.get_submodule(parent), name, ranked)
    return ranked


def carried(exact: ModelManifest, plan: DeltaPlan) -> tuple[Placed, ...]:
    """Return the fine-tune's components with the base's tensors where the plan carries factors or folds norms."""
    swapped: dict[int, dict[str, str]] = {}
    for matrix in plan.matrices:
        at = swapped.setdefault(matrix.at, {})
        at[matrix.weight.fine] = matrix.weight.base
        if matrix.norm is not None:
            at[matrix.norm.fine] = matrix.norm.base
    return tuple(_swapped(placed, swapped.get(at, {})) for at, placed in enumerate(exact.components))


def _swapped(placed: Placed, digests: dict[str, str]) -> Placed:
    old = placed.component
    tensors = tuple((name, digests.get(digest, digest)) for name, digest in old.tensors)
    return Placed(placed.layer, Component(old.kind, old.family, old.spec, tensors))
