"""The rewriting's quality against its size: any rank scored on held-out text against the exact fine-tune.

A *rank* here is a budget: the elements that this rank on every matrix would take. `spread` puts them where they gain most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from surgery.deltas.plan import DeltaPlan
from surgery.deltas.ranks import even, spread
from surgery.deltas.score import Score, Scores, compare_heads
from surgery.deltas.study import Studied, layer_ends
from surgery.deltas.trial import Trial
from surgery.stack import Stack
from zoo.manifest import DTYPE_BYTES, ModelManifest, TensorMeta

Allocation = Literal["spread", "even"]
#: Windows that run together.
_BATCH = 8


@dataclass(frozen=True)
class Point:
    """One rank. `bytes`: tensors that the rewriting adds to its base; `score` against the exact fine-tune at the head."""

    rank: int
    bytes: int
    score: Score


@dataclass(frozen=True)
class Sizes:
    """Bytes: what the exact fine-tune adds to its base, and what the tensors take that the rewriting carries whole."""

    exact: int
    whole: int


def sizes_of(exact: ModelManifest, base: ModelManifest, plan: DeltaPlan) -> Sizes:
    """Each distinct tensor counts once."""
    known = {tensor.digest for tensor in base.tensors}
    metas = {tensor.digest: tensor for tensor in exact.tensors}
    whole = {each.digest for each in plan.wholes} - known
    return Sizes(sum(meta.nbytes for digest, meta in metas.items() if digest not in known), sum(metas[digest].nbytes for digest in whole))


class Curve:
    """Ranks of one studied fine-tune, scored as they are asked for."""

    def __init__(
        self, exact: ModelManifest, plan: DeltaPlan, studied: Studied, trial: Trial, held: Tensor, sizes: Sizes, allocation: Allocation
    ) -> None:
        """`held`: the windows that the study kept hidden states of."""
        self.points: dict[int, Point] = {}
        self._exact, self._plan, self._studied, self._trial, self._held = exact, plan, studied, trial, held
        self._sizes, self._allocation = sizes, allocation
        metas = {tensor.digest: tensor for tensor in exact.tensors}
        self._item = [_itemsize(metas[matrix.weight.fine]) for matrix in plan.matrices]

    def ranks(self, rank: int) -> tuple[int, ...]:
        """Each matrix's rank at this budget."""
        level = even(rank, self._studied.gains)
        if self._allocation == "even":
            return level
        costs = [matrix.per_rank for matrix in self._plan.matrices]
        budget = sum(each * cost for each, cost in zip(level, costs, strict=True))
        return spread(budget, self._studied.gains, costs)

    def bytes(self, rank: int) -> int:
        """Tensors that the rewriting adds to its base."""
        low = zip(self.ranks(rank), self._plan.matrices, self._item, strict=True)
        return self._sizes.whole + sum(each * matrix.per_rank * item for each, matrix, item in low)

    @property
    def highest(self) -> int:
        """The largest rank at which the rewriting is smaller than the exact fine-tune; 0 when none is."""
        low, high = 0, max(len(each) for each in self._studied.gains)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes(middle) < self._sizes.exact else (low, middle - 1)
        return low

    @torch.inference_mode()
    def at(self, rank: int) -> Point:
        """Score a rank at the head."""
        if rank not in self.points:
            self._trial.use_(self.ranks(rank))
            last = layer_ends(self._exact)[-1]
            score = self._scored([last])[last]
            self.points[rank] = Point(rank, self.bytes(rank), score)
        return self.points[rank]

    @torch.inference_mode()
    def layers(self, rank: int) -> dict[int, Score]:
        """The score behind each layer's last component, through each model's own norm and head (BL-05)."""
        self._trial.use_(self.ranks(rank))
        return self._scored(layer_ends(self._exact))

    def _scored(self, ends: Sequence[int]) -> dict[int, Score]:
        return compare_stacks(self._studied, self._trial.stack, self._held, ends)


def compare_stacks(studied: Studied, stack: Stack, held: Tensor, ends: Sequence[int]) -> dict[int, Score]:
    """A stack against the fine-tune behind these components, on the windows that the study kept."""
    sums = {end: Scores() for end in ends}
    kept = {end: studied.states(end) for end in ends}
    for lo in range(0, len(held), _BATCH):
        rows = slice(lo, lo + _BATCH)
        ids = held[rows].to(stack.device)
        course, x, done = stack.course(ids), ids, 0
        for end in ends:
            x, done = stack.run(x, course, done, end + 1), end + 1
            compare_heads(kept[end][rows].to(x.device), studied.head, x, stack.head, ids, sums[end])
    return {end: each.score for end, each in sums.items()}


def _itemsize(meta: TensorMeta) -> int:
    return DTYPE_BYTES[meta.dtype]
