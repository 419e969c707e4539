"""One model at a time in each cell (`exclusive`, QL-13 as in the paper), beside models that share a device."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from runtime.config import ClusterConfig, ControlConfig, OrderConfig
from runtime.engine.fakes.integer_model import counting_model
from runtime.scheduler.order.plan_problem import planning_of
from tests.runtime.scheduler.order.test_planning import Planned, finished, interleave, swapping
from tests.runtime.scheduler.residency.test_swapping import Swapping
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import request

#: Room for the parts that all models share, and the own parts of two of them.
TWO = 9_000


def ask(made: Swapping, seq: str, model: str, tokens: int, at: int, slo_ms: int = 60_000) -> None:
    one = request(seq, (1, 2, 3), model, max_tokens=tokens, ignore_eos=True)
    made.ask(replace(one, arrival=at * MS, slo_ms=slo_ms), at=at * MS)


def learn(made: Swapping) -> None:
    """Let the scheduler learn how long loads and answers take."""
    for number in range(4):
        ask(made, f"w{number}", f"m{number % 2}", 8, 1 + 300 * number)


def ends(made: Swapping) -> dict[str, int]:
    return {event.seq: event.t for event in made.trace.named("finish")}


@pytest.mark.parametrize(("exclusive", "most"), [(True, 6_000), (False, TWO)])
def test_a_model_leaves_though_there_is_room_for_two(exclusive: bool, most: int) -> None:
    made = swapping(limit=TWO, exclusive=exclusive, evict=True)
    interleave(made)
    finished(made)
    assert max(made.most.values()) == most


@pytest.mark.parametrize("exclusive", [True, False])
def test_models_that_fit_together_are_planned_as_if_they_did_not(exclusive: bool) -> None:
    made = swapping(limit=TWO, models=2, exclusive=exclusive)
    interleave(made, models=2)
    made.run(until=30 * MS)
    state, order = made.scheduler._state, made.scheduler.order
    assert order is not None
    found = planning_of(state, order, 0, made.now)
    assert [queue.exclusive for queue in found.problem.queues] == [True] if found is not None else not exclusive


@pytest.mark.parametrize("exclusive", [True, False])
def test_what_runs_gives_way_to_the_head_of_the_queue(exclusive: bool) -> None:
    """Though it would be on time by waiting; `finished` compares all tokens with those of undisturbed sequences."""
    made = swapping(exclusive=exclusive, evict=True)
    learn(made)
    ask(made, "long", "m0", 60, 1500)
    ask(made, "first", "m1", 4, 1620, slo_ms=20_000)
    finished(made)
    assert (ends(made)["first"] < ends(made)["long"]) == exclusive
    assert made.scheduler.state().counters.evictions == int(exclusive)


def test_what_is_ahead_of_the_head_ends_first() -> None:
    made = swapping(limit=TWO, exclusive=True, evict=True)
    learn(made)
    ask(made, "long", "m0", 60, 1500, slo_ms=10_000)
    ask(made, "second", "m1", 4, 1620)
    ask(made, "third", "m0", 4, 1630)
    finished(made)
    found = ends(made)
    assert found["long"] < found["second"] < found["third"]
    assert made.scheduler.state().counters.evictions == 0


def test_the_run_floor_keeps_models_from_taking_turns() -> None:
    """While it holds, later requests of the model that is there run; without it each one that is ahead has a load."""
    loads = {}
    for floor in (0.0, 20.0):
        made = swapping(limit=TWO, exclusive=True, evict=True, run_floor=floor, cap_batches=False, plan_rounds=0)
        learn(made)
        for number in range(12):
            ask(made, f"s{number}", f"m{number % 2}", 50, 1500 + 30 * number, slo_ms=60_000 - 1000 * number)
        finished(made)
        loads[floor] = made.scheduler.residency.counts.loads
    assert loads[20.0] < loads[0.0]


@pytest.mark.parametrize("seed", range(3))
def test_a_cell_of_two_devices_has_one_model_at_a_time(seed: int) -> None:
    """The large model lies on both devices, and small ones on either."""
    rng = random.Random(seed)
    own = [counting_model(f"m{at}", f"{at + 10}* {at + 50} {at + 90}*", max_model_len=64) for at in range(4)]
    models = [counting_model("big", " ".join(f"{n}*" for n in range(200, 209)), max_model_len=64), *own]
    config = ClusterConfig(
        devices=2, residency="swap", swap_patience_ms=5, max_num_seqs=2, control=ControlConfig.off(),
        order=OrderConfig("qlm", exclusive=True, plan_rounds=0, run_floor=rng.choice((0.0, 2.0))),
    )  # fmt: skip
    made = Planned(models, [(3, 6), *[(1,)] * 4], devices=2, limits=[6_000] * 2, config=config, costs=lambda plan: MS)
    made.loading = lambda: rng.randrange(5, 60) * MS
    seen: set[frozenset[str]] = set()

    def look() -> None:
        stages = [each.stages for each in made.scheduler.devices]
        seen.add(frozenset(stage.model for each in stages for stage in (*each.loaded, *each.loading)))

    for number in range(30):
        ask(made, f"s{number}", rng.choice(["big", "m0", "m1", "m2", "m3"]), rng.randrange(1, 40), 1 + 20 * number)
    for at in range(0, 4000, 2):
        made.at(at * MS, look)
    finished(made)
    assert max(map(len, seen)) == 1 and len(seen) > 3
