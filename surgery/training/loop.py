"""Common parts of resumable trainings: the loop over the steps, and saving and restoring the optimizer's moments."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from surgery.training.checkpoint import Saved
from surgery.training.interrupt import deferred

_SAVE_SECONDS = 30.0
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Training(Protocol):
    """One training and its current step."""

    step: int

    def advance_(self) -> bool:
        """Run one step. Returns False if its loss or gradient is not finite; `state` then returns the last good one."""

    def state(self) -> Saved:
        """Return everything needed to resume."""


def run_(
    training: Training, steps: int, keep: Callable[[Saved], None], advance: Callable[[], None] | None = None
) -> bool:
    """Run to the last step. Returns False if a step failed.

    Args:
        keep: Called with the state every half minute, on Ctrl-C, and at the end, successful or not: always between two
            steps.
        advance: Called after each step.

    Raises:
        KeyboardInterrupt: After the step during which it came; the state was saved.
    """
    due = time.monotonic() + _SAVE_SECONDS
    good = True
    with deferred() as interrupt:
        while good and training.step < steps and not interrupt.asked:
            good = training.advance_()
            if good and advance is not None:
                advance()
            if time.monotonic() > due:
                keep(training.state())
                due = time.monotonic() + _SAVE_SECONDS
        keep(training.state())
    if interrupt.asked:
        raise KeyboardInterrupt
    return good


def moments(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return AdamW's moments of named weights as `<moment>.<name>`; none for a weight that was never updated."""
    kept = {name: optimizer.state.get(weight, {}) for name, weight in weights.items()}
    return {f"{moment}.{name}": of[moment] for name, of in kept.items() for moment in _MOMENTS if moment in of}


def remember_(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor], saved: Saved) -> None:
    """Restore the moments that `moments` returned into AdamW, at the step of the saved state."""
    for name, weight in weights.items():
        found = {
            moment: saved.tensors[f"{moment}.{name}"] for moment in _MOMENTS if f"{moment}.{name}" in saved.tensors
        }
        if found:
            on_device = {moment: value.to(weight.device, copy=True) for moment, value in found.items()}
            optimizer.state[weight] = {"step": torch.tensor(float(saved.step)), **on_device}
