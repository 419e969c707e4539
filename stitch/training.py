"""Train a stitch (BL-09), from shallow places to deep ones, with B's own distribution as the teacher.

Both models are frozen. Each step runs a few windows through A once, up to the deepest of its places, and through B once
for its distribution; then the stitch and the rest of B for each place. AdamW without decay in float32, clipped
gradients; devices and mixed precision are accelerate's.

A step depends on its number and the seed alone, so on the same machine a resumed training gives the same bits.
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

#: Called with (steps done, smoothed loss).
Advance = Callable[[int, float], None]
Keep = Callable[[Saved], None]

#: Weight of earlier steps in the smoothed loss.
_SMOOTH = 0.95


@dataclass(frozen=True)
class StitchCourse:
    """The inputs of a training.

    Fields:
        windows: int64 [n, length].
        points: The trained places.
    """

    pair: ModelPair
    windows: Tensor
    points: tuple[StitchPoint, ...]
    settings: StitchSettings
    with_position: bool = True


def train(
    course: StitchCourse, start: Folded, saved: Saved | None, keep: Keep, advance: Advance | None = None
) -> Folded:
    """Train from a start, or resume from a saved state.

    Args:
        keep: Called with the state periodically, on Ctrl-C, and before a failure is raised.

    Raises:
        TrainingFailed: The loss or its gradient is not finite; the state before that step was saved.
        KeyboardInterrupt: After the step during which it came; the state was saved.
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
    """One training and its current step."""

    def __init__(self, course: StitchCourse, start: Folded) -> None:
        from accelerate import Accelerator

        settings, device = course.settings, course.pair.b.device
        self._course = course
        self._objective = Objective(settings.kl, settings.cosine, settings.labels)
        # The caller has placed the models on their devices.
        self._accelerator = Accelerator(mixed_precision=settings.precision, device_placement=False)
        ruler = Ruler.from_positions([point.position for point in course.points])
        self.learner = Learner(start, ruler, course.with_position).to(device)
        self._weights = [weight for weight in self.learner.parameters() if weight.requires_grad]
        self._adam = torch.optim.AdamW(self._weights, lr=settings.rate, betas=(0.9, 0.99), weight_decay=0.0)
        self._stitch, self._optimizer = self._accelerator.prepare(self.learner, self._adam)
        self.step = 0
        self.shown = math.nan

    def advance_(self) -> bool:
        """Run one step. Returns False, with nothing changed, if the loss or its gradient is not finite."""
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
        """Accumulate the gradients of a lesson's mean loss and return that loss."""
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
        """Accumulate the gradients of the loss at one place divided by `share`, and return that loss."""
        head = self._course.pair.b.head
        stitched = self._stitch(hidden, point.position)
        ended = self._course.pair.tail(stitched, ids, point.b_layer).flatten(0, 1)
        vocabulary = head(ended[:1].detach()).shape[-1]
        following = F.pad(ids[:, 1:], (0, 1), value=-1).flatten()
        value, gradient = self._objective.gradient(head, vocabulary, ended, wanted.flatten(0, 1), following)
        # The head's backward pass is done already, in chunks; this product continues from its gradient.
        loss = (ended.float() * gradient).sum()
        if entry is not None:
            entry = entry.float()
            apart = (stitched.float() - entry).square().mean() / entry.square().mean()
            loss = loss + self._course.settings.state * apart
            value += self._course.settings.state * float(apart.detach())
        self._accelerator.backward(loss / share)
        return value / share

    def state(self) -> Saved:
        """Return everything needed to resume."""
        named = dict(self.learner.named_parameters())
        tensors = {**named, **moments(self._adam, named)}
        return Saved(self.step, tensors, {"shown": None if math.isnan(self.shown) else self.shown})

    @torch.no_grad()
    def resume_(self, saved: Saved) -> None:
        """Load a state. Raises KeyError, RuntimeError for one of another training."""
        named = dict(self.learner.named_parameters())
        for name, weight in named.items():
            weight.copy_(saved.tensors[name])
        remember_(self._adam, named, saved)
        self.step = saved.step
        shown = saved.facts.get("shown")
        self.shown = math.nan if shown is None else float(shown)
