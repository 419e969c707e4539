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
    roles = SimpleNamespace(apart=False)

    def alive(self, name: str) -> bool:
        return True

    def __getitem__(self, name: Any) -> Any:
        return next(each for each in self if each.name == name)


def assignment(
    cells: int = 2, places: int = 4, cold: dict[str, float] | None = None, times: ServiceTimes | None = None
) -> CellAssignment:
    """Return cells of one device each. `cold`: seconds of a load on devices without the model."""
    cold = cold or {}
    names = [f"d{at}" for at in range(cells)]
    forecasts = Forecasts(times or ServiceTimes(), AnswerLengths(), 10**12, places, lambda now, told, took: None)
    devices: Any = _Devices(
        SimpleNamespace(name=name, final=False, stages=SimpleNamespace(warm=set() if name in cold else {"b"}))
        for name in names
    )
    placed: Any = SimpleNamespace(instances={"b": names}, block=lambda block: SimpleNamespace(nbytes=1000))
    loads: Any = SimpleNamespace(seconds=lambda device, sizes: cold[device])
    config = ClusterConfig(devices=cells, max_num_seqs=places, order=OrderConfig("qlm"))
    made = CellAssignment(config, devices, placed, forecasts, loads)
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


def choice(made: CellAssignment) -> str:
    """Return the cell of a new group of longer answers, behind all the rest in the order of arrival."""
    key = KEY._replace(answers=class_of("m", 8, 64))
    made._forecasts.groups.add(key, (1000, 1000), Member("new", 8, 0, 64))
    group = made._forecasts.groups.group_of("new")
    assert group is not None
    return group.cell


def test_a_group_goes_where_its_model_is_loaded_while_that_is_sooner() -> None:
    """Sixteen requests of about a second, four at a time, are served before a load of ten seconds ends, not of one."""
    for seconds, expected in ((10.0, "d0"), (1.0, "d1")):
        made = assignment(cold={"d1": seconds})
        wait(made, 16, "d0")
        assert choice(made) == expected


def test_a_group_goes_where_least_is_before_it() -> None:
    """Behind a more urgent group wait many that are less urgent: these delay it nowhere."""
    made = assignment()
    wait(made, 4, "d1", KEY._replace(priority=-1))
    wait(made, 20, "d0", KEY._replace(priority=2), first=4)
    assert choice(made) == "d0"


def test_a_free_place_is_as_good_as_one_that_is_made_free() -> None:
    """Of two cells that can begin at once, the one with less to do gets it, though a more urgent one runs there."""
    made = assignment()
    wait(made, 3, "d1", KEY._replace(priority=-1))
    wait(made, 1, "d0", KEY._replace(priority=2), first=3)
    assert choice(made) == "d0"
    made = assignment()
    wait(made, 3, "d1", KEY._replace(priority=-1))
    wait(made, 8, "d0", KEY._replace(priority=2), first=3)
    assert choice(made) == "d1"


def test_what_waits_does_not_go_to_a_cell_that_loads_longer_than_it_waits() -> None:
    for seconds, moved in ((10.0, False), (0.1, True)):
        made = assignment(cold={"d1": seconds})
        wait(made, 4, "d0", KEY._replace(priority=-1))
        wait(made, 4, "d0", first=4)
        assert made.balance() is moved


def timed(cells: dict[str, int]) -> ServiceTimes:
    """Return times of cells with so many ms per token."""
    times = ServiceTimes()
    for cell, ms in cells.items():
        times.start(cell, 8, 0, cell)
        times.first_token(cell, "m", 1, 8_000_000 * ms)
        times.end(cell, "m", 101, 108_000_000 * ms)
    return times


def test_a_group_goes_to_the_cell_that_ends_it_first() -> None:
    """QL-22: both are idle, and the first is slow."""
    made = assignment(times=timed({"d0": 30, "d1": 10}))
    made._forecasts.groups.add(KEY, (0, 0), Member("s0", 8, 0, 32))
    assert list(waiting(made)) == ["d1"]


def test_a_slow_cell_with_places_left_gets_what_it_ends_sooner() -> None:
    """What waits elsewhere waits longer than a cell that is slower by half takes, not longer than a very slow one."""
    for ms, moves in ((15, True), (1000, False)):
        made = assignment(times=timed({"d0": 10, "d1": ms}))
        wait(made, 12, "d0")
        assert made.balance() == moves


def test_cells_that_are_nearly_as_fast_share_by_their_work() -> None:
    made = assignment(times=timed({"d0": 1000, "d1": 1040}))
    made._forecasts.groups.add(KEY, (0, 0), Member("s0", 8, 0, 32))
    made._forecasts.queues.assign(next(iter(made._forecasts.groups)), "d0")
    assert choice(made) == "d1"
