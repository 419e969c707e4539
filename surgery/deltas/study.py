"""What is learned from one pass over the fine-tune: the factors of its deltas, and its hidden states on held-out text.

Components run one after the other over all windows, so that one component's moments and matrices are in memory at a
time; factors and hidden states go to the task's folder and are mapped from there, which is also where a study that was
stopped goes on: what lies there is not made again. Afterwards the fine-tune itself is not needed but for its head.
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
from surgery.tensors.pool import stored_tensor
from surgery.training.checkpoint import Saved, TaskFolder
from zoo.errors import InputError, StoreError
from zoo.manifest import ModelManifest
from zoo.store import Store

#: Windows that run together.
_BATCH = 8
#: Elements of a matrix that are held in float64 at once.
_ELEMENTS = 1 << 22
#: Called with (matrices done, matrices in all).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class StudySettings:
    """`aware`: weigh deltas by what the layers see on text (else the plain truncated SVD); `diagonal`: channel by
    channel only.

    `effects`: measure what each matrix is worth (else all are worth the same). `rank`: factors are kept at least up to
    this rank; else up to where they are no smaller than the matrix.
    """

    aware: bool = True
    diagonal: bool = False
    effects: bool = True
    device: str = "cpu"
    rank: int | None = None


@dataclass(frozen=True)
class Studied:
    """`factors`: per matrix of the plan, mapped; `gains`: how much nearer each rank brings the predictions, in nats.

    `hidden`: component -> the fine-tune's hidden states behind it on the held-out windows, mapped; `head`: its own
    final norm and head.
    """

    factors: tuple[Sides, ...]
    gains: tuple[Gains, ...]
    hidden: Mapping[int, Tensor]
    head: nn.Module

    def states(self, at: int) -> Tensor:
        """Hidden states [windows, tokens, width] behind component `at`."""
        return self.hidden[at]


@torch.inference_mode()
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
    """Run the fine-tune over the text and take its deltas apart.

    Args:
        train: ids [windows, tokens] that weigh the deltas; held: ids that the result is scored on.
        task: of this very fine-tune, plan, text and `how`; its folder will hold up to the size of the fine-tune's
            matrices.

    Raises:
        InputError: weights or hidden states that are not finite.
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
    """Raises StoreError where what was just saved has gone."""
    saved = task.load(part)
    if saved is None:
        raise StoreError(f"{task.folder} lost what was written to it ({part})")
    return saved


def layer_ends(model: ModelManifest) -> tuple[int, ...]:
    """Index of the last component of each layer."""
    places = model.components
    return tuple(
        at
        for at, placed in enumerate(places)
        if placed.layer is not None and (at + 1 == len(places) or places[at + 1].layer != placed.layer)
    )


@dataclass
class _Passes:
    """All windows on their way through a stack, a few together."""

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
    """One matrix's difference `value`, float32 [out, in]. `ratio`: of the norm that it takes over, fine-tune to base.

    `undone`: the weight, in the module's own layout, that gives the base's outputs behind the fine-tune's norm.
    """

    matrix: DeltaMatrix
    value: Tensor
    ratio: Tensor | None
    undone: Tensor
    dtype: torch.dtype


class _Splitter:
    """Gathers the moments of one component's matrices while it runs, and takes their deltas apart when it has."""

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
        """A matrix's factors, mapped, and what each rank is worth."""
        tensors = _loaded(self._task, _part(index)).tensors
        return Sides(tensors["a"], tensors["b"]), tensors["gains"].numpy()

    @contextmanager
    def watching(self, at: int, model: nn.Module, before: Tensor) -> Iterator[bool]:
        """While component `at` runs. `before`: what it gets of the first windows. Yields whether its runs are watched
        at all.
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
        """Keep one matrix's factors, in the dtype that they will be stored in, and the worth of its ranks."""
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
        """What an earlier run made of a matrix, if it is whole."""
        saved = self._task.load(_part(index))
        return saved if saved is not None and saved.tensors.keys() == {"a", "b", "gains"} else None

    def _weights(self, pair: DeltaPair) -> tuple[Tensor, Tensor]:
        """Base and fine-tune, as they are stored."""
        base, fine = (stored_tensor(self._store, digest).to(self._how.device) for digest in (pair.base, pair.fine))
        return base, fine

    def _ratio(self, matrix: DeltaMatrix, norm: DeltaPair) -> Tensor:
        """The fine-tune's norm over the base's, per channel, float64."""
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
    """How many ranks of a matrix's factors are kept."""
    return min(matrix.full_rank, max(cheaper_rank(matrix), rank or 0))


def _difference(fine: Tensor, base: Tensor, ratio: Tensor | None) -> Tensor:
    """`fine` (times `ratio`, by columns) less `base`: float32, computed in float64 some rows at a time."""
    made = torch.empty(fine.shape, device=fine.device)
    step = max(1, _ELEMENTS // fine.shape[1])
    for lo in range(0, len(fine), step):
        rows = slice(lo, lo + step)
        tuned = fine[rows].double() if ratio is None else fine[rows].double() * ratio
        made[rows] = (tuned - base[rows].double()).float()
    return made


def _seen_through(moment: Tensor, ratio: Tensor) -> Tensor:
    """The moments of inputs before `ratio` was multiplied to them."""
    return moment / ratio.square() if moment.dim() == 1 else moment / torch.outer(ratio, ratio)


def _finite(x: Tensor, wrong: str) -> Tensor:
    if not bool(x.isfinite().all()):
        raise InputError(wrong)
    return x
