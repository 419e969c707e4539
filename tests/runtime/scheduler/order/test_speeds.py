"""Cells of different speed in a virtual cluster: plans tell them apart (QL-22), and begun groups stay (QL-12)."""

from __future__ import annotations

from dataclasses import replace

from runtime.config import ClusterConfig, ControlConfig, OrderConfig
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.policy.slo.plan.annealing import solve
from runtime.policy.slo.plan.problem import SAME_SPEED
from runtime.scheduler.order.plan_problem import Planning, planning_of
from tests.runtime.scheduler.order.test_planning import Planned, finished
from tests.runtime.scheduler.residency.test_swapping import family
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import request

#: How many times as long a step takes on the device d1.
SLOW = 4


class Mixed(Planned):
    """Device d1 is slow, or has `few` pages instead."""

    few: int = 0

    def _counting(self, name: str) -> IntegerEngine:
        pages, alpha = self.pages, MS
        if name == "d1":
            pages, alpha = (self.few, MS) if self.few else (pages, SLOW * MS)
        return IntegerEngine(self.models, pages, device=name, alpha=alpha, beta=0)


def cluster(models: int = 4, residency: str = "swap", **order: object) -> Mixed:
    """Return two devices that hold one model each at a time, and may each run all of them."""
    settings: dict[str, object] = {"evict": False, "plan_rounds": 200, "run_floor": 0.0} | order
    config = ClusterConfig(
        devices=2, residency=residency, swap_patience_ms=5, max_num_seqs=2, control=ControlConfig.off(),
        placement="replicate", order=OrderConfig("qlm", **settings),  # type: ignore[arg-type]
    )  # fmt: skip
    swaps = residency == "swap"
    made = Mixed(
        family(models), cuts=[(3,)] * models, devices=2, limits=[6_000 if swaps else 60_000] * 2, config=config
    )
    made.loading = lambda: 20 * MS
    if swaps:
        made.at(2 * MS, lambda: share(made))
    return made


def share(made: Mixed) -> None:
    """Let both devices be home to all models."""
    state = made.scheduler._state
    for block in list(state.block_map.instances):
        for name in ("d0", "d1"):
            state.block_map.add(block, name)


def ask(made: Mixed, seq: str, model: int, at: int, tokens: int = 8, slo_ms: int = 60_000) -> None:
    one = request(seq, (1, 2, 3), f"m{model}", max_tokens=tokens, ignore_eos=True)
    made.ask(replace(one, arrival=at, slo_ms=slo_ms), at=at)


def warm(made: Mixed, models: int = 4) -> None:
    """Let each cell run the even or odd models, and the first one both: then their paces are known."""
    for number in range(6 * models):
        ask(made, f"w{number}", number % models, (5 + 20 * number) * MS, slo_ms=50_000 + number)


def planning(made: Mixed) -> Planning | None:
    order = made.scheduler.order
    assert order is not None
    return planning_of(made.scheduler._state, order, 400, made.now)


def burst(made: Mixed, count: int = 60, models: int = 4) -> None:
    for number in range(count):
        ask(made, f"s{number}", number % models, 1000 * MS, slo_ms=60_000 + 1000 * (number % 20))


def test_a_plan_gives_a_slow_cell_less() -> None:
    """QL-22: as measured there. Taken as equally fast it would get as much."""
    shares = {}
    for speeds in (True, False):
        made, found = cluster(speeds=speeds), list[Planning | None]()
        warm(made)
        burst(made)
        made.at(1001 * MS, lambda made=made, found=found: found.append(planning(made)))  # type: ignore[misc]
        made.ticks(10 * MS, 1002 * MS)
        made.run(until=1002 * MS)
        assert found[0] is not None
        problem = found[0].problem
        assert found[0].cells == ("d0", "d1")
        fast, slow = (each.slowness for each in problem.rates)
        assert min(fast) > 0 and min(slow) > 0, "both may run all models"
        plan, members = solve(problem), {each.id: each.members for each in problem.groups}
        given = [sum(members[name] for name in some) for some in plan.orders]
        shares[speeds] = given[1] / sum(given)
        if speeds:
            assert all(later > 2 * first for first, later in zip(fast, slow, strict=True))
        else:
            assert set(fast) == set(slow) == {SAME_SPEED}
    assert 0 < shares[True] < 0.3 < shares[False]


