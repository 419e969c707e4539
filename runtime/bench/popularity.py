"""Choose a model for each request, independently of the rest of the workload. Pure.

- `identical`: the first model for all.
- `uniform`: all models with equal probability.
- `skewed`: the k-th model with probability proportional to k^-s (Zipf).
- `distinct`: all models in turn, so that consecutive requests never have the same one.

Punica's and S-LoRA's evaluations use these.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Popularity = Literal["identical", "uniform", "skewed", "distinct"]


def shares(kind: Popularity, models: int, zipf: float) -> list[float]:
    """Return each model's expected share of the requests; the shares sum to 1."""
    if kind == "identical":
        return [1.0] + [0.0] * (models - 1)
    weights = np.arange(1, models + 1, dtype=np.float64) ** (-zipf if kind == "skewed" else 0.0)
    return [float(share) for share in weights / weights.sum()]


def assign(kind: Popularity, models: int, count: int, zipf: float, rng: np.random.Generator) -> list[int]:
    """Return a model's index for each request."""
    if kind == "distinct":
        return [number % models for number in range(count)]
    return [int(model) for model in rng.choice(models, size=count, p=shares(kind, models, zipf))]
