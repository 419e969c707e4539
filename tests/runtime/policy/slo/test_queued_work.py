"""Sums of waiting work beside those found by a look at every group, while groups come, change, move and end."""

from __future__ import annotations

import random

import pytest

from runtime.policy.slo.forecast import NOTHING, Occupancy, Queued
from runtime.policy.slo.groups import Group, GroupKey, Member
from runtime.policy.slo.lengths import class_of
from runtime.policy.slo.objectives import TimeObjective
from runtime.policy.slo.queued_work import QueuedWork
from runtime.policy.slo.queues import VirtualQueues

MS = 1_000_000


class Waiting:
    """Groups in two cells; a member's work hangs on its group's sums and on a speed that changes."""

    def __init__(self) -> None:
        self.queues = VirtualQueues()
        self.queues.cells = ("a", "b")
        self.queues.choose = lambda group: "ab"[group.id % 2]
        self.groups = self.queues.groups
        self.speed, self.version, self.looks = 3.0, 0, 0
        self.queued = QueuedWork(self.groups, self.work, lambda: (self.version, 0))

    def work(self, group: Group) -> Occupancy:
        self.looks += 1
        return Occupancy(self.speed * group.mean[0], 7.0 * group.mean[0])

    def add(self, number: int, key: GroupKey, due: int) -> Group:
        self.groups.add(key, (due, number), Member(f"s{number}", 1 + number % 50, 0, 99))
        found = self.groups.group_of(f"s{number}")
        assert found is not None
        return found

    def by_looking(self, own: Group, rank: tuple[int, int, int]) -> Queued:
        total = NOTHING
        for group in self.groups.waiting():
            if group.cell == own.cell and (group is own or group.rank <= rank):
                count = len(group) - (group is own)
                total = total.plus(Queued.work_of(count, self.work(group)) if count else NOTHING)
        return total


def key(number: int) -> GroupKey:
    return GroupKey(number % 2, TimeObjective(100 << number % 5), class_of("m", 10, 50), f"m{number % 7}@1")


@pytest.mark.parametrize("seed", range(8))
def test_sums_are_those_of_a_look_at_every_group(seed: int) -> None:
    rng, made = random.Random(seed), Waiting()
    made.groups.size = 4
    waiting: list[str] = []
    running: list[str] = []
    for number in range(600):
        own = made.add(number, key(rng.randrange(40)), due := rng.randrange(10_000))
        waiting.append(f"s{number}")
        rank = (own.key.priority, own.place, due)
        if rng.random() < 0.5:
            found, looked = made.queued.before(own, rank, now=number), made.by_looking(own, rank)
            assert list(found) == pytest.approx(list(looked), abs=1e-3)
        if number > 20 and rng.random() < 0.6:
            running.append(waiting.pop(rng.randrange(len(waiting))))
            made.groups.remove(running[-1])
            made.groups.start(running[-1])
        if running and rng.random() < 0.6:
            made.groups.end_member(running.pop(rng.randrange(len(running))))
        if rng.random() < 0.05:
            made.queues.assign(rng.choice(list(made.groups.waiting())), rng.choice("ab"))
        if rng.random() < 0.03:
            orders = made.queues.orders()
            made.queues.follow({cell: rng.sample(some, len(some) // 2) for cell, some in orders.items()})
        if rng.random() < 0.05:
            made.groups.take_first(rng.choice(list(made.groups.waiting())), 2)
        if rng.random() < 0.1:
            made.speed, made.version = rng.uniform(1, 9), made.version + 1


def test_an_arrival_looks_at_the_groups_that_have_changed() -> None:
    """With a thousand groups, and better times at each arrival: all are looked at ten times a second."""
    made = Waiting()
    made.groups.size = 1
    for number in range(1000):
        made.add(number, key(0)._replace(chain=f"m{number}@1"), number)
    made.queued.before(made.add(1000, key(0)._replace(chain="n0@1"), 1000), (0, 0, 1000), now=0)
    made.looks = 0
    for number in range(1, 31):
        made.version += 1
        own = made.add(1000 + number, key(0)._replace(chain=f"n{number}@1"), 1000 + number)
        made.queued.before(own, (0, 0, 1000 + number), now=number * MS)
    assert made.looks < 600
    made.speed = 6.0
    own = made.add(2000, key(0)._replace(chain="last@1"), 2000)
    told = made.queued.before(own, own.rank, now=200 * MS)
    assert told.mean == pytest.approx(made.by_looking(own, own.rank).mean)
