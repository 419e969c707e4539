"""Which device holds page sets for another one (IL-08, IL-09, IL-13)."""

from __future__ import annotations

import itertools
import random

from runtime.policy.lending.creditors import Creditor, candidates, choose


def creditor(device: str = "a", free: int = 10, lent: int = 0, most: int = 10, load: float = 0.0, near: bool = True):
    return Creditor(device, free, lent, most, load, near)


def test_a_device_lends_what_is_free_up_to_its_cap() -> None:
    assert creditor(free=10, lent=3, most=8).spare == 5
    assert creditor(free=2, lent=0, most=8).spare == 2
    assert creditor(lent=9, most=8).spare == 0 and creditor(most=0).spare == 0


def test_near_ones_come_first_then_those_with_most_to_lend() -> None:
    some = [creditor("far", 90, most=90, near=False), creditor("b", 5), creditor("a", 5), creditor("c", 9)]
    assert [each.device for each in candidates(some, 1.0)] == ["c", "a", "b", "far"]
    for order in itertools.permutations(some):
        assert candidates(order, 1.0) == candidates(some, 1.0)


def test_a_busy_device_and_one_without_pages_lend_nothing() -> None:
    assert candidates([creditor(load=0.5), creditor("b", free=0)], 0.5) == []
    assert [each.device for each in candidates([creditor(load=0.49)], 0.5)] == ["a"]


def test_the_best_that_takes_all_is_chosen_else_the_one_that_takes_most() -> None:
    some = [creditor("near", 6, most=6), creditor("far", 60, most=60, near=False)]
    assert choose(some, 1.0, 3, 2) == ("near", 3)
    assert choose(some, 1.0, 4, 2) == ("far", 4)
    assert choose(some, 1.0, 100, 2) == ("far", 30)
    assert choose(some, 1.0, 1, 61) is None and choose([], 1.0, 1, 1) is None


def test_no_choice_takes_more_than_a_device_can_lend() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        some = [
            creditor(str(at), rng.randrange(40), rng.randrange(20), rng.randrange(40), rng.random(), rng.random() < 0.5)
            for at in range(rng.randrange(5))
        ]
        groups, pages, busy = rng.randrange(1, 20), rng.randrange(1, 8), rng.random()
        found = choose(some, busy, groups, pages)
        able = [each for each in some if each.load < busy and each.spare >= pages]
        assert (found is None) == (not able)
        if found is not None:
            one = next(each for each in some if each.device == found[0])
            assert 0 < found[1] <= groups and found[1] * pages <= one.spare and one in able
            assert found[1] == max(min(groups, each.spare // pages) for each in able)
