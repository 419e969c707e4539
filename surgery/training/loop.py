"""What trainings share that can be stopped: the loop over their steps, and the moments of their optimizer as tensors to
be saved.

Knows nothing of what is trained.
"""

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
    """One training and the step it is at."""

    step: int

    def advance_(self) -> bool:
        """One step. False when its loss or gradient is not finite; what `state` gives then is the last good one."""

    def state(self) -> Saved:
        """All that going on takes."""


def run_(
    training: Training, steps: int, keep: Callable[[Saved], None], advance: Callable[[], None] | None = None
) -> bool:
    """Go on to the last step. False when a step could not be made.

    Args:
        keep: called with the state every half minute, on Ctrl-C, and at the end, good or bad: always between two steps.
        advance: called after each step.

    Raises:
        KeyboardInterrupt: after the step that it came in; the state was kept.
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
    """What AdamW remembers of named weights: `<moment>.<name>`. None of a weight that was never moved."""
    kept = {name: optimizer.state.get(weight, {}) for name, weight in weights.items()}
    return {f"{moment}.{name}": of[moment] for name, of in kept.items() for moment in _MOMENTS if moment in of}


def remember_(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor], saved: Saved) -> None:
    """Give AdamW back what `moments` took, at the step of the saved state."""
    for name, weight in weights.items():
        found = {
            moment: saved.tensors[f"{moment}.{name}"] for moment in _MOMENTS if f"{moment}.{name}" in saved.tensors
        }
        if found:
            on_device = {moment: value.to(weight.device, copy=True) for moment, value in found.items()}
            optimizer.state[weight] = {"step": torch.tensor(float(saved.step)), **on_device}
