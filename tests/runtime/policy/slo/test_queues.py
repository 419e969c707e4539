"""Virtual queues: what a plan orders, where other groups stand, and when a plan is over."""

from __future__ import annotations

import random

import pytest

from runtime.policy.slo.groups import GroupKey, Member
from runtime.policy.slo.lengths import class_of
from runtime.policy.slo.objectives import TimeObjective
from runtime.policy.slo.queues import VirtualQueues


def made(*dues: int, priorities: tuple[int, ...] = ()) -> VirtualQueues:
    """Return queues of groups 1, 2, … with one waiting member each, of these deadlines."""
    queues = VirtualQueues()
    for number, due in enumerate(dues):
        put(queues, number, due, priorities[number] if priorities else 0)
    return queues


def put(queues: VirtualQueues, number: int, due: int, priority: int = 0, chain: str = "m@1") -> None:
    key = GroupKey(priority, TimeObjective(number), class_of("m", 10, 50), chain)
    queues.groups.add(key, (due, number), Member(f"s{number}", 1, 0, 9))


def end(queues: VirtualQueues, number: int) -> None:
    queues.groups.remove(f"s{number - 1}")
    queues.groups.end_member(f"s{number - 1}")


def test_deadlines_order_groups_until_there_is_a_plan() -> None:
    queues = made(30, 10, 20)
    assert queues.orders() == {"": [2, 3, 1]}
    queues.follow({"": [1, 3, 2]})
    assert queues.orders() == {"": [1, 3, 2]}
    queues.follow({})
    assert queues.orders() == {"": [2, 3, 1]}


def test_a_group_that_is_not_planned_comes_before_the_first_later_deadline() -> None:
    queues = made(30, 10, 20)
    queues.follow({"": [1, 3]})  # deadlines 30, 20; the group of deadline 10 is left out
    assert queues.orders() == {"": [2, 1, 3]}
    put(queues, 3, 25)
    put(queues, 4, 99)
    put(queues, 5, 15)
    assert queues.orders() == {"": [2, 6, 4, 1, 3, 5]}


def test_places_before_planned_groups_are_those_of_a_look_at_all() -> None:
    rng = random.Random(0)
    for _ in range(50):
        dues, priorities = [rng.randrange(20) for _ in range(12)], tuple(rng.randrange(2) for _ in range(12))
        queues = made(*dues, priorities=priorities)
        plan = rng.sample(range(1, 13), 6)
        queues.follow({"": plan})
        planned = [group for group in queues.groups.all() if group.planned]
        assert [group.place for group in sorted(planned, key=lambda each: plan.index(each.id))] == [1, 3, 5, 7, 9, 11]
        for group in queues.groups.all():
            if not group.planned:
                mine = group.key.priority, group.due
                later = [each.place - 1 for each in planned if mine < (each.key.priority, each.due)]
                assert group.place == min(later, default=12)


def test_heads_follow_a_plan_and_its_end() -> None:
    queues = made(30, 10, 20)
    assert queues.groups.first("m@1").seq == "s1"
    queues.follow({"": [3]})
    assert queues.groups.first("m@1").seq == "s1"
    queues.follow({"": [1, 3, 2]})
    assert queues.groups.first("m@1").seq == "s0"
    for number in (1, 2, 3):
        end(queues, number)
    put(queues, 3, 40)
    put(queues, 4, 5)
    assert queues.groups.first("m@1").seq == "s4"


def test_a_plan_of_groups_that_have_ended_is_over() -> None:
    queues = made(30, 10, 20)
    queues.follow({"": [1, 77, 3]})
    put(queues, 3, 99)
    end(queues, 1)
    end(queues, 3)
    put(queues, 4, 5)
    assert queues.orders() == {"": [5, 2, 4]}


def test_priorities_come_before_a_plan() -> None:
    queues = made(30, 10, 20, priorities=(1, 0, 0))
    queues.follow({"": [1, 3, 2]})
    assert queues.orders() == {"": [3, 2, 1]}


def test_each_cell_has_its_own_order() -> None:
    queues = made(30, 10, 20, 40)
    queues.follow({"a": [4, 1], "b": [3, 2]})
    assert queues.orders() == {"a": [4, 1], "b": [3, 2]}
    with pytest.raises(ValueError, match="twice"):
        queues.follow({"a": [1], "b": [1]})
    assert queues.orders() == {"a": [4, 1], "b": [3, 2]}, "a refused plan changes nothing"


def test_what_a_plan_cannot_know_is_left_out() -> None:
    queues = made(30, 10, 20, 40)
    queues.cells = ("a", "b")
    queues.choose = lambda group: "a"
    queues.follow({"a": [4, 3], "b": [1]})
    queues.groups.remove("s0")
    queues.groups.start("s0")  # group 1 has started in b
    put(queues, 4, 50)
    queues.follow({"a": [1, 5], "b": [2], "gone": [3]})
    found = queues.orders()
    assert found["a"] == [3, 4, 5] and found["b"] == [2]
    started = queues.groups.group_of("s0")
    assert started is not None and started.cell == "b"


def test_the_only_cell_takes_a_plan_of_any_name() -> None:
    queues = made(30, 10, 20)
    queues.cells = ("d0",)
    queues.follow({"": [1, 3, 2]})
    assert queues.orders() == {"d0": [1, 3, 2]}


def test_what_waits_when_a_plan_is_over_is_found_by_deadline() -> None:
    """A group that came after a planned one had ended stood behind one of a later deadline."""
    queues = made(100)
    put(queues, 1, 20, chain="n@1")
    put(queues, 2, 50)
    queues.follow({"": [1, 2]})
    end(queues, 1)
    put(queues, 3, 5)
    assert queues.groups.first("m@1").seq == "s2"
    end(queues, 2)
    assert queues.groups.first("m@1").seq == "s3"
