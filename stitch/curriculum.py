"""The schedule of a stitch's training: windows, places and learning rate of each step. Pure; no torch.

It depends on the step and the seed alone, so a resumed training uses the same batches.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from stitch.points import StitchPoint
from surgery.training.schedule import rate_share

#: Share of the steps in which the rate rises.
_WARM_UP = 0.03
#: Final rate, as a share of its peak.
_FLOOR = 0.02


@dataclass(frozen=True, slots=True)
class Lesson:
    """One step: indices of the training windows, and the places to run them through, from shallow to deep."""

    rows: tuple[int, ...]
    points: tuple[StitchPoint, ...]


def unlocked(step: int, steps: int, share: float, count: int) -> int:
    """Return how many of `count` places, counted from the shallowest, are used at a step (BL-09).

    It is one at first, and all after `share` of the steps.
    """
    span = share * steps
    return count if step >= span else min(count, 1 + int(step / span * count))


def lesson(
    step: int, steps: int, share: float, points: Sequence[StitchPoint], places: int, windows: int, batch: int, seed: int
) -> Lesson:
    """Return the windows and places of a step. The place unlocked last always takes part until all are unlocked.

    Args:
        points: The trained places, from shallow to deep.
    """
    chance = random.Random(f"stitch {seed} {step}")  # noqa: S311
    count = unlocked(step, steps, share, len(points))
    rows = tuple(chance.randrange(windows) for _ in range(batch))
    if count == len(points):
        chosen = chance.sample(range(count), min(places, count))
    else:
        chosen = [count - 1, *chance.sample(range(count - 1), min(places, count) - 1)]
    return Lesson(rows, tuple(points[at] for at in sorted(chosen)))


def rate_at(step: int, steps: int, peak: float) -> float:
    """Return the learning rate: a linear rise, then half a cosine."""
    return peak * rate_share(step, steps, _WARM_UP, _FLOOR)
