"""The order of moves and the pages it doubles: examples, and its claims against all choices (BL-18)."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.policy.migration.order import Mover, order_moves


def mover(seq: str, *pages: int, resume: int = 0) -> Mover:
    return Mover(seq, frozenset(pages), resume)


def rest(movers: list[Mover], moved: tuple[Mover, ...] | list[Mover]) -> list[Mover]:
    return [each for each in movers if each not in moved]


def test_fewer_shared_pages_first_and_of_equals_who_resumes_sooner() -> None:
    a, b = mover("a", 1, 2, 3), mover("b", 1, 2, 4)  # two shared pages each
    c, d = mover("c", 5, 6, resume=9), mover("d", 7, resume=3)  # none
    e = mover("e", 1, 8)  # one
    order = order_moves([a, b, c, d, e])
    assert [(one.mover.seq, one.shared) for one in order] == [("d", 0), ("c", 0), ("e", 1), ("a", 2), ("b", 2)]


def test_pages_shared_with_those_that_stay_count() -> None:
    assert [(one.mover.seq, one.shared) for one in order_moves([mover("a", 1), mover("b", 2)], [mover("s", 1)])] == [
        ("b", 0),
        ("a", 1),
    ]


def more(movers: list[Mover], chosen: list[Mover]) -> int:
    """Return how many more pages both devices hold once these sequences have moved with copies of theirs."""
    before = frozenset().union(*(each.pages for each in movers))
    stay = frozenset().union(*(each.pages for each in rest(movers, chosen)))
    return len(stay) + sum(len(each.pages) for each in chosen) - len(before)


_devices = st.lists(st.frozensets(st.integers(0, 7), max_size=5), min_size=1, max_size=6).map(
    lambda sets: [Mover(f"s{index}", pages) for index, pages in enumerate(sets)]
)


@given(_devices, st.data())
@settings(max_examples=150, deadline=None)
def test_what_is_said_to_hold_does(movers: list[Mover], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(movers)))
    ranked = order_moves(movers)
    shared = {one.mover.seq: one.shared for one in ranked}
    papers = [one.mover for one in ranked[:count]]
    sharers = Counter(page for each in movers for page in each.pages)
    least = len(movers) * 8
    for chosen in map(list, combinations(movers, count)):
        held = Counter(page for each in chosen for page in each.pages)
        cost, bound = more(movers, chosen), sum(shared[each.seq] for each in chosen)
        assert cost == sum(times - (times == sharers[page]) for page, times in held.items()) <= bound
        assert sum(shared[each.seq] for each in papers) <= bound
        least = min(least, cost)
    alone = all(not a.pages & b.pages for a, b in combinations(movers, 2))
    assert not (count == 1 or alone) or more(movers, papers) == least


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.data())
@settings(max_examples=60, deadline=None)
def test_it_is_the_best_where_all_sharing_is_with_sequences_that_stay(shared: list[int], data: st.DataObject) -> None:
    movers = [Mover(f"s{index}", frozenset(range(10 * index, 10 * index + 5))) for index in range(len(shared))]
    stay = [Mover(f"t{index}", frozenset(range(10 * index, 10 * index + count))) for index, count in enumerate(shared)]
    count = data.draw(st.integers(1, len(movers)))
    papers = [one.mover for one in order_moves(movers, stay)][:count]
    best = min(more([*movers, *stay], list(chosen)) for chosen in combinations(movers, count))
    assert more([*movers, *stay], papers) == best == sum(sorted(shared)[:count])
