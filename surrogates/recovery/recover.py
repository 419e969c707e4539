"""Recovery after pruning (BL-10): train the block to give the exact block's outputs from the exact block's inputs.

The loss is the squared distance to the exact outputs relative to what the block adds to its inputs, per window (1: no
better than leaving the block out). With `head_weight`, the divergence of the next-token distributions after the frozen
rest of the model is added. AdamW in float32, cosine schedule with a short warm-up, clipped gradients.

Batches depend on the seed and the step alone, so a resumed training is the same as an uninterrupted one. The result is
the better of before and after, on separate windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.training.checkpoint import Saved
from surgery.training.loop import moments, remember_, run_
from surgery.training.schedule import rate_share
from surrogates.block import ParentBlock, States, Subject
from surrogates.recovery.lora import Learners, attach_
from surrogates.recovery.saved import RecoveryTask
from zoo.errors import InputError

Recover = Literal["lora", "full", "none"]
#: Called with (name of the part, steps done, steps in all).
Progress = Callable[[str, int, int], None]

_WARM_UP = 0.05
_FLOOR = 0.1
_CLIP = 1.0
_CHECK_BATCH = 16


@dataclass(frozen=True, slots=True)
class RecoverySettings:
    """How to recover.

    Fields:
        how: Train low-rank adapters ("lora"), or the pruned matrices themselves ("full").
        rate: Peak learning rate.
        batch: Windows per step.
        head_weight: Weight of the divergence of the next-token distributions.
    """

    how: Recover = "lora"
    steps: int = 200
    rank: int = 16
    rate: float = 4e-3
    batch: int = 8
    head_weight: float = 0.0
    seed: int = 0

    def check(self) -> None:
        """Raise InputError for impossible settings."""
        if self.steps < 1 or self.rank < 1 or self.batch < 1 or not 0 < self.rate < 1 or self.head_weight < 0:
            raise InputError(
                "recovery needs at least one step, a rank and a batch of at least 1, and a rate between 0 and 1"
            )


@dataclass(frozen=True, slots=True)
class Recovery:
    """Result of a recovery.

    Fields:
        loss_first: Relative distance before, on windows kept apart.
        loss_last: Relative distance after, on windows kept apart.
        kept: The trained weights were kept.
        stopped: Why it ended early; None if it did not.
    """

    steps: int
    loss_first: float
    loss_last: float
    kept: bool
    stopped: str | None


def recover_(
    subject: Subject,
    block: ParentBlock,
    states: States,
    checks: States,
    settings: RecoverySettings,
    task: RecoveryTask,
    progress: Progress | None = None,
) -> Recovery:
    """Train a pruned block in place. Ctrl-C saves the state and is raised again.

    Args:
        checks: Windows that are not trained on.

    Raises:
        InputError: The pruned block gives values that are not finite.
    """
    settings.check()
    before = distance_on(block, checks)
    if not math.isfinite(before):
        raise InputError("the pruned block gives values that are not finite: nothing can be recovered from it")
    start = {name: weight.clone() for name, weight in _matrices(block).items()}
    trainer = _Trainer(subject, block, states, settings)
    stopped = _run(trainer, task, progress)
    trainer.finish()
    after = distance_on(block, checks)
    kept = math.isfinite(after) and after < before
    if not kept:
        _restore_(block, start)
    task.remove_file()
    return Recovery(trainer.step, before, after if kept else before, kept, stopped)


def _run(trainer: _Trainer, task: RecoveryTask, progress: Progress | None) -> str | None:
    """Run all steps. Returns why it ended early, or None."""
    saved = task.load()
    if saved is not None:
        trainer.resume_(saved)
    steps = trainer.settings.steps
    shown = None if progress is None else lambda: progress("recovering", trainer.step, steps)
    if not run_(trainer, steps, task.save, shown):
        return f"the loss was not finite at step {trainer.step + 1}; the state before it was kept"
    return None


@dataclass
class _Trainer:
    """One training: its optimizer, and its current step."""

    subject: Subject
    block: ParentBlock
    states: States
    settings: RecoverySettings
    step: int = 0
    learners: Learners | None = None
    weights: list[Tensor] = field(default_factory=list)
    _good: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        from accelerate import Accelerator

        self.block.requires_grad_(False)
        if self.settings.how == "lora":
            self.learners = attach_(self.block, self.settings.rank, torch.Generator().manual_seed(self.settings.seed))
            self.weights = self.learners.parameters
        else:
            self.weights = list(_matrices(self.block).values())
            for weight in self.weights:
                weight.requires_grad_(True)
        self._good = [weight.detach().clone() for weight in self.weights]
        self.accelerator = Accelerator(device_placement=False)
        self.optimizer = self.accelerator.prepare_optimizer(
            torch.optim.AdamW(self.weights, lr=self.settings.rate, weight_decay=0.0)
        )

    def advance_(self) -> bool:
        """Run one step.

        Returns False if the loss or its gradient is not finite, and restores the last weights with a finite loss.
        """
        batch = self.states.select_windows(self._rows(), self.subject.device)
        loss = self._loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.weights, _CLIP)
        if not bool(torch.isfinite(loss.detach() + norm)):
            _copy_(self.weights, self._good)
            return False
        _copy_(self._good, self.weights)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate * schedule(self.step, self.settings.steps)
        self.optimizer.step()
        self.step += 1
        return True

    def _loss(self, batch: States) -> Tensor:
        out = self.block(batch.inputs, self.block.course(batch.ids))
        loss = distance(out, batch)
        if self.settings.head_weight:
            with torch.no_grad():
                wanted = self.subject.tail(batch.outputs, batch.ids).log_softmax(-1)
            given = self.subject.tail(out, batch.ids).log_softmax(-1)
            loss = (
                loss
                + self.settings.head_weight * F.kl_div(given, wanted, reduction="none", log_target=True).sum(-1).mean()
            )
        return loss

    def _rows(self) -> Tensor:
        """Return the windows of this step: shuffled each epoch, by the seed."""
        count = len(self.states)
        size = min(self.settings.batch, count)
        epoch, at = divmod(self.step, max(1, count // size))
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch))
        return order[at * size : (at + 1) * size]

    def finish(self) -> None:
        """Merge the learners, if any, and freeze the block."""
        if self.learners is not None:
            self.learners.merge_()
        self.block.requires_grad_(False)

    def state(self) -> Saved:
        return Saved(self.step, {**self._named(), **moments(self._optimizer, self._named())})

    def _named(self) -> dict[str, Tensor]:
        return {f"weight.{at}": weight for at, weight in enumerate(self.weights)}

    @torch.no_grad()
    def resume_(self, saved: Saved) -> None:
        """Load a saved state; one that does not fit is ignored."""
        named = self._named()
        if any(
            name not in saved.tensors or saved.tensors[name].shape != weight.shape for name, weight in named.items()
        ):
            return
        for name, weight in named.items():
            weight.copy_(saved.tensors[name])
        remember_(self._optimizer, named, saved)
        self.step = saved.step

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer.optimizer  # type: ignore[no-any-return]


@torch.no_grad()
def _copy_(into: list[Tensor], given: list[Tensor]) -> None:
    for to, value in zip(into, given, strict=True):
        to.copy_(value)


def schedule(step: int, steps: int) -> float:
    """Return the share of the full rate at a step: a linear rise, then half a cosine down to a tenth."""
    return rate_share(step, steps, _WARM_UP, _FLOOR)


def distance(out: Tensor, batch: States) -> Tensor:
    """Return the squared distance to the exact outputs over the squared size of what the exact block adds.

    It is computed per window and averaged.
    """
    missed = (out - batch.outputs).square().sum((1, 2))
    added = (batch.outputs - batch.inputs).square().sum((1, 2)).clamp_min(1e-12)
    return (missed / added).mean()


@torch.no_grad()
def distance_on(block: ParentBlock, states: States) -> float:
    """Return `distance` over all windows."""
    device = next(block.parameters()).device
    total = 0.0
    for batch in states.batches(_CHECK_BATCH, device):
        total += float(distance(block(batch.inputs, block.course(batch.ids)), batch)) * len(batch)
    return total / len(states)


def _matrices(block: ParentBlock) -> dict[str, Tensor]:
    """Return all weights of a block's changed components, norms included, by component and name."""
    return {
        f"{at}.{name}": weight
        for at in block.changed
        for name, weight in block.names[at].items()
        if weight.is_floating_point()
    }


@torch.no_grad()
def _restore_(block: ParentBlock, start: dict[str, Tensor]) -> None:
    for name, weight in _matrices(block).items():
        weight.copy_(start[name])
