"""What waits goes to cells with places left (QL-12): two devices that both have the only model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from runtime.config import ClusterConfig, OrderConfig
from runtime.policy.slo.groups import GroupKey, Member
from runtime.policy.slo.lengths import AnswerLengths, class_of
from runtime.policy.slo.service_times import ServiceTimes
from runtime.scheduler.order.cells import CellAssignment
from runtime.scheduler.order.forecasts import Forecasts

KEY = GroupKey(0, None, class_of("m", 8, 32), "m#1")


class _Devices(list[Any]):
    def alive(self, name: str) -> bool:
        return True


def assignment(cells: int = 2, places: int = 4) -> CellAssignment:
    names = [f"d{at}" for at in range(cells)]
    forecasts = Forecasts(ServiceTimes(), AnswerLengths(), 10**12, places, lambda now, told, took: None)
    devices: Any = _Devices(SimpleNamespace(name=name, final=False) for name in names)
    placed: Any = SimpleNamespace(instances={"b": names})
    config = ClusterConfig(devices=cells, max_num_seqs=places, order=OrderConfig("qlm"))
    made = CellAssignment(config, devices, placed, forecasts)
    chain: Any = SimpleNamespace(version="m#1", uses=(SimpleNamespace(block="b"),))
    made.review([chain])
    return made


def wait(made: CellAssignment, count: int, cell: str, key: GroupKey = KEY, first: int = 0) -> None:
    """Let requests wait in one group of a cell."""
    groups = made._forecasts.groups
    for number in range(first, first + count):
        groups.add(key, (number, number), Member(f"s{number}", 8, 0, 32))
    group = groups.group_of(f"s{first}")
    assert group is not None
    made._forecasts.queues.assign(group, cell)


def waiting(made: CellAssignment) -> dict[str, list[str]]:
    """Return the waiting requests of each cell, in their order."""
    found: dict[str, list[str]] = {}
    for group in made._forecasts.groups:
        found.setdefault(group.cell, []).extend(member.seq for member in group)
    return found


def test_a_cell_with_places_left_gets_the_first_that_wait_elsewhere() -> None:
    made = assignment()
    wait(made, 6, "d0")
    assert made.balance()
    assert waiting(made) == {"d0": ["s4", "s5"], "d1": ["s0", "s1", "s2", "s3"]}


def test_each_of_several_cells_with_places_left_gets_its_own() -> None:
    """What one cell has just got is not taken from it for the next one."""
    made = assignment(cells=3)
    wait(made, 12, "d0")
    assert made.balance()
    assert {cell: len(some) for cell, some in waiting(made).items()} == {"d0": 4, "d1": 4, "d2": 4}


def test_a_cell_for_which_requests_wait_gets_no_other_ones() -> None:
    """They find no room there for another reason than places."""
    made = assignment()
    wait(made, 6, "d0")
    wait(made, 1, "d1", KEY._replace(priority=1), first=6)
    before = waiting(made)
    assert not made.balance()
    assert waiting(made) == before


def test_groups_of_a_plan_stay_in_their_cell() -> None:
    made = assignment()
    wait(made, 6, "d0")
    made._forecasts.queues.follow({"d0": [group.id for group in made._forecasts.groups]})
    assert not made.balance()
    assert list(waiting(made)) == ["d0"]
