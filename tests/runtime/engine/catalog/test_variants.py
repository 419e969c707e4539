"""Which composed models are variants of another one by swapping scored runs, tested on digests alone.

Tests with a store are in tests/runtime/scheduler.
"""

from __future__ import annotations

from runtime.engine.catalog.variants import Swap, compared, replaced, swaps_of
from zoo.records import Equivalence, ScoredRun

DIGESTS = {"a": ["e", "a1", "a2", "a3", "h"], "b": ["e", "b1", "b2", "b3", "h"], "c": ["e", "c1", "c2", "h"]}


def like(a: ScoredRun, b: ScoredRun, similarity: float, probe: str = "p") -> Equivalence:
    return Equivalence("equivalent", a, b, probe, similarity)


def test_swaps_are_read_from_either_side_and_the_least_score_of_a_pair_counts() -> None:
    pairs = [
        like(ScoredRun("b", 1, 2), ScoredRun("a", 1, 2), 0.99),
        like(ScoredRun("b", 1, 2), ScoredRun("a", 1, 2), 0.985, "q"),
        like(ScoredRun("a", 2, 3), ScoredRun("b", 2, 3), 0.9),
    ]
    assert swaps_of("a", pairs, DIGESTS, 0.98) == [Swap(1, 2, ("b1",), 0.985)]


def test_a_chain_comes_out_of_another_by_swaps_or_not() -> None:
    swaps = [Swap(1, 2, ("b1",), 0.99), Swap(2, 3, ("b2",), 0.98), Swap(1, 3, ("c1", "c2", "c3"), 0.97)]
    own = DIGESTS["a"]
    assert replaced(own, own, swaps) == (1.0, 0)
    assert replaced(own, ["e", "b1", "a2", "a3", "h"], swaps) == (0.99, 1)
    assert replaced(own, ["e", "b1", "b2", "a3", "h"], swaps) == (0.99 * 0.98, 2)
    assert replaced(own, ["e", "c1", "c2", "c3", "a3", "h"], swaps) == (0.97, 1)
    assert replaced(own, ["e", "b1", "b2", "b3", "h"], swaps) is None
    assert replaced(own, ["e", "a1", "a2", "h"], swaps) is None


def test_of_two_ways_the_better_is_taken() -> None:
    swaps = [Swap(1, 2, ("b1",), 0.9), Swap(2, 3, ("b2",), 0.9), Swap(1, 3, ("b1", "b2"), 0.95)]
    assert replaced(DIGESTS["a"], ["e", "b1", "b2", "a3", "h"], swaps) == (0.95, 1)


def test_what_two_models_were_compared_at_behind_their_ends() -> None:
    pairs = [
        like(ScoredRun("a", 0, 3), ScoredRun("c", 0, 2), 0.5),
        like(ScoredRun("a", 3, 5), ScoredRun("c", 2, 4), 0.93),
        like(ScoredRun("c", 3, 4), ScoredRun("a", 4, 5), 0.92, "q"),
    ]
    assert compared("a", "c", pairs, (5, 4)) == 0.92
    assert compared("a", "b", pairs, (5, 5)) is None
