"""What each step of a training does: which windows, at which places, how fast. A function of the step and the seed
alone, so that an interrupted training goes on with the very batches it would have had. Pure; no torch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from stitch.points import StitchPoint
from surgery.training.schedule import rate_share

#: The share of the steps in which the rate rises.
_WARM_UP = 0.03
#: Where the rate ends, as a share of its peak.
_FLOOR = 0.02


@dataclass(frozen=True, slots=True)
class Lesson:
    """One step: rows of the training windows, and the places they are run through, from shallow to deep."""

    rows: tuple[int, ...]
    points: tuple[StitchPoint, ...]


def unlocked(step: int, steps: int, share: float, count: int) -> int:
    """How many of `count` places, counted from the shallowest, are open at a step (BL-09): one at first, all after
    `share` of the steps.
    """
    span = share * steps
    return count if step >= span else min(count, 1 + int(step / span * count))


def lesson(
    step: int, steps: int, share: float, points: Sequence[StitchPoint], places: int, windows: int, batch: int, seed: int
) -> Lesson:
    """What a step learns. `points`: those that are trained on, from shallow to deep; the one unlocked last takes part
    while it is new.
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
    """The learning rate: a linear rise, then half a cosine."""
    return peak * rate_share(step, steps, _WARM_UP, _FLOOR)
