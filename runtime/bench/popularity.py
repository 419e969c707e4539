"""Which model each request is for: an overlay over whatever else the workload says. Pure.

`identical`: all for the first model. `uniform`: each drawn alike. `skewed`: the k-th model in proportion to k^-s
(Zipf), the
first most of all. `distinct`: in turn, so that neighbours never want the same one. (Punica's and S-LoRA's evaluations
use these.)
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Popularity = Literal["identical", "uniform", "skewed", "distinct"]


def shares(kind: Popularity, models: int, zipf: float) -> list[float]:
    """What share of the requests each model gets in the long run; sums to 1."""
    if kind == "identical":
        return [1.0] + [0.0] * (models - 1)
    weights = np.arange(1, models + 1, dtype=np.float64) ** (-zipf if kind == "skewed" else 0.0)
    return [float(share) for share in weights / weights.sum()]


def assign(kind: Popularity, models: int, count: int, zipf: float, rng: np.random.Generator) -> list[int]:
    """Numbers of models, one per request."""
    if kind == "distinct":
        return [number % models for number in range(count)]
    return [int(model) for model in rng.choice(models, size=count, p=shares(kind, models, zipf))]
