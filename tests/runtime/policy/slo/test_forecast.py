"""Forecasts beside queues that are played through: means without bias, and bounds that hold as often as they say."""

from __future__ import annotations

import heapq
import random
from statistics import mean

import pytest

from runtime.policy.slo.forecast import NOTHING, Occupancy, Queued, forecast


def played(rng: random.Random, places: int, waiting: int, draw) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """Return wait and end of a request behind `waiting` ones, with all places busy for a while already."""
    free = [rng.random() * draw() for _ in range(places)]
    heapq.heapify(free)
    for _ in range(waiting):
        heapq.heappush(free, heapq.heappop(free) + draw())
    start = heapq.heappop(free)
    return start, start + draw()


@pytest.mark.parametrize("places", [1, 4, 16])
@pytest.mark.parametrize("waiting", [5, 50, 300])
@pytest.mark.parametrize("kind", ["equal", "uniform", "skewed"])
def test_forecasts_meet_what_happens(places: int, waiting: int, kind: str) -> None:
    rng = random.Random(f"{places} {waiting} {kind}")
    draws = {
        "equal": (lambda: 100.0, Occupancy(100.0)),
        "uniform": (lambda: rng.uniform(50, 150), Occupancy(100.0, 100.0**2 / 12)),
        "skewed": (lambda: rng.expovariate(1 / 100), Occupancy(100.0, 100.0**2)),
    }
    draw, one = draws[kind]
    half = Occupancy(one.mean / 2, one.mean**2 / 12 + one.variance / 3)  # of a running one, at a random moment
    found = [played(rng, places, waiting, draw) for _ in range(400)]
    told = forecast([half] * places, Queued.work_of(waiting, one), one, places)
    assert told.wait == pytest.approx(mean(start for start, _ in found), rel=0.1, abs=30)
    assert told.end == pytest.approx(mean(end for _, end in found), rel=0.1, abs=30)
    within = sum(told.least <= end <= told.most for _, end in found) / len(found)
    if waiting >= 50 and kind != "equal":
        assert 0.88 <= within <= 1.0


def test_a_request_starts_at_once_where_there_is_a_place() -> None:
    told = forecast([Occupancy(500.0)] * 3, NOTHING, Occupancy(100.0), 4)
    assert (told.wait, told.end) == (0, 100)


def test_with_all_places_busy_it_waits_for_the_next_end() -> None:
    assert forecast([Occupancy(500.0)], NOTHING, Occupancy(100.0), 1).wait == 500
    assert 0 < forecast([Occupancy(500.0)] * 4, NOTHING, Occupancy(100.0), 4).wait < 500


def test_what_waits_ahead_counts_by_its_number() -> None:
    own = Occupancy(100.0)
    assert forecast([], Queued.work_of(3, own).plus(Queued.work_of(2, Occupancy(10.0))), own, 1).wait == 320
