"""Training a stitch (BL-09): from shallow places to deep ones, everything else frozen, B's own distribution as the
teacher.

Each step runs a few windows through A once, as far as the deepest of its places, and through B once for its
distribution; then the stitch and the rest of B for each place. AdamW without decay in float32, clipped gradients;
devices and mixed precision are accelerate's. What a step does depends on its number and the seed alone, so a training
that goes on from a saved state ends, on the same machine, in the same bits. Knows nothing of stores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stitch.block import Folded, Learner, Ruler
from stitch.curriculum import Lesson, lesson, rate_at
from stitch.objective import Objective
from stitch.pair import ModelPair
from stitch.points import StitchPoint
from stitch.settings import StitchSettings
from surgery.training.checkpoint import Saved
from surgery.training.loop import moments, remember_, run_
from zoo.errors import TrainingFailed

#: Called with (steps done, the loss of late).
Advance = Callable[[int, float], None]
Keep = Callable[[Saved], None]

#: How much of the shown loss is of the steps before.
_SMOOTH = 0.95


@dataclass(frozen=True)
class StitchCourse:
    """What a training is made of. `points`: those that are trained on; `windows`: int64 [n, length]."""

    pair: ModelPair
    windows: Tensor
    points: tuple[StitchPoint, ...]
    settings: StitchSettings
    with_position: bool = True


def train(
    course: StitchCourse, start: Folded, saved: Saved | None, keep: Keep, advance: Advance | None = None
) -> Folded:
    """Train from a start, or go on from a saved state.

    Args:
        keep: called with the state now and then, on Ctrl-C, and before a failure is raised.

    Raises:
        TrainingFailed: the loss or its gradient is not finite; the state before that step was kept.
        KeyboardInterrupt: after the step that it came in; the state was kept.
    """
    trainer = Trainer(course, start)
    if saved is not None:
        trainer.resume_(saved)
    shown = None if advance is None else lambda: advance(trainer.step, trainer.shown)
    if not run_(trainer, course.settings.steps, keep, shown):
        raise TrainingFailed(
            f"the stitch's loss was not finite at step {trainer.step + 1}; the state of step {trainer.step} was kept: "
            "try a lower rate"
        )
    return trainer.learner.folded()


class Trainer:
    """One training and the step it is at."""

    def __init__(self, course: StitchCourse, start: Folded) -> None:
        from accelerate import Accelerator

        settings, device = course.settings, course.pair.b.device
        self._course = course
        self._objective = Objective(settings.kl, settings.cosine, settings.labels)
        # Where the models lie is their caller's choice.
        self._accelerator = Accelerator(mixed_precision=settings.precision, device_placement=False)
        ruler = Ruler.from_positions([point.position for point in course.points])
        self.learner = Learner(start, ruler, course.with_position).to(device)
        self._weights = [weight for weight in self.learner.parameters() if weight.requires_grad]
        self._adam = torch.optim.AdamW(self._weights, lr=settings.rate, betas=(0.9, 0.99), weight_decay=0.0)
        self._stitch, self._optimizer = self._accelerator.prepare(self.learner, self._adam)
        self.step = 0
        self.shown = math.nan

    def advance_(self) -> bool:
        """One step. False, with everything as it was, when the loss or its gradient is not finite."""
        settings = self._course.settings
        task = lesson(
            self.step, settings.steps, settings.curriculum, self._course.points, settings.places,
            len(self._course.windows), settings.batch, settings.seed,
        )  # fmt: skip
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._learn(task)
        norm = float(self._accelerator.clip_grad_norm_(self._weights, settings.clip))
        if not math.isfinite(loss + norm):
            return False
        for group in self._adam.param_groups:
            group["lr"] = rate_at(self.step, settings.steps, settings.rate)
        self._optimizer.step()
        self.step += 1
        self.shown = loss if math.isnan(self.shown) else _SMOOTH * self.shown + (1 - _SMOOTH) * loss
        return True

    def _learn(self, task: Lesson) -> float:
        """Gradients of a lesson's mean loss; that loss."""
        pair, settings = self._course.pair, self._course.settings
        ids = self._course.windows[list(task.rows)].to(pair.b.device)
        wanted_layers = {point.b_layer for point in task.points} if settings.state else set()
        with self._accelerator.autocast():
            entries, final = pair.passes(ids, wanted_layers)
            total = 0.0
            for layer, hidden in pair.heads(ids, {point.a_layer for point in task.points}):
                for point in (point for point in task.points if point.a_layer == layer):
                    total += self._place(point, hidden, ids, final, entries.get(point.b_layer), len(task.points))
        return total

    def _place(
        self, point: StitchPoint, hidden: Tensor, ids: Tensor, wanted: Tensor, entry: Tensor | None, share: int
    ) -> float:
        """Gradients of the loss at one place over `share`; that loss."""
        head = self._course.pair.b.head
        stitched = self._stitch(hidden, point.position)
        ended = self._course.pair.tail(stitched, ids, point.b_layer).flatten(0, 1)
        vocabulary = head(ended[:1].detach()).shape[-1]
        following = F.pad(ids[:, 1:], (0, 1), value=-1).flatten()
        value, gradient = self._objective.gradient(head, vocabulary, ended, wanted.flatten(0, 1), following)
        # The head's part of the backward pass is done, in pieces; a product with its gradient carries on from there.
        loss = (ended.float() * gradient).sum()
        if entry is not None:
            entry = entry.float()
            apart = (stitched.float() - entry).square().mean() / entry.square().mean()
            loss = loss + self._course.settings.state * apart
            value += self._course.settings.state * float(apart.detach())
        self._accelerator.backward(loss / share)
        return value / share

    def state(self) -> Saved:
        """All that going on takes."""
        named = dict(self.learner.named_parameters())
        tensors = {**named, **moments(self._adam, named)}
        return Saved(self.step, tensors, {"shown": None if math.isnan(self.shown) else self.shown})

    @torch.no_grad()
    def resume_(self, saved: Saved) -> None:
        """Take up a state. Raises KeyError, RuntimeError for one of another training."""
        named = dict(self.learner.named_parameters())
        for name, weight in named.items():
            weight.copy_(saved.tensors[name])
        remember_(self._adam, named, saved)
        self.step = saved.step
        shown = saved.facts.get("shown")
        self.shown = math.nan if shown is None else float(shown)