def test_a_plan_gives_a_cell_with_few_pages_less() -> None:
    """QL-22: as fast, but one request runs there at a time instead of two."""
    made, found = cluster(), list[Planning | None]()
    made.few = 4
    warm(made)
    burst(made)
    made.at(1100 * MS, lambda: found.append(planning(made)))
    made.ticks(10 * MS, 1101 * MS)
    made.run(until=1101 * MS)
    assert found[0] is not None
    problem = found[0].problem
    large, small = problem.rates
    assert small.drains == tuple(2 * each for each in small.slowness) and not large.drains
    plan, members = solve(problem), {each.id: each.members for each in problem.groups}
    given = [sum(members[name] for name in some) for some in plan.orders]
    assert given[1] < 0.4 * sum(given)


def test_a_burst_ends_sooner_where_speeds_are_told_apart() -> None:
    """End to end, with plans that are followed."""
    last = {}
    for speeds in (True, False):
        made = cluster(speeds=speeds)
        warm(made)
        burst(made)
        finished(made)
        last[speeds] = max(event.t for event in made.trace.named("finish")) - 1000 * MS
    assert last[True] < 0.9 * last[False]


def test_a_group_that_has_begun_is_not_moved_by_a_plan() -> None:
    """QL-12: in no plan of any moment, though the other cell is free sooner."""
    made, seen = cluster(), 0

    def look() -> None:
        nonlocal seen
        found = planning(made)
        if found is None:
            return
        groups = made.scheduler.order.forecasts.groups  # type: ignore[union-attr]
        begun = {each.id: each.cell for each in groups.waiting() if each.started}
        plan = solve(found.problem)
        where = {name: cell for cell, some in zip(found.cells, plan.orders, strict=True) for name in some}
        assert {name: where[name] for name in begun if name in where} == {
            name: cell for name, cell in begun.items() if name in where
        }
        seen += len(begun)

    warm(made)
    burst(made)
    for at in range(1010, 1600, 10):
        made.at(at * MS, look)
    finished(made)
    assert seen > 10


def test_groups_are_assigned_by_the_speed_of_cells() -> None:
    """Models that fit together, so that nothing is planned: a forecast tells which cell will have served a group."""
    given, errors = {}, {}
    for speeds in (True, False):
        made, where = cluster(residency="fixed", speeds=speeds), dict[str, str]()
        for number in range(40):  # more than one cell has places for: both are known
            ask(made, f"w{number}", number % 4, 5 * MS, slo_ms=50_000 + number)
        for number in range(40):
            ask(made, f"s{number}", number % 4, (1000 + number) * MS, tokens=20, slo_ms=60_000 + number)

        def look(made: Mixed = made, where: dict[str, str] = where) -> None:
            forecasts = made.scheduler.order.forecasts  # type: ignore[union-attr]
            where.update((seq, forecasts.cell(each)) for seq, each in made.scheduler.sequences.items())

        made.at(1041 * MS, look)
        finished(made)
        given[speeds] = sum(cell == "d1" for cell in where.values()) / len(where)
        forecasts = made.scheduler.order.forecasts  # type: ignore[union-attr]
        outcomes = [each for each in forecasts.outcomes if each.seq in where]
        errors[speeds] = sum(abs(each.forecast.end - each.took) for each in outcomes) / sum(
            each.took for each in outcomes
        )
    assert given[True] < 0.4 < given[False], given
    assert errors[True] < 0.75 * errors[False], errors
