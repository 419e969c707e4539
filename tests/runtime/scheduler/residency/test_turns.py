"""Models that do not fit together serve in turns (`turn_ms`, after Aegaeon)."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from runtime.config import ClusterConfig, ControlConfig, OrderConfig
from tests.runtime.scheduler.order.test_planning import Planned, finished, swapping
from tests.runtime.scheduler.residency.test_swapping import Swapping, family
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import request

#: Time of a load, in ms.
LOAD = 100


def cluster(turn_ms: int, **order: float) -> Planned:
    """Return a cluster that holds one model of three, with places for two requests, and makes a token in 1 ms."""
    return swapping("qlm", 6_000, 3, 400 if turn_ms else 5, evict=True, turn_ms=turn_ms, **order)


def ask(
    made: Swapping, seq: str, model: str, tokens: int, at: int, slo_ms: int | None = 60_000, priority: int = 0
) -> None:
    one = request(seq, (1, 2, 3), model, max_tokens=tokens, ignore_eos=True)
    made.ask(replace(one, arrival=at * MS, slo_ms=slo_ms, priority=priority), at=at * MS)


def ask_all(made: Swapping, models: int = 3, each: int = 12, tokens: int = 50) -> None:
    """Ask each model for far more than it can answer in a turn, all at the same time."""
    for number in range(models * each):
        ask(made, f"s{number}", f"m{number // each}", tokens, 1 + number)


def changes(made: Swapping) -> list[tuple[int, str]]:
    """Return the models that left their device, with the times in ms."""
    return [(event.t // MS, event.extra["stage"][:2]) for event in made.trace.named("stage.unload")]


def first_tokens(made: Swapping) -> dict[str, int]:
    """Return the time in ms of each sequence's first token."""
    found: dict[str, int] = {}
    for event in made.trace.named("token"):
        found.setdefault(str(event.seq), event.t // MS)
    return found


def ends(made: Swapping) -> dict[str, int]:
    return {str(event.seq): event.t // MS for event in made.trace.named("finish")}


def test_models_serve_in_turns_in_the_midst_of_their_answers() -> None:
    """Without turns a model answers all that it was asked first. `finished` compares all tokens."""
    made, without = cluster(turn_ms=80), cluster(turn_ms=0)
    for each in (made, without):
        ask_all(each)
        finished(each)
    counts, before = made.scheduler.state().counters, without.scheduler.state().counters
    assert counts.evictions >= 12 and before.evictions == 0
    assert max(first_tokens(made)[f"s{12 * model}"] for model in range(3)) < 3 * (LOAD + 80) + 50
    assert first_tokens(without)["s24"] > 2 * (LOAD + 300)


def test_the_model_with_the_oldest_turn_comes_next_and_each_has_its_whole_turn() -> None:
    made = cluster(turn_ms=80)
    ask_all(made)
    finished(made)
    left = changes(made)
    assert [model for _, model in left[:12]] == ["m0", "m1", "m2"] * 4
    spans = [after - before for (before, _), (after, _) in pairwise(left[:12])]
    assert all(LOAD + 80 <= span <= LOAD + 80 + 12 for span in spans), spans  # a tick is 10 ms


def test_a_turn_is_no_shorter_than_the_run_floor() -> None:
    made = cluster(turn_ms=20, run_floor=3.0)
    ask_all(made, each=30)
    finished(made)
    left = [at for at, _ in changes(made)][:4]
    assert min(after - before for before, after in pairwise(left)) >= LOAD + 3 * LOAD
    assert made.scheduler.state().counters.evictions > 0


def test_a_model_that_no_other_waits_for_keeps_its_device() -> None:
    made = cluster(turn_ms=40)
    ask_all(made, models=1)
    finished(made)
    assert not changes(made) and made.scheduler.state().counters.evictions == 0


@pytest.mark.parametrize("priority", [0, 1])
def test_what_is_more_important_is_not_taken_off(priority: int) -> None:
    """Lower numbers go first: what waits with a greater one waits for the end of what runs."""
    made = cluster(turn_ms=40)
    ask(made, "long", "m0", 60, 1)
    ask(made, "second", "m1", 4, 5, priority=priority)
    finished(made)
    found = ends(made)
    assert (found["second"] < found["long"]) == (priority == 0)


@pytest.mark.parametrize("slo_ms", [250, None])
def test_deadlines_do_not_shorten_turns(slo_ms: int | None) -> None:
    made = cluster(turn_ms=120)
    ask_all(made, models=1, tokens=60)
    ask(made, "urgent", "m1", 4, 150, slo_ms=slo_ms)
    finished(made)
    assert changes(made)[0][0] >= LOAD + 120


def test_what_gave_way_does_not_start_again_before_its_next_turn() -> None:
    """Though its deadline is near, and that of the model in turn far: models that drain fill up without turns."""
    made = cluster(turn_ms=40)
    ask(made, "far", "m1", 30, 50, slo_ms=None)
    for number in range(12):
        ask(made, f"near{number}", "m0", 60, 1 + number, slo_ms=310)
    finished(made)
    preempted = [event.t for event in made.trace.named("batch.preempt")]
    left = [event.t for event in made.trace.named("stage.unload")]
    assert left and preempted and left[0] - preempted[0] <= 2 * MS
    assert made.scheduler.plans is None, "turns take the place of plans"


@pytest.mark.parametrize("seed", range(6))
def test_no_order_of_arrivals_and_ends_stops_the_round(seed: int) -> None:
    """Two devices, chains over both and on one of them, aborts, priorities, K and V swapped or computed again."""
    rng = random.Random(seed)
    models = family(5)
    config = ClusterConfig(
        devices=2, residency="swap", swap_patience_ms=5, max_num_seqs=rng.choice((2, 4)), control=ControlConfig.off(),
        placement="partition", preemption_mode=rng.choice(("swap", "recompute", "auto")),
        order=OrderConfig("qlm", turn_ms=rng.choice((10, 60)), run_floor=rng.choice((0.0, 0.5))),
    )  # fmt: skip
    made = Planned(models, [(3,)] * 5, devices=2, limits=[6_000] * 2, config=config, costs=lambda plan: MS)
    made.loading = lambda: rng.randrange(5, 60) * MS
    for number in range(40):
        at = 1 + rng.randrange(300)
        ask(made, f"s{number}", f"m{rng.randrange(5)}", rng.randrange(1, 50), at, rng.choice((None, 500)), number % 2)
    gone = [f"s{number}" for number in range(0, 40, 7)]
    for seq in gone:
        made.abort(seq, at=rng.randrange(300, 2_000) * MS)
    made.ticks(10 * MS, 60_000 * MS)
    made.run(until=60_000 * MS)
    for seq in gone:
        made.requests.pop(seq)
    made.expect()
    assert made.scheduler.state().counters.evictions > 0


@pytest.mark.parametrize("order", [{"evict": False}, {"exclusive": True}])
def test_turns_need_sequences_that_give_way(order: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match="turn_ms"):
        OrderConfig("qlm", turn_ms=100, **order)  # type: ignore[arg-type]


def test_a_turn_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="turn_ms is at least 0"):
        OrderConfig("qlm", turn_ms=-1)


def test_without_a_plan_there_are_no_turns() -> None:
    """As in a server that reads `turn_ms` from a file, and has no `--plan`."""
    assert not OrderConfig("edf", turn_ms=100).takes_turns and OrderConfig("qlm", turn_ms=100).takes_turns
