"""Groups of waiting requests: keys, order, sums, sizes, and nothing left when all have gone."""

from __future__ import annotations

import random

from runtime.policy.slo.groups import Group, GroupKey, Member, WaitingGroups
from runtime.policy.slo.lengths import class_of
from runtime.policy.slo.objectives import TimeObjective

SOON = GroupKey(0, TimeObjective(100), class_of("m", 10, 50), "m@1")
LATER = GroupKey(0, None, class_of("m", 10, 50), "m@1")
LOW = GroupKey(1, TimeObjective(100), class_of("m", 10, 50), "m@1")
OTHER = GroupKey(0, TimeObjective(100), class_of("n", 10, 50), "n@1")


def named(group: Group) -> list[str]:
    return [member.seq for member in group]


def test_groups_are_in_order_of_priority_and_first_deadline() -> None:
    groups = WaitingGroups()
    groups.add(LOW, (5, 0), Member("a", 10, 0, 50))
    groups.add(LATER, (900, 1), Member("b", 10, 0, 50))
    groups.add(SOON, (300, 2), Member("c", 10, 0, 50))
    groups.add(SOON, (200, 3), Member("d", 30, 20, 50))
    assert [group.key for group in groups] == [SOON, LATER, LOW]
    first = next(iter(groups))
    assert (first.due, named(first), first.mean) == (200, ["d", "c"], (20.0, 10, 50))
    groups.remove("d")
    assert next(iter(groups)).due == 300
    assert groups.first("m@1").seq == "c"


def test_a_place_comes_before_a_deadline_and_after_a_priority() -> None:
    groups = WaitingGroups()
    for number, key in enumerate((SOON, LATER, LOW)):
        groups.add(key, (number, number), Member(f"s{number}", 1, 0, 9))
    found = list(groups)
    found[0].place, found[2].place = 7, 0
    assert [group.key for group in groups] == [LATER, SOON, LOW]


def test_a_group_has_a_size_and_takes_none_once_it_has_started() -> None:
    groups = WaitingGroups()
    groups.size = 2
    for number in range(5):
        groups.add(SOON, (number, number), Member(f"s{number}", 1, 0, 9))
    assert [named(group) for group in groups] == [["s0", "s1"], ["s2", "s3"], ["s4"]]
    groups.remove("s4")
    groups.start("s4")
    groups.add(SOON, (9, 9), Member("s9", 1, 0, 9))
    assert [named(group) for group in groups] == [["s0", "s1"], ["s2", "s3"], ["s9"]]
    groups.add(SOON, (4, 4), Member("s4", 1, 0, 9))  # it gave way, and is in the group that it was in
    assert [named(group) for group in groups] == [["s0", "s1"], ["s2", "s3"], ["s4"], ["s9"]]
    started = groups.group_of("s4")
    assert started is not None and started.started


def test_what_is_far_away_is_one_group_until_earlier_ones_have_ended() -> None:
    groups = WaitingGroups()
    groups.size = 2
    for number in range(1000):
        groups.add(SOON, (number, number), Member(f"s{number}", 1, 0, 9))
    assert len(groups) == 16
    ids = [group.id for group in groups]
    for number in range(1000):
        assert groups.first("m@1").seq == f"s{number}"
        groups.remove(f"s{number}")
        groups.start(f"s{number}")
        groups.end_member(f"s{number}")
        assert sum(len(group) for group in groups) == 999 - number == sum(group.live for group in groups)
        assert all(len(group) <= 2 for group in list(groups)[:15])
        made = [group.id for group in groups]
        assert made == sorted(made), "a part that is split off comes after its group"
    assert len(groups) == 0 and ids == list(range(1, 17))


