"""Planning problems of a virtual cluster: what may run where, and what is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.config import ClusterConfig, ControlConfig, OrderConfig
from runtime.control.scheduler_io import AgentDown, PlanSolved
from runtime.engine.fakes.integer_model import IntegerModel, counting_model
from runtime.scheduler.order import plan_problem
from runtime.scheduler.order.plan_problem import Planning, planning_of
from runtime.scheduler.order.plan_solver import solution_of
from tests.runtime.scheduler.order.test_planning import Planned, finished, interleave, swapping
from tests.runtime.scheduler.residency.test_swapping import family
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import request


def cluster(models: list[IntegerModel], devices: int = 2, limit: int = 6_000) -> Planned:
    """Return a cluster of devices that hold one model each at a time."""
    config = ClusterConfig(
        devices=devices, residency="swap", swap_patience_ms=5, max_num_seqs=2, control=ControlConfig.off(),
        order=OrderConfig("qlm", evict=False, plan_rounds=200, run_floor=0.0),
    )  # fmt: skip
    made = Planned(
        models, cuts=[(3,)] * len(models), devices=devices, limits=[limit] * devices, config=config,
        costs=lambda plan: MS,
    )  # fmt: skip
    made.loading = lambda: 100 * MS
    return made


def planning(made: Planned) -> Planning | None:
    order = made.scheduler.order
    assert order is not None
    return planning_of(made.scheduler._state, order, 0, made.now)


def test_a_cell_that_has_only_the_blocks_that_models_share_runs_none_of_them() -> None:
    """Four fine-tunes of one base, two with their home on each device: groups stay where the rest of them is."""
    made = cluster(family(4))
    interleave(made, 24, models=4)
    made.run(until=30 * MS)
    found = planning(made)
    assert found is not None
    able = [[bool(each) for each in rates.slowness] for rates in found.problem.rates]
    assert able == [[True, False, True, False], [False, True, False, True]]
    seen: list[set[str]] = []
    for at in range(40, 2_000, 20):
        made.at(at * MS, lambda: seen.append({path.device for one in running(made) for path in one.path}))
    made.ticks(10 * MS, 20_000 * MS)
    made.run(until=20_000 * MS)
    made.expect()
    assert {"d0", "d1"} in seen


def test_a_load_under_way_is_counted_once() -> None:
    """What is being loaded leaves when it is there; each later load takes its own time only."""
    made = cluster(family(4))
    interleave(made, 24, models=4)
    made.run(until=30 * MS)
    loads = made.scheduler._state.times.loads
    found = planning(made)
    assert found is not None
    for name, queue, rates in zip(found.cells, found.problem.queues, found.problem.rates, strict=True):
        assert loads.pending(name) > 0, "no load is under way"
        assert queue.ends == (round(1e6 * loads.pending(name)),)
        assert rates.load_us == round(1e6 * loads.fixed(name)) < 1e6 * loads.delay(name)


def running(made: Planned) -> list:  # type: ignore[type-arg]
    return list(made.scheduler._state.running.values())


def test_groups_that_no_living_cell_can_run_are_left_out() -> None:
    """The device of two models dies for good: the groups of other models are planned on."""
    models = [
        counting_model(
            f"m{at}", " ".join(f"{10 * at + part}{'' if part % 2 else '*'}" for part in range(1, 7)), max_model_len=64
        )
        for at in range(4)
    ]
    made = cluster(models)
    made.replace = False
    interleave(made, 24, models=4)
    made.run(until=25 * MS)
    both = planning(made)
    assert both is not None and len(both.cells) == 2
    made.nodes["d1"].alive = False
    made.tell(AgentDown("d1", "gone", final=True))
    found = planning(made)
    assert found is not None and found.cells == ("d0",)
    assert {each.chain for each in found.problem.groups} == {0, 2}
    made.ticks(10 * MS, 5_000 * MS)
    made.run(until=5_000 * MS)
    ends = {seq: told.last.finish for seq, told in made.told.items() if told.events and told.last.finish}
    assert {seq for seq, reason in ends.items() if reason == "length"} >= {f"s{at}" for at in range(0, 24, 2)}


def test_a_problem_has_no_more_requests_than_it_can_count(monkeypatch: pytest.MonkeyPatch) -> None:
    made = cluster(family(4), devices=1)
    interleave(made, 24, models=4)
    made.run(until=30 * MS)
    whole = planning(made)
    monkeypatch.setattr(plan_problem, "MOST_MEMBERS", 9)
    part = planning(made)
    assert whole is not None and part is not None
    sizes = [each.members for each in part.problem.groups]
    assert sum(sizes) <= 9 < sum(each.members for each in whole.problem.groups)
    assert part.problem.groups == whole.problem.groups[: len(sizes)]


def test_a_plan_for_other_cells_is_not_followed() -> None:
    """As many as before, but a device has taken the place of another one."""
    made = cluster(family(4))
    made.solving = 10**15
    interleave(made, 24, models=4)
    made.ticks(10 * MS, 60 * MS)
    made.run(until=60 * MS)
    command, plans = made.asked[0], made.scheduler.plans
    assert plans is not None and planning(made) is not None
    assert planning(made).cells == ("d0", "d1")  # type: ignore[union-attr]
    solved = solution_of(command, rounds=50)
    for cells, outcomes in ((("d0", "d2"), (0, 1)), (("d0", "d1"), (1, 1))):
        plans._since, plans._asked_of = made.now, cells
        made.tell(PlanSolved(command.number, solved.plan, "", 5))
        counters = made.scheduler.state().counters
        assert (counters.plans_used, counters.plans_rejected) == outcomes


def test_requests_that_cannot_be_on_time_any_more_leave_their_planned_group() -> None:
    """A group's deadline is its first member's: with a late one in it, a plan would give up the others, too."""
    made, found = swapping(overload="queue"), list[tuple[bool, bool]]()
    asked = [(f"a{number}", "m0", 40, 1_600, 1) for number in range(60)]
    asked += [(f"c{number}", "m2", 4, 60_000, 1) for number in range(40)]
    for name, model, tokens, slo_ms, at in (*asked, ("urgent", "m1", 200, 700, 20), ("late", "m1", 200, 700, 600)):
        one = request(name, (1, 2, 3), model, max_tokens=tokens, ignore_eos=True)
        made.ask(replace(one, arrival=at * MS, slo_ms=slo_ms), at=at * MS)
    order = made.scheduler.order
    assert order is not None

    def look() -> None:
        group = order.forecasts.groups.group_of("late")
        assert group is not None
        found.append((group.planned, group.key.late))

    for at in (900, 1_500):
        made.at(at * MS, look)
    finished(made)
    assert found == [(True, False), (True, True)]


def test_scenarios_have_the_error_that_forecasts_had_in_common() -> None:
    """At first an assumed one; then what outcomes tell: here all forecasts say half of what it takes."""
    made = cluster(family(4))
    interleave(made, 24, models=4)
    made.run(until=30 * MS)
    order, first = made.scheduler.order, planning(made)
    assert order is not None
    assert first is not None
    assert first.problem.common == round(0.05 * 1024)
    for _ in range(500):
        order.forecasts._common.add(100 * MS, 0.0, 200 * MS)
    second = planning(made)
    assert second is not None
    assert second.problem.common > 200
