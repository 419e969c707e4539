"""Backfill: the first waiting sequence never starts later for those that run before it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from runtime.policy.slo.backfill import Holding, reserve

CAPACITY = {"pages": 20, "places": 6}


def start_of(needed: dict[str, int], running: Sequence[Holding]) -> int:
    """Return when the first sequence starts if what runs ends as told, looking at every moment."""
    for now in range(100):
        held = [each for each in running if each.ends > now]
        if all(CAPACITY[name] - sum(each.most[name] for each in held) >= count for name, count in needed.items()):
            return now
    raise AssertionError("it never starts")


def drawn(rng: random.Random, most: int) -> Holding:
    return Holding(rng.randrange(1, 30), {"pages": rng.randrange(1, most), "places": 1})


def test_the_first_one_never_starts_later() -> None:
    rng, passed, waited = random.Random(1), 0, 0
    for _ in range(3000):
        running: list[Holding] = []
        for _ in range(rng.randrange(1, 6)):
            one = drawn(rng, 8)
            if sum(each.most["pages"] for each in running) + one.most["pages"] <= CAPACITY["pages"]:
                running.append(one)
        needed = {"pages": rng.randrange(1, 20), "places": 1}
        alone = start_of(needed, running)
        reserved = reserve(needed, CAPACITY, running)
        if not alone:
            continue
        assert reserved is not None and reserved.start == alone
        beside = list(running)
        for later in (drawn(rng, 12) for _ in range(10)):
            if reserved.admits(later):
                reserved = reserved.beside(later)
                beside.append(later)
                passed += 1
            elif later.ends > alone:
                waited += 1
            held = {name: sum(each.most[name] for each in beside) for name in CAPACITY}
            assert all(held[name] <= CAPACITY[name] for name in CAPACITY)
            assert start_of(needed, beside) == alone
    assert passed > 500 < waited


def test_it_holds_too_where_running_sequences_take_longer_than_was_told() -> None:
    rng = random.Random(2)
    for _ in range(2000):
        told = [drawn(rng, 6) for _ in range(3)]
        needed = {"pages": rng.randrange(6, 20), "places": 1}
        reserved = reserve(needed, CAPACITY, told)
        assert reserved is not None
        real = [Holding(each.ends + rng.randrange(0, 20), each.most) for each in told]
        beside = list(real)
        for later in (drawn(rng, 12) for _ in range(10)):
            if reserved.admits(later):
                reserved = reserved.beside(later)
                beside.append(Holding(rng.randrange(1, later.ends + 1), later.most))
        without = start_of(needed, real)
        if without >= reserved.start:
            assert start_of(needed, beside) == without


def test_what_never_fits_is_promised_nothing() -> None:
    assert reserve({"pages": 21, "places": 1}, CAPACITY, [Holding(5, {"pages": 3, "places": 1})]) is None
    assert reserve({"pages": 1, "places": 1}, CAPACITY, []) is None
