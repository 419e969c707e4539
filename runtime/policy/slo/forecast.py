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


class Queued(NamedTuple):
    """The work of waiting requests, summed.

    Fields:
        number: How many they are.
        mean, variance: Of their work in all; its mean in ns, its variance in ns^2.
        squares: Sum of the means of their squared works, in ns^2.
    """

    number: int = 0
    mean: float = 0.0
    variance: float = 0.0
    squares: float = 0.0

    @classmethod
    def work_of(cls, count: int, each: Occupancy) -> Queued:
        """Return the work of so many requests of the same work."""
        return cls(count, count * each.mean, count * each.variance, count * (each.mean**2 + each.variance))

    def plus(self, other: Queued, times: int = 1) -> Queued:
        """Return the sum of this and `times` another one."""
        return Queued(
            self.number + times * other.number,
            self.mean + times * other.mean,
            self.variance + times * other.variance,
            self.squares + times * other.squares,
        )


#: No waiting work.
NOTHING = Queued()


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
    ahead: Queued,
    own: Occupancy,
    places: int,
    error: float = 0.0,
    sigmas: float = _SIGMAS,
) -> Forecast:
    """Return the forecast of a request.

    Args:
        running: The rest of each running request.
        ahead: Work of the waiting requests before it.
        own: Its own work.
        places: Requests that run at a time, at least 1.
        error: Relative standard deviation of the times themselves, which the variances of the work do not hold.
        sigmas: Width of the bounds on either side, in standard deviations (`policy.slo.bounds`).
    """
    mean, variance, count = 0.0, ahead.variance, 0
    for each in running:
        mean, variance, count = mean + each.mean, variance + each.variance, count + 1
    left = mean / count if count else 0.0
    mean += ahead.mean
    places = max(places, 1)
    if count < places and not ahead.number:
        wait = variance = 0.0
    else:
        # When it starts, the other places are still at work: on what is left of a request at a random moment.
        unfinished = (places - 1) * (ahead.squares / (2 * ahead.mean) if ahead.mean > 0 else left)
        wait = max(mean - unfinished, 0.0) / places
    end, variance = wait + own.mean, variance / places**2 + own.variance
    unit = (variance + (error * end) ** 2) ** 0.5
    least, most = max(end - sigmas * unit, 0.0), end + sigmas * unit
    return Forecast(int(wait), int(end), int(variance**0.5), int(unit), int(least), int(most))
