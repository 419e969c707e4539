"""Paths for long sequences: if any path holds the sequence, one is found."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

from runtime.policy.routing.paths import choose_roomy


def held(path: Sequence[str], pages: Sequence[int], capacity: Mapping[str, int]) -> int:
    """Return the page groups that one sequence can have along a path."""
    taken: Counter[str] = Counter()
    for device, more in zip(path, pages, strict=True):
        taken[device] += more
    return min((capacity[device] // more for device, more in taken.items() if more), default=1 << 30)


def test_a_block_that_is_on_one_device_only_finds_its_room_there() -> None:
    """First fit fills the last block's only device with two other blocks, and holds two thirds of the best."""
    capacity = {"x": 160, "y": 160}
    path = choose_roomy([("y", "x"), ("y", "x"), ("x",), ("y",)], [1, 1, 1, 1], capacity, 64)
    assert path is not None and held(path, [1, 1, 1, 1], capacity) == 80


def test_what_first_fit_finds_stays_as_it_is() -> None:
    capacity = {"x": 160, "y": 160}
    assert choose_roomy([("y", "x"), ("y", "x"), ("x", "y")], [1, 1, 1], capacity, 64) == ("y", "y", "x")


def test_at_random_as_long_a_sequence_is_held_as_on_the_best_of_all_paths() -> None:
    rng = random.Random(1)
    for _ in range(600):
        devices = [f"d{at}" for at in range(rng.randrange(1, 5))]
        capacity = {name: rng.randrange(20, 200) for name in devices}
        candidates = [rng.sample(devices, rng.randrange(1, len(devices) + 1)) for _ in range(rng.randrange(1, 7))]
        pages, groups = [rng.choice((0, 1, 1, 2, 3)) for _ in candidates], rng.randrange(1, 70)
        found = choose_roomy(candidates, pages, capacity, groups)
        assert found is not None and all(name in some for name, some in zip(found, candidates, strict=True))
        best = max(held(path, pages, capacity) for path in product(*candidates))
        assert min(held(found, pages, capacity), groups) == min(best, groups)


def test_a_search_that_comes_to_nothing_ends() -> None:
    """Forty-one blocks of two layers on forty devices, each with room for one block: one device too few."""
    names = [f"d{at}" for at in range(40)]
    capacity = dict.fromkeys(names, 30)
    found = choose_roomy([names] * 41, [2] * 41, capacity, 10)
    assert found is not None and len(found) == 41
    assert choose_roomy([names, ()], [1, 1], capacity, 10) is None
