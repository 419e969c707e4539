"""Draw the arrival times of requests: seconds from the start of a run, never decreasing.

In an open loop the gaps between requests are drawn independently of the server. A closed loop needs no times: a client
sends its next request when the last one was answered.

A Gamma process with coefficient of variation `cv` has gaps of shape 1/cv² and mean 1/rate. With cv 1 it is Poisson;
above 1 requests come in bursts (as in vLLM's and AlpaServe's benchmarks). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

ArrivalKind = Literal["poisson", "gamma", "fixed"]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The arrival process of a workload.

    Fields:
        rate: Requests per second; None for all at once.
        cv: Coefficient of variation of the gaps, used by `gamma` only.
    """

    rate: float | None = None
    kind: ArrivalKind = "poisson"
    cv: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(ArrivalKind):
            raise ValueError(f"arrivals must be one of {', '.join(get_args(ArrivalKind))}")
        if self.rate is not None and not 0.0 < self.rate < 1e9:
            raise ValueError("the rate of arrivals must be positive")
        if not 0.0 < self.cv < 1e3:
            raise ValueError("the coefficient of variation must be positive")


def times(arrivals: Arrivals, count: int, rng: np.random.Generator) -> list[float]:
    """Return `count` arrival times. The first request also comes after a gap, so that the mean rate is `rate`."""
    if arrivals.rate is None:
        return [0.0] * count
    if arrivals.kind == "fixed":
        return [(number + 1) / arrivals.rate for number in range(count)]
    shape = 1.0 if arrivals.kind == "poisson" else arrivals.cv**-2
    gaps = rng.gamma(shape, 1.0 / (arrivals.rate * shape), size=count)
    return [float(time) for time in np.cumsum(gaps)]
