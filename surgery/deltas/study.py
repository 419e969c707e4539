"""What is learned from one pass over the fine-tune: the factors of its deltas, and its hidden states on held-out text.

Components run one after the other over all windows, so that one component's moments and matrices are in memory at a time; factors and
hidden states go to a scratch folder and are mapped from there. Afterwards the fine-tune itself is not needed but for its head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from surgery.deltas.effects import Effects
from surgery.deltas.factors import factorise
from surgery.deltas.moments import Moment, watched
from surgery.deltas.plan import DeltaPlan, Matrix, Pair, cheaper_rank
from surgery.deltas.ranks import Gains
from surgery.deltas.trial import Sides
from surgery.load import load_model
from surgery.stack import Course, Stack, stack_of
from surgery.tensors import stored_tensor
from zoo.errors import InputError
from zoo.manifest import ModelManifest
from zoo.store import Store

#: Windows that run together.
_BATCH = 8
#: Called with (matrices done, matrices in all).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class How:
    """`aware`: weigh deltas by what the layers see on text (else the plain truncated SVD); `diagonal`: channel by channel only.

    `effects`: measure what each matrix is worth (else all are worth the same). `rank`: factors are kept at least up to this rank;
    else up to where they are no smaller than the matrix.
    """

    aware: bool = True
    diagonal: bool = False
    effects: bool = True
    device: str = "cpu"
    rank: int | None = None


@dataclass(frozen=True)
class Studied:
    """`factors`: per matrix of the plan, mapped; `gains`: how much nearer each rank brings the predictions, in nats.

    `hidden`: component -> file of the fine-tune's hidden states behind it on the held-out windows; `head`: its own final norm and head.
    """

    factors: tuple[Sides, ...]
    gains: tuple[Gains, ...]
    hidden: Mapping[int, Path]
    head: nn.Module

    def states(self, at: int) -> Tensor:
        """Hidden states [windows, tokens, width] behind component `at`."""
        states: Tensor = load_file(self.hidden[at])["hidden"]
        return states


@torch.inference_mode()
def study(
    store: Store,
    exact: ModelManifest,
    plan: DeltaPlan,
    train: Tensor,
    held: Tensor,
    scratch: Path,
    how: How,
    progress: Progress | None = None,
) -> Studied:
    """Run the fine-tune over the text and take its deltas apart.

    Args:
        train: ids [windows, tokens] that weigh the deltas; held: ids that the result is scored on.
        scratch: a folder of the caller's; it will hold up to the size of the fine-tune's matrices.

    Raises:
        InputError: weights or hidden states that are not finite.
    """
    model = load_model(store, exact, device=how.device)
    stack = stack_of(model, exact.components)
    effects = Effects(stack, train[:_BATCH].to(stack.device)) if how.effects else None
    splitter = _Splitter(store, plan, scratch, how, effects, progress)
    seen, kept = _Passes.over(train, stack), _Passes.over(held, stack)
    hidden: dict[int, Path] = {}
    ends = {*layer_ends(exact), stack.end - 1}
    for at in range(stack.end):
        with splitter.watching(at, model, seen.states[0]):
            seen.step(at)
        kept.step(at)
        if at in ends:
            hidden[at] = scratch / f"hidden-{at}.safetensors"
            save_file({"hidden": _finite(kept.joined(), f"{exact.name} computes NaN or infinity on the text").cpu()}, hidden[at])
    with splitter.watching(stack.end, model, seen.states[0]) as watches:
        for row in seen.states if watches else ():
            for window in row:
                stack.head(window)
    factors = tuple(_sides(splitter.file(index)) for index in range(len(plan.matrices)))
    return Studied(factors, tuple(splitter.gains), hidden, stack.parts[stack.end])


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
    def over(cls, ids: Tensor, stack: Stack) -> _Passes:
        batches = list(torch.split(ids.to(stack.device), _BATCH))
        return cls(stack, [stack.course(each) for each in batches], batches)

    def step(self, at: int) -> None:
        """Run component `at`."""
        self.states = [self.stack.run(x, where, at, at + 1) for x, where in zip(self.states, self.courses, strict=True)]

    def joined(self) -> Tensor:
        return torch.cat(self.states)


@dataclass(frozen=True)
class _Delta:
    """One matrix's difference, [out, in] in float64. `ratio`: of the norm that it takes over, fine-tune to base.

    `base`: the weight that gives the base's outputs behind the fine-tune's norm.
    """

    matrix: Matrix
    value: Tensor
    ratio: Tensor | None
    base: Tensor
    dtype: torch.dtype

    @property
    def undone(self) -> Tensor:
        """The base's weight in the module's own layout."""
        return self.base.t().contiguous() if self.matrix.turned else self.base


class _Splitter:
    """Gathers the moments of one component's matrices while it runs, and takes their deltas apart when it has."""

    def __init__(self, store: Store, plan: DeltaPlan, scratch: Path, how: How, effects: Effects | None, progress: Progress | None) -> None:
        self.gains: list[Gains] = []
        self._store, self._plan, self._scratch, self._how, self._effects, self._progress = store, plan, scratch, how, effects, progress

    def file(self, index: int) -> Path:
        return self._scratch / f"factors-{index}.safetensors"

    @contextmanager
    def watching(self, at: int, model: nn.Module, before: Tensor) -> Iterator[bool]:
        """While component `at` runs. `before`: what it gets of the first windows. Yields whether its runs are watched at all."""
        matrices = [(index, matrix) for index, matrix in enumerate(self._plan.matrices) if matrix.at == at]
        modules = {matrix.path: model.get_submodule(matrix.path) for _, matrix in matrices}
        moments = {matrix.path: Moment(matrix.columns, self._how.diagonal) for _, matrix in matrices} if self._how.aware else {}
        with watched({path: modules[path] for path in moments}, moments):
            yield bool(moments)
        for index, matrix in matrices:
            moment = moments.pop(matrix.path, None)
            delta = self._delta(matrix)
            shares = self._split(index, delta, None if moment is None else moment.value)
            effect = 1.0 if self._effects is None else self._effects.of(at, before, modules[matrix.path], delta.undone)
            self.gains.append(shares * effect)
            if self._progress is not None:
                self._progress(len(self.gains), len(self._plan.matrices))

    def _split(self, index: int, delta: _Delta, moment: Tensor | None) -> Gains:
        """Factorise one delta and put it on disk, in the dtype that it will be stored in; what its ranks are worth, as shares."""
        wrong = f"the delta of {delta.matrix.path} is not finite: its weights, or what they compute on the text, hold NaN or infinity"
        if moment is not None:
            moment = _finite(moment if delta.ratio is None else _seen_through(moment, delta.ratio), wrong)
        factors = factorise(_finite(delta.value, wrong), moment, self._limit(delta.matrix))
        sides = {name: _finite(side.to(delta.dtype), wrong).cpu() for name, side in (("a", factors.a), ("b", factors.b))}
        save_file(sides, self.file(index))
        return factors.gains.cpu().numpy().astype(np.float64)

    def _delta(self, matrix: Matrix) -> _Delta:
        base, fine = self._weights(matrix.weight)
        dtype = fine.dtype
        if matrix.turned:
            base, fine = base.t(), fine.t()
        base, fine = base.double(), fine.double()
        if matrix.norm is None:
            return _Delta(matrix, fine - base, None, base, dtype)
        ratio = self._ratio(matrix, matrix.norm)
        return _Delta(matrix, fine * ratio - base, ratio, base / ratio, dtype)

    def _limit(self, matrix: Matrix) -> int:
        return min(matrix.full_rank, max(cheaper_rank(matrix), self._how.rank or 0))

    def _weights(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """Base and fine-tune, as they are stored."""
        base, fine = (stored_tensor(self._store, digest).to(self._how.device) for digest in (pair.base, pair.fine))
        return base, fine

    def _ratio(self, matrix: Matrix, norm: Pair) -> Tensor:
        """The fine-tune's norm over the base's, per channel."""
        base, fine = self._weights(norm)
        ratio = fine.double() / base.double()
        size = ratio.abs()
        if not bool(ratio.isfinite().all()) or float(size.min()) < 1e-3 or float(size.max()) > 1e3:
            raise InputError(f"the norm before {matrix.path} moved too far for the layers behind it to take over: use --norms exact")
        return ratio


def _seen_through(moment: Tensor, ratio: Tensor) -> Tensor:
    """The moments of inputs before `ratio` was multiplied to them."""
    return moment / ratio.square() if moment.dim() == 1 else moment / torch.outer(ratio, ratio)


def _finite(x: Tensor, wrong: str) -> Tensor:
    if not bool(x.isfinite().all()):
        raise InputError(wrong)
    return x


def _sides(path: Path) -> Sides:
    found = load_file(path)
    return Sides(found["a"], found["b"])
