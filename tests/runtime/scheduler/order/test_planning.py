"""Planned orders in a virtual cluster of models that do not fit together (QL-17, QL-18)."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from runtime.config import ClusterConfig, ControlConfig, OrderConfig
from runtime.control.overload import retry_after
from runtime.control.scheduler_io import PlanSolved, SolvePlan
from runtime.policy.slo.plan.evaluation import evaluate
from runtime.policy.slo.plan.problem import PlanScore
from runtime.scheduler.order.plan_problem import Planning, planning_of
from runtime.scheduler.order.plan_solver import solution_of
from runtime.scheduler.order.planning import Plans, _clearly_less
from tests.runtime.scheduler.residency.test_swapping import Swapping, family
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import request


@dataclass
class Planned(Swapping):
    """A cluster that solves plans in `solving` ns, and keeps what was asked for."""

    solving: int = 10 * MS
    asked: list[SolvePlan] = field(default_factory=list)
    asked_at: list[int] = field(default_factory=list)

    def carry_out(self, commands: Iterable[Any]) -> None:
        rest = []
        for command in commands:
            if isinstance(command, SolvePlan):
                self.asked.append(command)
                self.asked_at.append(self.now)
                found = solution_of(command, rounds=min(command.problem.rounds, 200))
                solved = PlanSolved(command.number, found.plan, found.why, self.solving)
                self.at(self.now + self.solving, lambda solved=solved: self.tell(solved))
            else:
                rest.append(command)
        super().carry_out(rest)


def swapping(
    plan: str = "qlm", limit: int = 6_000, models: int = 3, patience: int = 5, share: float = 0.0, **order: object
) -> Planned:
    """Return a cluster that holds one model of three at a time, and takes 100 ms to load one."""
    settings: dict[str, Any] = {"evict": False, "plan_rounds": 200, "run_floor": 0.0} | order
    config = ClusterConfig(
        residency="swap",
        swap_patience_ms=patience,
        max_num_seqs=2,
        background_share=share,
        control=ControlConfig.off(),
        order=OrderConfig(plan, **settings),  # type: ignore[arg-type]
    )
    made = Planned(
        family(models), cuts=[(3,)] * models, devices=1, limits=[limit], config=config, costs=lambda plan: MS
    )
    made.loading = lambda: 100 * MS
    return made


def interleave(made: Swapping, count: int = 24, slo_ms: int = 60_000, models: int = 3) -> None:
    """Ask for models in turn, with deadlines in the order of arrival."""
    for number in range(count):
        one = request(f"s{number}", (1, 2, 3), f"m{number % models}", max_tokens=4, ignore_eos=True)
        at = (1 + number) * MS
        made.ask(replace(one, arrival=at, slo_ms=slo_ms + number), at=at)


def finished(made: Swapping, until: int = 20_000) -> None:
    made.ticks(10 * MS, until * MS)
    made.run(until=until * MS)
    made.expect()


def plans_of(made: Swapping) -> Plans:
    assert made.scheduler.plans is not None
    return made.scheduler.plans


def test_plan_spares_loads_that_deadlines_alone_cause() -> None:
    loads, times = {}, {}
    for plan in ("edf", "qlm"):
        made = swapping(plan)
        interleave(made)
        finished(made)
        loads[plan] = made.scheduler.residency.counts.loads
        times[plan] = max(event.t for event in made.trace.named("finish"))
    assert loads["qlm"] <= 5 < 2 * loads["qlm"] <= loads["edf"]
    assert 2 * times["qlm"] < times["edf"]


@pytest.mark.parametrize(
    ("plan", "strict", "passes"),
    [("off", False, True), ("edf", False, True), ("fcfs", False, False), ("edf", True, False)],
)
def test_a_strict_order_lets_no_loaded_model_pass(plan: str, strict: bool, passes: bool) -> None:
    """While a model waits for the device, a later request of the one that is there runs, unless the order is strict."""
    made = swapping(plan, strict=strict)
    for number, (model, tokens) in enumerate((("m0", 40), ("m1", 4), ("m0", 4))):
        one = request(f"s{number}", (1, 2, 3), model, max_tokens=tokens, ignore_eos=True)
        made.ask(replace(one, arrival=(1 + number) * MS, slo_ms=60_000), at=(1 + 110 * bool(number) + number) * MS)
    finished(made)
    ends = {event.seq: event.t for event in made.trace.named("finish")}
    assert (ends["s2"] < ends["s1"]) == passes


def test_one_plan_is_asked_for_in_an_episode() -> None:
    made = swapping()
    interleave(made, 9)  # all are there at the first review
    finished(made)
    counters = made.scheduler.state().counters
    assert len(made.asked) == 1
    assert counters.plans_used + counters.plans_rejected == 1
    assert counters.violations_foreseen == 0


def test_one_plan_is_asked_for_though_late_requests_remain() -> None:
    """QL-17: at none of the reviews that follow has anything come that another plan could be for."""
    made, late = swapping(plan_duty=1.0), list[int]()
    made.solving = MS
    for number in range(120):
        one = request(f"s{number}", (1, 2, 3), f"m{number % 3}", max_tokens=50, ignore_eos=True)
        made.ask(replace(one, arrival=MS, slo_ms=2_000), at=MS)
    order, state = made.scheduler.order, made.scheduler._state
    assert order is not None

    def look() -> None:
        found = planning_of(state, order, 0, made.now)
        assert found is not None
        late.append(evaluate(found.problem, found.present).late)

    for at in range(200, 1_500, 100):
        made.at(at * MS, look)
    finished(made)
    assert min(late) > 0
    assert len(made.asked) == 1


def test_solving_takes_its_share_of_the_time_at_most() -> None:
    made = swapping(plan_duty=0.1)
    made.solving = 100 * MS
    for number in range(120):
        one, at = request(f"s{number}", (1, 2, 3), f"m{number % 3}", max_tokens=4, ignore_eos=True), 25 * number * MS
        made.ask(replace(one, arrival=at, slo_ms=300 + number), at=at)
    finished(made)
    gaps = [later - first for first, later in zip(made.asked_at, made.asked_at[1:], strict=False)]
    assert len(gaps) >= 2
    assert min(gaps) >= 100 * MS + 1_000 * MS


def test_a_plan_that_comes_after_its_patience_is_of_no_use() -> None:
    """Another one has been asked for meanwhile; only that one counts."""
    made = swapping()
    made.solving = 61_000 * MS
    interleave(made, 9, slo_ms=260)
    for number in range(9):
        one, at = request(f"t{number}", (1, 2, 3), f"m{number % 3}", max_tokens=40, ignore_eos=True), 60_700 * MS
        made.ask(replace(one, arrival=at, slo_ms=260 + number), at=at)
    made.ticks(10 * MS, 61_100 * MS)
    made.run(until=61_050 * MS)
    counters = made.scheduler.state().counters
    assert [each.number for each in made.asked] == [1, 2]
    assert counters.plans_failed == 1
    assert (counters.plans_used, counters.plans_rejected) == (0, 0), "the first plan has come, and is ignored"
    assert plans_of(made).picture().under_way


def test_a_quick_order_is_followed_for_a_gain_of_a_fiftieth() -> None:
    was = PlanScore(((10, 1_000),), 50)
    for score, less in (
        (PlanScore(((9, 9_000),), 90), True),
        (PlanScore(((10, 979),), 90), True),
        (PlanScore(((10, 981),), 0), False),
        (PlanScore(((10, 1_000),), 48), True),
        (was, False),
        (PlanScore(((11, 0),), 0), False),
    ):
        assert _clearly_less(score, was) == less


def test_a_problem_says_when_what_runs_has_ended() -> None:
    """Its model cannot leave before."""
    made = swapping()
    made.ask(replace(request("long", (1, 2, 3), "m0", max_tokens=60, ignore_eos=True), slo_ms=60_000), at=MS)
    for number in range(8):
        one, at = request(f"s{number}", (1, 2, 3), f"m{1 + number % 2}", max_tokens=4, ignore_eos=True), 108 * MS
        made.ask(replace(one, arrival=at, slo_ms=60_000 + number), at=at)
    seen: list[Planning | None] = []
    scheduler = made.scheduler
    assert scheduler.order is not None
    made.at(115 * MS, lambda: seen.append(planning_of(scheduler._state, scheduler.order, 0, made.now)))
    finished(made)
    assert seen[0] is not None
    queue = seen[0].problem.queues[0]
    assert len(queue.ends) == len(queue.resident) and max(queue.ends) > 0


def test_nothing_is_planned_where_all_models_fit() -> None:
    made = swapping(limit=30_000)
    interleave(made)
    finished(made)
    assert not made.asked
    assert plans_of(made).picture().why == "all waiting models fit together"


def test_late_requests_that_remain_want_more_devices() -> None:
    """QL-23, and the count of foreseen violations."""
    made = swapping()
    interleave(made, slo_ms=260)
    made.ticks(10 * MS, 400 * MS)
    made.run(until=400 * MS)
    assert plans_of(made).scale_up_wanted
    assert made.scheduler.state().counters.violations_foreseen >= 1
    finished(made)


@pytest.mark.parametrize("overload", ["queue", "edf"])
def test_no_order_with_late_requests_is_followed_unless_asked_for(overload: str) -> None:
    """QL-19: by deadline instead, whatever found that order."""
    made, late, whys = swapping(overload=overload), set[bool](), set[str]()
    interleave(made, slo_ms=240)
    plans = plans_of(made)
    for at in range(12, 2_000, 10):
        made.at(at * MS, lambda: late.add(plans._plan is not None and plans._plan.score.late > 0))
        made.at(at * MS, lambda: whys.add(plans.picture().why))
    finished(made)
    assert (True in late) == (overload == "queue")
    assert ("late requests remain: by deadline" in whys) == (overload == "edf")


def test_models_that_take_turns_serve_longer_than_they_load() -> None:
    """QL-13: a residence serves for twice its load time, so requests that arrive one by one share loads."""
    loads = {}
    for floor in (0.0, 2.0):
        made = swapping(run_floor=floor, plan_rounds=0)
        for number in range(30):
            one = request(f"s{number}", (1, 2, 3), f"m{number % 3}", max_tokens=4, ignore_eos=True)
            at = (1 + 30 * number) * MS
            made.ask(replace(one, arrival=at, slo_ms=60_000 - 100 * number), at=at)
        finished(made)
        loads[floor] = made.scheduler.residency.counts.loads
    assert loads[2.0] < loads[0.0]


def test_requests_that_would_be_late_are_refused_if_asked_for() -> None:
    """QL-19: with the time after which to try again."""
    made = swapping(overload="reject")
    interleave(made, slo_ms=100)
    made.run(until=1_000 * MS)
    refused = [told.last.error for told in made.told.values() if told.last.finish == "error"]
    assert refused
    assert all(retry_after(each or "") for each in refused)


def test_a_plan_that_nobody_asked_for_is_ignored() -> None:
    made = swapping()
    interleave(made, 6)
    made.run(until=3 * MS)
    made.tell(PlanSolved(7, None, "none", 5))
    finished(made)
    assert made.scheduler.state().counters.plans_failed == 0


def test_a_failed_plan_leaves_the_quick_order() -> None:
    made = swapping()
    made.solving = 10**15  # it never comes
    interleave(made)
    finished(made)
    assert made.scheduler.residency.counts.loads <= 5


def test_papers_plan_is_followed_where_deadlines_can_be_met() -> None:
    pytest.importorskip("scipy", reason="SKIPPED: scipy is not installed (extra `plan`)")
    made = swapping("paper")
    interleave(made, 12, slo_ms=900)
    finished(made)
    assert [each.method for each in made.asked][:1] == ["paper"]


def test_deciding_is_replayable() -> None:
    """The same events give the same commands: plans come as events."""
    orders = []
    for _ in range(2):
        made = swapping()
        interleave(made)
        finished(made)
        orders.append([(each.seq, each.t) for each in made.trace.named("finish")])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("evict", [True, False])
def test_running_sequences_give_way_to_a_model_that_has_to_be_loaded(evict: bool) -> None:
    """QL-09 and QL-13: `finished` compares the tokens of all with those of undisturbed sequences.

    They do not start again on the model that has to leave, though it would still be there for long by patience.
    """
    made = swapping(evict=evict, patience=2_000)
    for number in range(4):  # how long loads and answers take is learned
        one = request(f"w{number}", (1, 2, 3), f"m{number % 2}", max_tokens=8, ignore_eos=True)
        made.ask(replace(one, arrival=(1 + 200 * number) * MS, slo_ms=60_000), at=(1 + 200 * number) * MS)
    for number in range(2):
        one = request(f"long{number}", (1, 2, 3), "m0", max_tokens=50, ignore_eos=True)
        made.ask(replace(one, arrival=1000 * MS, slo_ms=60_000), at=1000 * MS)
    urgent = request("urgent", (1, 2, 3), "m1", max_tokens=4, ignore_eos=True)
    made.ask(replace(urgent, arrival=1110 * MS, slo_ms=125), at=1110 * MS)
    finished(made)
    counters = made.scheduler.state().counters
    ends = {event.seq: event.t for event in made.trace.named("finish")}
    assert (ends["urgent"] <= 1235 * MS) == evict
    assert counters.evictions == counters.preemptions == 2 * evict
    assert (ends["urgent"] < min(ends["long0"], ends["long1"])) == evict


def test_none_gives_way_to_a_model_that_can_wait_or_is_late_anyway() -> None:
    for slo_ms in (60, 5000):
        made = swapping(evict=True)
        for number in range(4):
            one = request(f"w{number}", (1, 2, 3), f"m{number % 2}", max_tokens=8, ignore_eos=True)
            made.ask(replace(one, arrival=(1 + 200 * number) * MS, slo_ms=60_000), at=(1 + 200 * number) * MS)
        long = request("long", (1, 2, 3), "m0", max_tokens=50, ignore_eos=True)
        made.ask(replace(long, arrival=1000 * MS, slo_ms=60_000), at=1000 * MS)
        urgent = request("urgent", (1, 2, 3), "m1", max_tokens=4, ignore_eos=True)
        made.ask(replace(urgent, arrival=1110 * MS, slo_ms=slo_ms), at=1110 * MS)
        finished(made)
        assert made.scheduler.state().counters.evictions == 0


def scheduled(seed: int) -> int:
    """Play a random schedule of models that come and go; return how often sequences gave way."""
    rng = random.Random(seed)
    made = swapping(evict=True, limit=rng.choice((6_000, 9_000)), models=4, run_floor=rng.choice((0.0, 2.0)))
    made.loading = lambda: rng.randrange(5, 60) * MS
    for number in range(40):
        at, tokens = (1 + rng.randrange(1500)) * MS, rng.randrange(1, 50)
        one = request(f"s{number}", (1, 2, 3), f"m{rng.randrange(4)}", max_tokens=tokens, ignore_eos=True)
        made.ask(replace(one, arrival=at, slo_ms=rng.choice((None, 80, 150, 300, 5000))), at=at)
    for _ in range(rng.choice((0, 0, 2))):
        made.at(rng.randrange(1500) * MS, lambda: made.kill("d0"))
    finished(made, 5_000)
    return made.scheduler.state().counters.evictions


def test_any_schedule_with_models_that_come_and_go_ends_well() -> None:
    """`finished` checks tokens, and that nothing is left."""
    assert sum(map(scheduled, range(8))) > 0


def first_end(plan: str, patience: int, **order: object) -> float:
    """Return when a second model has answered first, in ms, while requests of another one run all the time.

    From 200 ms on, one of its requests comes every 5 ms, each due before those that came earlier.
    """
    made = swapping(plan, models=2, patience=patience, **order)
    for number in range(90):
        answer = 60 if number % 2 else 35  # so that two do not end together, and leave it idle
        one, at = request(f"a{number}", (1, 2, 3), "m0", max_tokens=answer, ignore_eos=True), (1 + 25 * number) * MS
        made.ask(replace(one, arrival=at, slo_ms=600_000), at=at)
    for number in range(200):
        one, at = request(f"b{number}", (1, 2, 3), "m1", max_tokens=2, ignore_eos=True), (200 + 5 * number) * MS
        made.ask(replace(one, arrival=at, slo_ms=60_000 - 100 * number), at=at)
    finished(made)
    return min(event.t / MS for event in made.trace.named("finish") if event.seq.startswith("b"))


def test_a_model_waits_its_patience_whichever_of_its_requests_is_the_first() -> None:
    """QL-13: 100 ms, until those that run have ended, and its load; not 100 ms after the last of its requests."""
    assert 400 < first_end("edf", 100) < 600


def test_a_planned_order_is_followed_at_once_after_the_run_floor() -> None:
    """QL-13: that a model is first is the plan's decision; without a floor it waits as by deadline."""
    assert first_end("qlm", 2_000, run_floor=2.0) < 700
    assert first_end("qlm", 2_000, run_floor=0.0) > 1_500
