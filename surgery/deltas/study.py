"""What is learned from one pass over the fine-tune: the factors of its deltas, and its hidden states on held-out text.

Components run one after the other over all windows, so that one component's moments and matrices are in memory at a time; factors and
hidden states go to a scratch folder and are mapped from there. Afterwards the fine-tune itself is not needed but for its head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from surgery.deltas.factors import Factors, factorise
from surgery.deltas.moments import Moment, watched
from surgery.deltas.plan import DeltaPlan, Matrix, Pair, cheaper_rank
from surgery.deltas.ranks import Gains
from surgery.deltas.trial import Sides
from surgery.load import load_model
from surgery.stack import Course, Stack, stack_of
from surgery.tensors import map_tensor
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

    `rank`: factors are kept at least up to this rank; else up to where they are no smaller than the matrix.
    """

    aware: bool = True
    diagonal: bool = False
    device: str = "cpu"
    rank: int | None = None


@dataclass(frozen=True)
class Studied:
    """`factors`: per matrix of the plan, mapped; `gains`: what each rank is worth, as a share of its layer's output energy.

    `hidden`: component -> file of the fine-tune's hidden states behind it on the held-out windows; `head`: its own final norm and head.
    """

    factors: tuple[Sides, ...]
    gains: tuple[Gains, ...]
    hidden: Mapping[int, Path]
    head: nn.Module

    def states(self, at: int) -> Tensor:
        """Hidden states [windows, tokens, width] behind component `at`."""
        return load_file(self.hidden[at])["hidden"]


@torch.inference_mode()
def study(
    store: Store, exact: ModelManifest, plan: DeltaPlan, train: Tensor, held: Tensor, scratch: Path, how: How, progress: Progress | None = None
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
    splitter = _Splitter(store, plan, scratch, how, progress)
    seen, kept = _Passes.over(train, stack), _Passes.over(held, stack)
    hidden: dict[int, Path] = {}
    ends = {*layer_ends(exact), stack.end - 1}
    for at in range(stack.end):
        with splitter.watching(at, model):
            seen.step(at)
        kept.step(at)
        if at in ends:
            hidden[at] = scratch / f"hidden-{at}.safetensors"
            save_file({"hidden": _finite(kept.joined(), f"{exact.name} computes NaN or infinity on the text").cpu()}, hidden[at])
    with splitter.watching(stack.end, model) as watches:
        for row in seen.states if watches else ():
            for window in row:
                stack.head(window)
    factors = tuple(_sides(splitter.file(index)) for index in range(len(plan.matrices)))
    return Studied(factors, tuple(splitter.gains), hidden, stack.parts[stack.end])


def layer_ends(model: ModelManifest) -> tuple[int, ...]:
    """Index of the last component of each layer."""
    places = model.components
    return tuple(
        at for at, placed in enumerate(places) if placed.layer is not None and (at + 1 == len(places) or places[at + 1].layer != placed.layer)
    )


@dataclass
class _Passes:
    """All windows on their way through a stack, a few together."""

    stack: Stack
    courses: list[Course]
    states: list[Tensor]

    @classmethod
    def over(cls, ids: Tensor, stack: Stack) -> _Passes:
        batches = list(ids.to(stack.device).split(_BATCH))
        return cls(stack, [stack.course(each) for each in batches], batches)

    def step(self, at: int) -> None:
        """Run component `at`."""
        self.states = [self.stack.run(x, where, at, at + 1) for x, where in zip(self.states, self.courses, strict=True)]

    def joined(self) -> Tensor:
        return torch.cat(self.states)


class _Splitter:
    """Gathers the moments of one component's matrices while it runs, and takes their deltas apart when it has."""

    def __init__(self, store: Store, plan: DeltaPlan, scratch: Path, how: How, progress: Progress | None) -> None:
        self.gains: list[Gains] = []
        self._store, self._plan, self._scratch, self._how, self._progress = store, plan, scratch, how, progress

    def file(self, index: int) -> Path:
        return self._scratch / f"factors-{index}.safetensors"

    @contextmanager
    def watching(self, at: int, model: nn.Module) -> Iterator[bool]:
        """While component `at` runs. Yields whether its runs are watched at all."""
        matrices = [(index, matrix) for index, matrix in enumerate(self._plan.matrices) if matrix.at == at]
        moments = {matrix.path: Moment(matrix.columns, self._how.diagonal) for _, matrix in matrices} if self._how.aware else {}
        with ExitStack() as hooks:
            if moments:
                hooks.enter_context(watched({path: model.get_submodule(path) for path in moments}, moments))
            yield bool(moments)
        for index, matrix in matrices:
            moment = moments.pop(matrix.path, None)
            self._split(index, matrix, None if moment is None else moment.value)

    def _split(self, index: int, matrix: Matrix, moment: Tensor | None) -> None:
        """Factorise one delta and put it on disk, in the dtype that it will be stored in."""
        base, fine = self._weights(matrix.weight, matrix.turned)
        dtype = fine.dtype
        base, fine = base.double(), fine.double()
        if matrix.norm is not None:
            ratio = self._ratio(matrix, matrix.norm)
            fine = fine * ratio
            moment = None if moment is None else _seen_through(moment, ratio)
        wrong = f"the delta of {matrix.path} is not finite: its weights, or what they compute on the text, hold NaN or infinity"
        delta = _finite(fine - base, wrong)
        factors: Factors = factorise(delta, fine, None if moment is None else _finite(moment, wrong), self._limit(matrix))
        sides = {"a": _finite(factors.a.to(dtype), wrong).cpu(), "b": _finite(factors.b.to(dtype), wrong).cpu()}
        save_file(sides, self.file(index))
        self.gains.append((factors.gains / max(factors.energy, 1e-300)).cpu().numpy().astype(np.float64))
        if self._progress is not None:
            self._progress(len(self.gains), len(self._plan.matrices))

    def _limit(self, matrix: Matrix) -> int:
        return min(matrix.full_rank, max(cheaper_rank(matrix), self._how.rank or 0))

    def _weights(self, pair: Pair, turned: bool = False) -> tuple[Tensor, Tensor]:
        """Base and fine-tune, matrices as [out, in]."""
        base, fine = (map_tensor(self._store.open_tensor(digest)).to(self._how.device) for digest in (pair.base, pair.fine))
        return (base.t(), fine.t()) if turned else (base, fine)

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