def test_the_first_of_each_cell_is_found() -> None:
    groups = WaitingGroups()
    for number, key in enumerate((SOON, LATER, LOW)):
        groups.add(key, (9 - number, number), Member(f"s{number}", 1, 0, 9))
    for group, cell in zip(groups.all(), ("b", "a", "b"), strict=True):
        group.cell = cell
    groups.reorder()
    assert [member.seq for member in groups.firsts("m@1")] == ["s1", "s0"]
    assert groups.first("m@1", "a") == Member("s1", 1, 0, 9)
    assert groups.first("m@1", "b") == Member("s0", 1, 0, 9) and groups.first("m@1", "c") is None
    later, group = next(iter(groups)), groups.group_of("s0")
    assert later.cell == "a" and group is not None
    group.place = 5
    groups.reorder()
    assert groups.first("m@1", "a").seq == "s1" and groups.first("m@1", "b").seq == "s0"


def test_what_is_split_off_is_found_in_its_own_cell() -> None:
    """The rest of a group that is cut when an earlier one has ended may be assigned to another cell."""
    cells = iter(("a", "a", "b"))
    groups = WaitingGroups(lambda group: setattr(group, "cell", next(cells)))
    groups.add(SOON, (0, 0), Member("s0", 1, 0, 9))
    groups.remove("s0")
    groups.start("s0")
    for number in range(1, 5):
        groups.add(SOON, (number, number), Member(f"s{number}", 1, 0, 9))
    assert [member.seq for member in groups.firsts("m@1")] == ["s1"]
    groups.size = 2
    groups.end_member("s0")
    assert [member.seq for member in groups.firsts("m@1")] == ["s1", "s3"]


def test_what_is_taken_of_a_group_is_found_by_itself() -> None:
    groups = WaitingGroups(lambda group: setattr(group, "cell", "b"))
    for number in range(3):
        groups.add(SOON, (number, number), Member(f"s{number}", 1, 0, 9))
    group = groups.group_of("s0")
    assert group is not None and groups.first("m@1", "b").seq == "s0"
    taken = groups.take_first(group, 2)
    assert (named(taken), taken.cell, named(group)) == (["s0", "s1"], "", ["s2"])
    assert [member.seq for member in groups.firsts("m@1")] == ["s0", "s2"]


def test_any_order_of_events_leaves_nothing() -> None:
    rng, groups = random.Random(0), WaitingGroups()
    opened: list[int] = []
    ended: list[int] = []
    groups = WaitingGroups(lambda group: opened.append(group.id), lambda group: ended.append(group.id))
    waiting: dict[str, Member] = {}
    running: dict[str, tuple[GroupKey, tuple[int, int], Member]] = {}
    kept: dict[str, tuple[GroupKey, tuple[int, int], Member]] = {}
    for number in range(3000):
        groups.size = rng.randrange(1, 9)
        some = rng.random()
        if waiting and some < 0.35:
            seq = rng.choice(sorted(waiting))
            groups.remove(seq)
            if rng.random() < 0.7:
                groups.start(seq)
                running[seq] = kept[seq]
            else:
                groups.end_member(seq)
            del waiting[seq]
        elif running and some < 0.65:
            seq = rng.choice(sorted(running))
            key, turn, member = running.pop(seq)
            if rng.random() < 0.3:
                groups.add(key, turn, member)
                waiting[seq] = member
            else:
                groups.end_member(seq)
        else:
            member = Member(f"s{number}", rng.randrange(99), rng.randrange(99), rng.randrange(1, 99))
            given = (rng.choice((SOON, LATER, LOW, OTHER)), (rng.randrange(99), number), member)
            kept[member.seq], waiting[member.seq] = given, member
            groups.add(*given)
        assert sum(len(group) for group in groups) == len(waiting)
        assert sum(group.live for group in groups.all()) == len(waiting) + len(running)
        assert sum(group.context for group in groups) == sum(each.context for each in waiting.values())
        assert {group.id for group in groups.waiting()} == {group.id for group in groups}
        for chain in ("m@1", "n@1"):  # what is kept is what a look at all groups finds
            found = min(
                (group for group in groups if group.key.chain == chain), key=lambda each: each.order, default=None
            )
            assert groups.first(chain) == (None if found is None else next(iter(found)))
            assert groups.firsts(chain) == ([] if found is None else [next(iter(found))])
    for seq in (*waiting, *running):
        if seq in waiting:
            groups.remove(seq)
        groups.end_member(seq)
    assert len(groups) == 0 and sorted(opened) == sorted(ended) == sorted(set(opened))
