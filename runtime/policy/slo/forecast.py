"""Forecast when a request ends that waits behind running and waiting ones (QL-14, QL-15).

What runs and what waits is served by a number of places at a time. So a request starts after all work ahead of it, less
what is unfinished then, divided by the places: the paper's waiting time, with work measured in time instead of tokens,
since models and prompts differ. The sum of many requests' work is nearly normal, which gives the bounds. Pure; times in
ns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

#: Standard deviations of a normal distribution within which 95 % lie.
_SIGMAS = 1.96


class Occupancy(NamedTuple):
    """The time that a request occupies a place: mean, and variance in ns^2."""

    mean: float
    variance: float = 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """When a request is served, from now.

    Fields:
        wait: Expected time to its start.
        end: Expected time to its end.
        sigma: Standard deviation of the time to its end by the variances of the work alone.
        unit: The same with the error of the times themselves.
        least, most: Bounds of the time to its end that hold for 95 %.
    """

    wait: int
    end: int
    sigma: int
    unit: int
    least: int
    most: int


def forecast(
    running: Iterable[Occupancy],
    ahead: Iterable[tuple[int, Occupancy]],
    own: Occupancy,
    places: int,
    error: float = 0.0,
    sigmas: float = _SIGMAS,
) -> Forecast:
    """Return the forecast of a request.

    Args:
        running: The rest of each running request.
        ahead: Number and work of the waiting requests before it, by group.
        own: Its own work.
        places: Requests that run at a time, at least 1.
        error: Relative standard deviation of the times themselves, which the variances of the work do not hold.
        sigmas: Width of the bounds on either side, in standard deviations (`policy.slo.bounds`).
    """
    mean = variance = 0.0
    count = queued = 0
    for each in running:
        mean, variance, count = mean + each.mean, variance + each.variance, count + 1
    left, first, second = mean / count if count else 0.0, 0.0, 0.0
    for number, each in ahead:
        mean, variance, queued = mean + number * each.mean, variance + number * each.variance, queued + number
        first, second = first + number * each.mean, second + number * (each.mean**2 + each.variance)
    places = max(places, 1)
    if count < places and not queued:
        wait = variance = 0.0
    else:
        # When it starts, the other places are still at work: on what is left of a request at a random moment.
        unfinished = (places - 1) * (second / (2 * first) if first else left)
        wait = max(mean - unfinished, 0.0) / places
    end, variance = wait + own.mean, variance / places**2 + own.variance
    unit = (variance + (error * end) ** 2) ** 0.5
    least, most = max(end - sigmas * unit, 0.0), end + sigmas * unit
    return Forecast(int(wait), int(end), int(variance**0.5), int(unit), int(least), int(most))
