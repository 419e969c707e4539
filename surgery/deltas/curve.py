"""Score a rewriting's quality against its size: ranks scored on held-out text against the exact fine-tune.

A *rank* here is a budget: the elements that this rank on every matrix would take. `spread` allocates them by greatest
gain; a budget of bytes is allocated the same way. Scores are stored with the study, so that no ranks are scored twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from surgery.deltas.plan import DeltaPlan
from surgery.deltas.ranks import even, largest, spread
from surgery.deltas.score import DeltaScore, DeltaScores, compare_heads
from surgery.deltas.study import Studied, layer_ends
from surgery.deltas.trial import Trial
from surgery.modules.stack import Stack
from surgery.scoring.lens import Lens
from surgery.tensors.half_products import fast_products
from surgery.training.checkpoint import Saved, TaskFolder
from zoo.errors import InputError
from zoo.manifest import DTYPE_BYTES, ModelManifest, TensorMeta, digest_of

Allocation = Literal["spread", "even"]
#: Windows per batch.
_BATCH = 8
#: Part of the task's state that holds scores.
_POINTS = "points"


@dataclass(frozen=True)
class Ranks:
    """An allocation of ranks.

    Fields:
        rank: The budget that it comes from, or the largest rank with a cost that it covers.
        each: Rank of every matrix of the plan.
    """

    rank: int
    each: tuple[int, ...]


@dataclass(frozen=True)
class CurvePoint:
    """The score of one allocation.

    Fields:
        bytes: Bytes of tensors that the rewriting adds to its base.
        score: Against the exact fine-tune, at the head.
    """

    rank: int
    bytes: int
    score: DeltaScore


@dataclass(frozen=True)
class CurveSizes:
    """Sizes in bytes.

    Fields:
        exact: Bytes that the exact fine-tune adds to its base.
        whole: Bytes of the tensors that the rewriting carries whole.
    """

    exact: int
    whole: int


def sizes_of(exact: ModelManifest, base: ModelManifest, plan: DeltaPlan) -> CurveSizes:
    """Return the sizes; each distinct tensor counts once."""
    known = {tensor.digest for tensor in base.tensors}
    metas = {tensor.digest: tensor for tensor in exact.tensors}
    whole = {each.digest for each in plan.wholes} - known
    return CurveSizes(
        sum(meta.nbytes for digest, meta in metas.items() if digest not in known),
        sum(metas[digest].nbytes for digest in whole),
    )


class Curve:
    """Scores of a studied fine-tune at any ranks, computed on demand."""

    def __init__(
        self,
        exact: ModelManifest,
        plan: DeltaPlan,
        studied: Studied,
        trial: Trial,
        held: Tensor,
        sizes: CurveSizes,
        allocation: Allocation,
        task: TaskFolder,
    ) -> None:
        """Prepare the curve.

        Args:
            held: The windows for which the study kept hidden states.
            task: Folder in which scores are stored.
        """
        self._exact, self._studied, self._trial, self._held = exact, studied, trial, held
        self._sizes, self._allocation, self._task = sizes, allocation, task
        metas = {tensor.digest: tensor for tensor in exact.tensors}
        self._costs = [matrix.per_rank * _itemsize(metas[matrix.weight.fine]) for matrix in plan.matrices]
        self._known = _read(task)
        self._asked: dict[tuple[int, str], CurvePoint] = {}

    @property
    def points(self) -> tuple[CurvePoint, ...]:
        """The points requested so far, by rank."""
        return tuple(sorted(self._asked.values(), key=lambda point: (point.rank, point.bytes)))

    def by_rank(self, rank: int) -> Ranks:
        """Return each matrix's rank at this budget."""
        level = even(rank, self._studied.gains)
        return Ranks(
            rank, level if self._allocation == "even" else spread(self._cost(level), self._studied.gains, self._costs)
        )

    def by_bytes(self, most: int) -> Ranks:
        """Return the allocation with the greatest gain in at most `most` bytes.

        Raises InputError if the tensors carried whole leave no bytes for factors.
        """
        rank = largest(lambda each: self.bytes(self.by_rank(each).each) <= most, self._most_ranks)
        if self._allocation == "even":
            ranks = Ranks(rank, self.by_rank(rank).each)
        else:
            ranks = Ranks(rank, spread(max(0, most - self._sizes.whole), self._studied.gains, self._costs))
        if not any(ranks.each):
            raise InputError(
                f"{most:,} bytes leave nothing for deltas: what is carried whole takes {self._sizes.whole:,} of the "
                f"{self._sizes.exact:,} bytes of {self._exact.name}"
                + (" (see --embeddings lowrank)" if self._sizes.whole else "")
            )
        return ranks

    def bytes(self, ranks: Sequence[int]) -> int:
        """Return the bytes of tensors that the rewriting adds to its base."""
        return self._sizes.whole + self._cost(ranks)

    @property
    def highest(self) -> int:
        """The largest rank at which the rewriting is smaller than the exact fine-tune; 0 if there is none."""
        return largest(lambda each: self.bytes(self.by_rank(each).each) < self._sizes.exact, self._most_ranks)

    def at(self, rank: int) -> CurvePoint:
        """Score a rank at the head."""
        return self.score(self.by_rank(rank))

    @torch.inference_mode()
    @fast_products()
    def score(self, ranks: Ranks) -> CurvePoint:
        """Score an allocation at the head, or return its stored score."""
        key = digest_of(list(ranks.each))
        if key not in self._known:
            self._trial.use_(ranks.each)
            last = layer_ends(self._exact)[-1]
            self._known[key] = self._scored([last])[last]
            self._task.save(_POINTS, Saved(0, {}, {known: asdict(score) for known, score in self._known.items()}))
        point = CurvePoint(ranks.rank, self.bytes(ranks.each), self._known[key])
        self._asked[ranks.rank, key] = point
        return point

    @torch.inference_mode()
    @fast_products()
    def layers(self, ranks: Ranks) -> dict[int, DeltaScore]:
        """Return the score after each layer's last component, through each model's own norm and head (BL-05)."""
        self._trial.use_(ranks.each)
        return self._scored(layer_ends(self._exact))

    @property
    def _most_ranks(self) -> int:
        return max(len(each) for each in self._studied.gains)

    def _cost(self, ranks: Sequence[int]) -> int:
        """Return the bytes of the factors."""
        return sum(each * cost for each, cost in zip(ranks, self._costs, strict=True))

    def _scored(self, ends: Sequence[int]) -> dict[int, DeltaScore]:
        return compare_stacks(self._studied, self._trial.stack, self._held, ends)


def compare_stacks(studied: Studied, stack: Stack, held: Tensor, ends: Sequence[int]) -> dict[int, DeltaScore]:
    """Score a stack against the fine-tune after each of these components, on the windows that the study kept."""
    sums = {end: DeltaScores() for end in ends}
    kept = {end: studied.states(end) for end in ends}
    exact, other = Lens(studied.head), Lens(stack.parts[stack.end])
    for lo in range(0, len(held), _BATCH):
        rows = slice(lo, lo + _BATCH)
        ids = held[rows].to(stack.device)
        course, x, done = stack.course(ids), ids, 0
        for end in ends:
            x, done = stack.run(x, course, done, end + 1), end + 1
            compare_heads(kept[end][rows].to(x.device), exact, x, other, ids, sums[end])
    return {end: each.score for end, each in sums.items()}


def _read(task: TaskFolder) -> dict[str, DeltaScore]:
    """Return the scores of an earlier run."""
    kept = task.load(_POINTS)
    try:
        return {} if kept is None else {key: DeltaScore(**score) for key, score in kept.facts.items()}
    except TypeError:
        return {}


def _itemsize(meta: TensorMeta) -> int:
    return DTYPE_BYTES[meta.dtype]
