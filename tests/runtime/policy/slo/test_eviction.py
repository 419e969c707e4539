"""Which running sequences give way to a waiting one: only if it helps, only those that can, the cheapest first."""

from __future__ import annotations

from dataclasses import replace

from runtime.policy.slo.eviction import Occupant, Urgent, leave_for_load, victims

#: It needs a place on d until 100, and takes 40.
URGENT = Urgent(due=100, shortest=40, service=40, longest=40, places=frozenset({"d"}))


def occupant(seq: str, ends: int = 1000, due: int = 10_000, **other) -> Occupant:  # type: ignore[no-untyped-def]
    given = {"group": (0, 600), "resumes": 500, "lost": 50, "held": {"d": 10}, **other}
    return Occupant(seq=seq, due=due, ends=ends, **{"rest": ends, **given})


def test_one_gives_way_for_a_place() -> None:
    assert victims(URGENT, [occupant("a"), occupant("b")], now=0) == ("a",)


def test_none_gives_way_if_one_ends_in_time() -> None:
    assert victims(URGENT, [occupant("a"), occupant("b", ends=60)], now=0) == ()
    assert victims(URGENT, [occupant("a"), occupant("b", ends=61)], now=0) == ("a",), "a bit later is too late"


def test_of_many_one_most_likely_ends_in_time() -> None:
    """Sixteen that each take 300 more in the mean: the next end comes within 44 in nine of ten cases."""
    many = [occupant(f"s{number}", rest=300) for number in range(16)]
    assert victims(URGENT, many, now=0) == ()
    assert victims(URGENT, many[:8], now=0) != (), "of eight, within 87: too late"


def test_ends_that_are_known_do_not_come_earlier_because_they_are_many() -> None:
    """All run to their limits, which they reach at 90: none of them ends in time, however many there are."""
    many = [occupant(f"s{number}", rest=90, ends=90) for number in range(16)]
    assert victims(URGENT, many, now=0) != ()
    nearly = [occupant(f"s{number}", rest=80, ends=100) for number in range(16)]
    assert victims(URGENT, nearly, now=0) != (), "none ends before 70"
    assert victims(replace(URGENT, due=120), nearly, now=0) == (), "of sixteen, one has by 72"


def test_each_ends_once() -> None:
    """Two places are missing: one that ends for certain at 10 is not two ends."""
    urgent = replace(URGENT, places=frozenset(), pages={"d": 20})
    running = [occupant("a", rest=10, ends=10), *(occupant(f"s{number}", rest=500) for number in range(4))]
    assert victims(urgent, running, now=0) != ()
    assert victims(urgent, [*running, occupant("b", rest=20, ends=20)], now=0) == ()


def test_none_gives_way_to_one_that_is_late_anyway() -> None:
    assert victims(replace(URGENT, due=39), [occupant("a")], now=0) == ()


def test_the_upper_bound_decides_whether_it_can_wait() -> None:
    ending = [occupant("a", ends=50), occupant("b")]
    assert victims(URGENT, ending, now=0) == ()
    assert victims(replace(URGENT, longest=60), ending, now=0) == ("a",)


def test_the_fewest_lost_tokens_of_the_least_urgent_group_go_first() -> None:
    running = [
        occupant("few", lost=10),
        occupant("urgent", group=(0, 5), lost=1),
        occupant("many", lost=90),
        occupant("lowest", group=(1, 600), lost=70),
    ]
    assert victims(URGENT, running, now=0) == ("lowest",)
    assert victims(URGENT, running[:3], now=0) == ("few",)


def test_one_that_would_be_late_itself_stays() -> None:
    assert victims(URGENT, [occupant("a", due=539), occupant("b", lost=99)], now=0) == ("b",)
    assert victims(URGENT, [occupant("a", due=540), occupant("b", lost=99)], now=0) == ("a",)


def test_one_that_may_not_yield_stays() -> None:
    assert victims(URGENT, [occupant("a", may_yield=False)], now=0) == ()


def test_as_many_as_the_missing_pages_need_and_no_more() -> None:
    urgent = replace(URGENT, places=frozenset(), pages={"d": 25})
    running = [occupant(name, lost=at) for at, name in enumerate("abcd")]
    assert victims(urgent, running, now=0) == ("a", "b", "c")
    assert victims(urgent, running[:2], now=0) == (), "two do not suffice, so none goes"


def test_those_that_free_nothing_of_what_is_missing_stay() -> None:
    urgent = replace(URGENT, places=frozenset(), pages={"d": 5, "e": 5})
    running = [
        occupant("elsewhere", lost=0, held={"f": 99}),
        occupant("here", lost=1, held={"d": 10}),
        occupant("there", lost=2, held={"e": 10}),
    ]
    assert victims(urgent, running, now=0) == ("here", "there")


def test_all_in_the_way_of_a_load_give_way_or_none() -> None:
    """It is due at 100 and takes 40, a load 30; what gives way is back after 2 x 30 + 40, and takes 500."""
    both = [occupant("a"), occupant("b")]
    assert leave_for_load(URGENT, both, 30, now=0) == ("a", "b")
    assert leave_for_load(URGENT, [occupant("a"), occupant("b", may_yield=False)], 30, now=0) == ()
    assert leave_for_load(URGENT, [occupant("a", due=600), occupant("b")], 30, now=0) == ("a", "b")
    assert leave_for_load(URGENT, [occupant("a", due=599), occupant("b")], 30, now=0) == (), "it would be late itself"


def test_none_leaves_for_a_load_if_that_does_not_help() -> None:
    assert leave_for_load(URGENT, [occupant("a")], 60, now=0) == ("a",)
    assert leave_for_load(URGENT, [occupant("a")], 61, now=0) == (), "it is late anyway"
    assert leave_for_load(URGENT, [occupant("a", ends=30)], 30, now=0) == (), "it can wait"
    assert leave_for_load(URGENT, [occupant("a", ends=30), occupant("b", ends=31)], 30, now=0) == ("a", "b")


def test_lent_pages_count_and_take_no_place() -> None:
    debtor = occupant("a", held={"e": 10}, lent={"d": 10})
    assert victims(URGENT, [debtor], now=0) == (), "it runs elsewhere"
    pages = replace(URGENT, places=frozenset(), pages={"d": 10})
    assert victims(pages, [debtor], now=0) == ("a",)
    assert victims(replace(pages, pages={"d": 11}), [debtor], now=0) == ()
    both = replace(URGENT, pages={"e": 10})
    assert victims(both, [debtor], now=0) == (), "its pages on e are no place on d"
