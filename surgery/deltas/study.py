"""Study a fine-tune in one pass: the factors of its deltas, and its hidden states on held-out text.

Components run one after the other over all windows, so that one component's moments and matrices are in memory at a
time. Factors and hidden states are written to the task's folder and mapped from there; an interrupted study resumes
from it. Afterwards only the head of the fine-tune is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surgery.deltas.effects import Effects
from surgery.deltas.factors import Factors, factorise
from surgery.deltas.moments import Moment, watched
from surgery.deltas.plan import DeltaMatrix, DeltaPair, DeltaPlan, cheaper_rank
from surgery.deltas.ranks import Gains
from surgery.deltas.trial import Sides
from surgery.models.load import load_model
from surgery.modules.stack import Course, Stack, stack_of
from surgery.tensors.half_products import fast_products
from surgery.tensors.pool import stored_tensor
from surgery.training.checkpoint import Saved, TaskFolder
from zoo.errors import InputError, StoreError
from zoo.manifest import ModelManifest
from zoo.store import Store

#: Windows per batch.
_BATCH = 8
#: Elements of a matrix held in float64 at once.
_ELEMENTS = 1 << 22
#: Called with (matrices done, matrices in all).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class StudySettings:
    """Settings of `study`.

    Fields:
        aware: Weight deltas by the layers' inputs on text; else plain truncated SVD.
        diagonal: Use the diagonal of the input moments only.
        effects: Measure the effect of each matrix; else all have the same.
        rank: Keep factors at least up to this rank; else up to the rank at which they are as large as the matrix.
    """

    aware: bool = True
    diagonal: bool = False
    effects: bool = True
    device: str = "cpu"
    rank: int | None = None


@dataclass(frozen=True)
class Studied:
    """Result of `study`.

    Fields:
        factors: Per matrix of the plan, memory-mapped.
        gains: Per matrix, how much each rank improves the predictions, in nats.
        hidden: Component -> the fine-tune's hidden states after it on the held-out windows, memory-mapped.
        head: The fine-tune's own final norm and head.
    """

    factors: tuple[Sides, ...]
    gains: tuple[Gains, ...]
    hidden: Mapping[int, Tensor]
    head: nn.Module

    def states(self, at: int) -> Tensor:
        """Return the hidden states [windows, tokens, width] after component `at`."""
        return self.hidden[at]


@torch.inference_mode()
@fast_products()
def study(
    store: Store,
    exact: ModelManifest,
    plan: DeltaPlan,
    train: Tensor,
    held: Tensor,
    task: TaskFolder,
    how: StudySettings,
    progress: Progress | None = None,
) -> Studied:
    """Run the fine-tune over the text and factorise its deltas.

    Args:
        train: Ids [windows, tokens] that weight the deltas.
        held: Ids that the result is scored on.
        task: Folder for this fine-tune, plan, text and `how`; it grows up to the size of the fine-tune's matrices.

    Raises:
        InputError: Weights or hidden states are not finite.
    """
    model = load_model(store, exact, device=how.device)
    stack = stack_of(model, exact.components)
    effects = Effects(stack, train[:_BATCH].to(stack.device)) if how.effects else None
    splitter = _Splitter(store, plan, task, how, effects, progress)
    seen, kept = _Passes.from_tokens(train, stack), _Passes.from_tokens(held, stack)
    ends = sorted({*layer_ends(exact), stack.end - 1})
    for at in range(stack.end):
        with splitter.watching(at, model, seen.states[0]):
            seen.step(at)
        kept.step(at)
        if at in ends:
            states = _finite(kept.joined(), f"{exact.name} computes NaN or infinity on the text")
            task.save(f"hidden-{at}", Saved(at, {"hidden": states}))
    with splitter.watching(stack.end, model, seen.states[0]) as watches:
        for row in seen.states if watches else ():
            for window in row:
                stack.head(window)
    parts = [splitter.load(index) for index in range(len(plan.matrices))]
    hidden = {at: _loaded(task, f"hidden-{at}").tensors["hidden"] for at in ends}
    return Studied(
        tuple(sides for sides, _ in parts), tuple(gains for _, gains in parts), hidden, stack.parts[stack.end]
    )


def _loaded(task: TaskFolder, part: str) -> Saved:
    """Load a part that was just saved. Raises StoreError if it is gone."""
    saved = task.load(part)
    if saved is None:
        raise StoreError(f"{task.folder} lost what was written to it ({part})")
    return saved


def layer_ends(model: ModelManifest) -> tuple[int, ...]:
    """Return the index of the last component of each layer."""
    places = model.components
    return tuple(
        at
        for at, placed in enumerate(places)
        if placed.layer is not None and (at + 1 == len(places) or places[at + 1].layer != placed.layer)
    )


@dataclass
class _Passes:
    """All windows on their way through a stack, in batches."""

    stack: Stack
    courses: list[Course]
    states: list[Tensor]

    @classmethod
    def from_tokens(cls, ids: Tensor, stack: Stack) -> _Passes:
        batches = list(torch.split(ids.to(stack.device), _BATCH))
        return cls(stack, [stack.course(each) for each in batches], batches)

    def step(self, at: int) -> None:
        """Run component `at`."""
        self.states = [self.stack.run(x, where, at, at + 1) for x, where in zip(self.states, self.courses, strict=True)]

    def joined(self) -> Tensor:
        return torch.cat(self.states)


@dataclass(frozen=True)
class _Delta:
    """One matrix's difference.

    Fields:
        value: float32 [out, in].
        ratio: Fine-tune to base, of the norm that is folded in; None without one.
        undone: The weight, in the module's own layout, that gives the base's outputs after the fine-tune's norm.
    """

    matrix: DeltaMatrix
    value: Tensor
    ratio: Tensor | None
    undone: Tensor
    dtype: torch.dtype


class _Splitter:
    """Gathers the moments of one component's matrices while it runs, and factorises their deltas afterwards."""

    def __init__(
        self,
        store: Store,
        plan: DeltaPlan,
        task: TaskFolder,
        how: StudySettings,
        effects: Effects | None,
        progress: Progress | None,
    ) -> None:
        self._store, self._plan, self._task, self._how, self._effects, self._progress = (
            store,
            plan,
            task,
            how,
            effects,
            progress,
        )
        self._done = {index for index in range(len(plan.matrices)) if self._load_saved(index) is not None}

    def load(self, index: int) -> tuple[Sides, Gains]:
        """Return a matrix's factors, memory-mapped, and the gain of each rank."""
        tensors = _loaded(self._task, _part(index)).tensors
        return Sides(tensors["a"], tensors["b"]), tensors["gains"].numpy()

    @contextmanager
    def watching(self, at: int, model: nn.Module, before: Tensor) -> Iterator[bool]:
        """Gather moments while component `at` runs in the context; factorise its matrices at the end.

        Yields whether its runs are watched at all. `before` is its input for the first windows.
        """
        matrices = [
            (index, matrix)
            for index, matrix in enumerate(self._plan.matrices)
            if matrix.at == at and index not in self._done
        ]
        modules = {matrix.path: model.get_submodule(matrix.path) for _, matrix in matrices}
        moments = (
            {matrix.path: Moment(matrix.columns, self._how.diagonal) for _, matrix in matrices}
            if self._how.aware
            else {}
        )
        with watched({path: modules[path] for path in moments}, moments):
            yield bool(moments)
        for index, matrix in matrices:
            moment = moments.pop(matrix.path, None)
            self._take_apart(index, at, modules[matrix.path], before, None if moment is None else moment.value)

    def _take_apart(self, index: int, at: int, module: nn.Module, before: Tensor, moment: Tensor | None) -> None:
        """Store one matrix's factors, in the dtype that they will be stored in, and the gains of its ranks."""
        delta = self._delta(self._plan.matrices[index])
        factors = self._split(delta, moment)
        effect = 1.0 if self._effects is None else self._effects.measure_effect(at, before, module, delta.undone)
        self._task.save(
            _part(index), Saved(index, {"a": factors.a, "b": factors.b, "gains": factors.gains.double() * effect})
        )
        self._done.add(index)
        if self._progress is not None:
            self._progress(len(self._done), len(self._plan.matrices))

    def _split(self, delta: _Delta, moment: Tensor | None) -> Factors:
        wrong = (
            f"the delta of {delta.matrix.path} is not finite: its weights, or what they compute on the text, hold "
            "NaN or infinity"
        )
        if moment is not None:
            moment = _finite(moment if delta.ratio is None else _seen_through(moment, delta.ratio), wrong)
        factors = factorise(_finite(delta.value, wrong), moment, rank_limit(delta.matrix, self._how.rank))
        a, b = (_finite(side.to(delta.dtype), wrong) for side in (factors.a, factors.b))
        return Factors(a, b, factors.gains)

    def _delta(self, matrix: DeltaMatrix) -> _Delta:
        stored, tuned = self._weights(matrix.weight)
        base, fine = (stored.t(), tuned.t()) if matrix.turned else (stored, tuned)
        if matrix.norm is None:
            return _Delta(matrix, _difference(fine, base, None), None, stored, tuned.dtype)
        ratio = self._ratio(matrix, matrix.norm)
        undone = base / ratio.float()
        return _Delta(
            matrix,
            _difference(fine, base, ratio),
            ratio,
            undone.t().contiguous() if matrix.turned else undone,
            tuned.dtype,
        )

    def _load_saved(self, index: int) -> Saved | None:
        """Return the parts of a matrix that an earlier run saved, if complete."""
        saved = self._task.load(_part(index))
        return saved if saved is not None and saved.tensors.keys() == {"a", "b", "gains"} else None

    def _weights(self, pair: DeltaPair) -> tuple[Tensor, Tensor]:
        """Return base and fine-tune, as stored."""
        base, fine = (stored_tensor(self._store, digest).to(self._how.device) for digest in (pair.base, pair.fine))
        return base, fine

    def _ratio(self, matrix: DeltaMatrix, norm: DeltaPair) -> Tensor:
        """Return the fine-tune's norm divided by the base's, per channel, float64."""
        base, fine = self._weights(norm)
        ratio = fine.double() / base.double()
        size = ratio.abs()
        if not bool(ratio.isfinite().all()) or float(size.min()) < 1e-3 or float(size.max()) > 1e3:
            raise InputError(
                f"the norm before {matrix.path} moved too far for the layers behind it to take over: use --norms exact"
            )
        return ratio


def _part(index: int) -> str:
    return f"factors-{index}"


def rank_limit(matrix: DeltaMatrix, rank: int | None) -> int:
    """Return how many ranks of a matrix's factors are kept."""
    return min(matrix.full_rank, max(cheaper_rank(matrix), rank or 0))


def _difference(fine: Tensor, base: Tensor, ratio: Tensor | None) -> Tensor:
    """Return `fine` (times `ratio`, by columns) minus `base`: float32, computed in float64 a few rows at a time."""
    made = torch.empty(fine.shape, device=fine.device)
    step = max(1, _ELEMENTS // fine.shape[1])
    for lo in range(0, len(fine), step):
        rows = slice(lo, lo + step)
        tuned = fine[rows].double() if ratio is None else fine[rows].double() * ratio
        made[rows] = (tuned - base[rows].double()).float()
    return made


def _seen_through(moment: Tensor, ratio: Tensor) -> Tensor:
    """Return the moments of the inputs before they were multiplied by `ratio`."""
    return moment / ratio.square() if moment.dim() == 1 else moment / torch.outer(ratio, ratio)


def _finite(x: Tensor, wrong: str) -> Tensor:
    if not bool(x.isfinite().all()):
        raise InputError(wrong)
    return x
