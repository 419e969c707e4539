"""The parts of making a stitch, each saved when complete: start, training, the control's training; and scoring."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from stitch.block import Folded
from stitch.pair import ModelPair
from stitch.points import StitchPoint
from stitch.saved import StitchTask
from stitch.scoring import StitchScores, Variant, score
from stitch.settings import StitchSettings
from stitch.start import fit
from stitch.training import StitchCourse, train
from surgery.training.checkpoint import Saved

#: Called with (name of the part, units done, units in all, a remark).
Progress = Callable[[str, int, int, str], None]

#: Variants of a stitch: with and without the position, each at its start and trained; and no stitch.
START, TRAINED, PLAIN_START, WITHOUT_POSITION, UNSTITCHED = (
    "start",
    "trained",
    "plain_start",
    "without_position",
    "unstitched",
)


class TrainingClock:
    """Measures the seconds of a task, including earlier, interrupted runs."""

    def __init__(self, task: StitchTask) -> None:
        saved = (task.load(part) for part in (START, TRAINED, WITHOUT_POSITION))
        self._before = max(
            (float(state.facts.get("seconds", 0.0)) for state in saved if state is not None), default=0.0
        )
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._began


def learn(
    pair: ModelPair,
    windows: Tensor,
    points: Sequence[StitchPoint],
    settings: StitchSettings,
    task: StitchTask,
    clock: TrainingClock,
    progress: Progress,
) -> dict[str, Folded]:
    """Return the trained stitch, its start and, if requested, the control trained without the position."""
    seen = tuple(point for point in points if point.seen)
    starts = _starts(pair, windows[: settings.start], seen, settings, task, clock, progress)
    found = {START: starts[START]}
    parts = [(TRAINED, START, True)]
    if settings.controls:
        parts.append((WITHOUT_POSITION, PLAIN_START, False))
    for part, start, with_position in parts:
        course = StitchCourse(pair, windows, seen, settings, with_position)
        found[part] = _trained(course, starts[start], part, task, clock, progress)
    return found


def _starts(
    pair: ModelPair,
    windows: Tensor,
    points: Sequence[StitchPoint],
    settings: StitchSettings,
    task: StitchTask,
    clock: TrainingClock,
    progress: Progress,
) -> dict[str, Folded]:
    """Return the least-squares starts, with and without the position."""
    saved = task.load(START)
    if saved is None:
        normal = fit(pair, windows, points, lambda done: progress("least squares", done, len(windows), ""))
        tensors: dict[str, Tensor] = {}
        for name, with_position in ((START, True), (PLAIN_START, False)):
            solved = normal.solve(settings.ridge, with_position)
            tensors.update({f"{name}.weight": solved.weight, f"{name}.bias": solved.bias})
        saved = Saved(0, tensors, {"seconds": clock.seconds})
        task.save(START, saved)
    device = pair.b.device
    return {
        name: Folded(saved.tensors[f"{name}.weight"], saved.tensors[f"{name}.bias"]).to(device)
        for name in (START, PLAIN_START)
    }


def _trained(
    course: StitchCourse, start: Folded, part: str, task: StitchTask, clock: TrainingClock, progress: Progress
) -> Folded:
    what = "training" if course.with_position else "control"

    def keep(state: Saved) -> None:
        task.save(part, replace(state, facts={**state.facts, "seconds": clock.seconds}))

    def advance(step: int, loss: float) -> None:
        progress(what, step, course.settings.steps, f"loss {loss:.3f}")

    return train(course, start, task.load(part), keep, advance)


def measure(
    pair: ModelPair, windows: Tensor, points: Sequence[StitchPoint], stitches: Mapping[str, Folded], progress: Progress
) -> StitchScores:
    """Score every stitch at every place, and no stitch if the widths are equal."""
    variants: dict[str, Variant] = {name: _as_variant(name, stitch) for name, stitch in stitches.items()}
    weight = stitches[TRAINED].weight
    if weight.shape[0] == weight.shape[1] - 1:
        variants[UNSTITCHED] = lambda hidden, position: hidden
    return score(pair, windows, points, variants, lambda done: progress("measuring", done, len(windows), ""))


def _as_variant(name: str, stitch: Folded) -> Variant:
    return stitch if name != WITHOUT_POSITION else lambda hidden, position: stitch(hidden, 0.0)
