"""Bounds of 95 % cover 93 to 97 % of the ends in a queue without other errors; those of other requests do not."""

from __future__ import annotations

import heapq
import random

from runtime.policy.slo.forecast import Forecast, Occupancy, Queued, forecast

PLACES = 4
#: Mean and standard deviation of the work of a request, in ns.
MEAN, SIGMA = 1_000_000.0, 250_000.0


def _told_and_took(draw: random.Random) -> tuple[Forecast, float]:
    """Return the forecast of a request behind a random number of waiting ones, and when it ended."""
    waiting, kind = draw.randint(40, 400), Occupancy(MEAN, SIGMA**2)
    works = [max(draw.gauss(MEAN, SIGMA), 1.0) for _ in range(waiting + 1)]
    free = [0.0] * PLACES
    for work in works:
        end = heapq.heappop(free) + work
        heapq.heappush(free, end)
    return forecast((), Queued.work_of(waiting, kind), kind, PLACES), end


def test_bounds_cover_their_share_and_shuffled_ones_do_not() -> None:
    draw = random.Random(5)
    told, took = zip(*(_told_and_took(draw) for _ in range(3000)), strict=True)
    other = list(told)
    draw.shuffle(other)
    right, shuffled = (
        sum(each.least <= end <= each.most for each, end in zip(some, took, strict=True)) / len(took)
        for some in (told, other)
    )
    assert 0.93 <= right <= 0.97
    assert shuffled < 0.5
