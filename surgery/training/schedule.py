"""The learning rate schedule of a training. Pure; no torch."""

from __future__ import annotations

import math


def rate_share(step: int, steps: int, warm_up: float, floor: float) -> float:
    """Return the share of the peak rate at a step, in (0, 1].

    It rises linearly over `warm_up` of the steps, then falls along half a cosine to `floor`.
    """
    warm = max(1, round(warm_up * steps))
    if step < warm:
        return (step + 1) / warm
    cosine = (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))) / 2
    return floor + (1 - floor) * cosine
