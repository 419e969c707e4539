"""Groups of waiting requests: keys, order, sums, and nothing left when all have gone."""

from __future__ import annotations

import random

from runtime.policy.slo.groups import GroupKey, WaitingGroups
from runtime.policy.slo.lengths import class_of

SOON = GroupKey(0, 100, class_of("m", 10, 50))
LATER = GroupKey(0, None, class_of("m", 10, 50))
LOW = GroupKey(1, 100, class_of("m", 10, 50))


def test_groups_are_in_order_of_priority_and_first_deadline() -> None:
    groups = WaitingGroups()
    groups.add(LOW, "a", 5, 10, 0, 50)
    groups.add(LATER, "b", 900, 10, 0, 50)
    groups.add(SOON, "c", 300, 10, 0, 50)
    groups.add(SOON, "d", 200, 30, 20, 50)
    assert [group.key for group in groups] == [SOON, LATER, LOW]
    first = next(iter(groups))
    assert first.due == 300 and first.mean == (20.0, 10, 50)
    groups.remove(SOON, "c", 10, 0, 50)
    assert next(iter(groups)).due == 200


def test_any_order_of_additions_and_removals_leaves_nothing() -> None:
    rng, groups = random.Random(0), WaitingGroups()
    there: dict[str, tuple[GroupKey, int, int, int]] = {}
    for number in range(600):
        if there and rng.random() < 0.5:
            seq = rng.choice(sorted(there))
            key, *sums = there.pop(seq)
            groups.remove(key, seq, *sums)
        else:
            given = (rng.choice((SOON, LATER, LOW)), rng.randrange(99), rng.randrange(99), rng.randrange(1, 99))
            there[f"s{number}"] = given
            groups.add(given[0], f"s{number}", number, *given[1:])
        assert sum(len(group.members) for group in groups) == len(there)
        assert sum(group.context for group in groups) == sum(each[1] for each in there.values())
    for seq, (key, *sums) in there.items():
        groups.remove(key, seq, *sums)
    assert len(groups) == 0
