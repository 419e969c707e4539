"""The manager of the pool by itself: what it recommends, and what it knows of debts (IL-10 to IL-16)."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from runtime.control.pool_io import PoolAnswer, PoolDenial, PoolQuery
from runtime.lending_config import LendingConfig
from runtime.messages import PoolBeat
from runtime.pool.manager import MOST, PoolManager

MS = 1_000_000


def manager(**settings: Any) -> PoolManager:
    return PoolManager(LendingConfig("negotiated", **{"cap": 1.0, **settings}))


def beat(device: str, free: int, server: str = "x", capacity: int = 1000, **lent: int) -> PoolBeat:
    return PoolBeat(device, server, capacity, free, tuple(sorted(lent.items())))


def offered(one: PoolManager, debtor: str, pages: int, now: int = 0, **more: Any) -> list[str]:
    answer = one.handle(PoolQuery(1, debtor, pages, more.pop("wanted", pages), **more), now)
    assert isinstance(answer, PoolAnswer)
    return [each.device for each in answer.offers]


def heard(*beats: PoolBeat, now: int = 0, **settings: Any) -> PoolManager:
    one = manager(**settings)
    for each in beats:
        one.handle(each, now)
    return one


def test_near_devices_come_first_then_those_with_most_room_and_three_at_most() -> None:
    rooms = {"a": 50, "b": 30, "c": 40, "d": 9, "e": 35, "z": 0}
    beats = [*(beat(name, free) for name, free in rooms.items()), beat("far", 900, "y")]
    assert offered(heard(*beats), "a", 10) == ["c", "e", "b"] and MOST == 3
    assert offered(heard(*beats), "a", 38) == ["c", "far"]
    assert offered(heard(*beats), "a", 60) == ["far"]
    assert offered(heard(*beats), "far", 45) == ["a"]
    assert offered(heard(*beats), "a", 901) == []


def test_path_and_refusers_are_not_recommended() -> None:
    one = heard(*(beat(name, 100) for name in "abcdefgh"))
    seen = offered(one, "a", 10, path=("a", "b"))
    again = offered(one, "a", 10, path=("a", "b"), refused=tuple(seen))
    assert len(seen) == len(again) == 3 and not {*seen} & {*again} and not {"a", "b"} & {*seen, *again}
    assert offered(one, "a", 10, path=("a", "b"), refused=(*seen, *again)) == []


def test_queries_at_one_time_are_spread_evenly() -> None:
    one = heard(beat("a", 0), *(beat(name, 100) for name in "bcde"))
    firsts = Counter(offered(one, "a", 10)[0] for _ in range(40))
    assert firsts == {"b": 10, "c": 10, "d": 10, "e": 10}
    assert offered(one, "a", 10)[0] == "b", "room that was promised is recommended when there is no other"
    one.handle(beat("d", 100), 0)
    assert offered(one, "a", 10)[0] == "d", "a heartbeat says what is left"


def test_a_refuser_is_paused_until_its_heartbeat_shows_room() -> None:
    one = heard(beat("a", 0), beat("b", 100), beat("c", 50))
    one.handle(PoolDenial("b"), MS)
    assert offered(one, "a", 10, 2 * MS) == ["c"]
    one.handle(beat("b", 0), 3 * MS)
    assert offered(one, "a", 10, 150 * MS) == ["c"]
    one.handle(beat("b", 100), 160 * MS)
    assert offered(one, "a", 10, 300 * MS) == ["b", "c"]
    one.handle(PoolDenial("nothing of that name"), 300 * MS)


def test_the_cap_counts_what_is_lent_and_zero_recommends_nothing() -> None:
    beats = (beat("a", 0), beat("b", 800, capacity=1000, a=150, c=100), beat("c", 40, capacity=100))
    for cap, expected in ((1.0, ["b", "c"]), (0.3, ["b"]), (0.25, []), (0.0, [])):
        assert offered(heard(*beats, cap=cap), "a", 40) == expected


def test_a_device_that_is_not_heard_of_is_not_recommended_and_owes_nothing() -> None:
    one = heard(beat("a", 0), beat("b", 100, a=5), beat("c", 50, b=7), beat_ms=100, gone_ms=500)
    for at in range(100, 600, 100):
        one.handle(beat("c", 50, b=7), at * MS)
    assert offered(one, "a", 10, 500 * MS) == ["b", "c"]
    assert one.ledger(500 * MS) == {("a", "b"): 5, ("b", "c"): 7}
    assert offered(one, "a", 10, 501 * MS) == ["c"] and one.ledger(501 * MS) == {("b", "c"): 7}
    one.handle(beat("b", 100), 700 * MS)
    assert "b" in offered(one, "a", 10, 701 * MS), "it is back"


def test_the_sorted_list_has_an_age_and_is_made_once_in_a_period() -> None:
    one = heard(beat("a", 0), beat("b", 20), beat("c", 10))
    one.handle(beat("c", 90), 10 * MS)
    answer = one.handle(PoolQuery(1, "a", 15, 15), 60 * MS)
    assert isinstance(answer, PoolAnswer)
    assert [each.device for each in answer.offers] == ["b"] and answer.age == 60 * MS, "c has grown since"
    assert one.picture(60 * MS).sorted_age == 60 * MS
    assert offered(one, "a", 15, 100 * MS)[0] == "c" and one.picture(110 * MS).sorted_age == 10 * MS
    ages = {each.id: each.age for each in one.picture(110 * MS).instances}
    assert ages == {"a": 110 * MS, "b": 110 * MS, "c": 100 * MS}


#: Figure 4 of the paper: the pages that each instance holds for other ones.
FIGURE_4 = (
    beat("inst-0", 10, **{"inst-1": 4, "inst-3": 3}),
    beat("inst-1", 0),
    beat("inst-2", 90),
    beat("inst-3", 0, **{"inst-1": 2}),
)


def test_the_ledger_of_figure_4_has_no_circle() -> None:
    debts = heard(*FIGURE_4).ledger(0)
    assert debts == {("inst-1", "inst-0"): 4, ("inst-3", "inst-0"): 3, ("inst-1", "inst-3"): 2}
    assert not has_circle(debts)
    both = heard(beat("a", 0, b=2), beat("b", 0, a=1)).ledger(0)
    assert both == {("b", "a"): 2, ("a", "b"): 1} and has_circle(both)


def has_circle(debts: Any) -> bool:
    """Return whether debts remain when all devices that owe nothing are taken away, again and again."""
    left = set(debts)
    while left and (free := {creditor for _, creditor in left} - {debtor for debtor, _ in left}):
        left = {edge for edge in left if edge[1] not in free}
    return bool(left)


def test_a_manager_that_knows_nothing_knows_all_after_the_next_heartbeats() -> None:
    old, new = heard(*FIGURE_4), manager()
    assert offered(new, "inst-1", 1) == []
    for each in FIGURE_4:
        new.handle(each, MS)
    assert new.ledger(MS) == old.ledger(MS)
    assert offered(new, "inst-1", 1, 200 * MS, path=("inst-1",)) == ["inst-2", "inst-0"]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_in_any_order(seed: int) -> None:
    """No recommendation names the debtor, the path, a refuser, a silent or a paused device, or one without room."""
    rng, one = random.Random(seed), manager(cap=0.5, gone_ms=300)
    names, last, now = [f"d{at}" for at in range(8)], dict[str, tuple[int, int]](), 0
    denied: set[str] = set()
    for number in range(400):
        now += rng.randrange(40) * MS
        name = rng.choice(names)
        match rng.randrange(4):
            case 0 | 1:
                free, lent = rng.randrange(100), rng.randrange(60)
                one.handle(PoolBeat(name, rng.choice("xy"), 100, free, (("d9", lent),)), now)
                last[name] = now, max(0, min(free, 50 - lent))
                if last[name][1]:
                    denied.discard(name)
            case 2:
                one.handle(PoolDenial(name), now)
                if name in last and now - last[name][0] <= 300 * MS:
                    denied.add(name)
            case _:
                path, refused = tuple(rng.sample(names, 2)), tuple(rng.sample(names, rng.randrange(4)))
                pages = rng.randrange(1, 40)
                answer = one.handle(PoolQuery(number, path[0], pages, pages, path, refused), now)
                assert isinstance(answer, PoolAnswer) and answer.number == number
                assert len(answer.offers) <= 3 and len({each.device for each in answer.offers}) == len(answer.offers)
                for each in answer.offers:
                    at, room = last[each.device]
                    assert each.device not in (*path, *refused, *denied) and now - at <= 300 * MS
                    assert each.room == room >= pages


@pytest.mark.parametrize("settings", [{"beat_ms": 0}, {"beat_ms": 100, "gone_ms": 100}, {"managers": 0}])
def test_settings_out_of_range_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"beat_ms|managers"):
        LendingConfig("negotiated", **settings)  # type: ignore[arg-type]
