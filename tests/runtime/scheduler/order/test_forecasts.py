"""Forecasts of requests in a virtual cluster: close to what happens, with bounds that hold, and shown by group."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from statistics import mean, median

import pytest

from runtime.config import ClusterConfig, OrderConfig, Plan
from runtime.engine.fakes.integer_model import counting_model
from runtime.policy.slo.bounds import OutcomeBounds
from runtime.policy.slo.groups import GroupKey, Member
from runtime.policy.slo.lengths import class_of
from runtime.scheduler.observe.snapshot import picture_of
from runtime.scheduler.order.deadlines import DeadlineOrder
from runtime.scheduler.order.forecasts import ForecastOutcome
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1* 2", vocab_size=3, max_model_len=256)


def cluster(plan: Plan = "edf") -> VirtualCluster:
    config = ClusterConfig(max_num_seqs=4, order=OrderConfig(plan))
    return VirtualCluster((M,), devices=1, pages=200, config=config, costs=lambda plan: MS, latency=MS // 100)


def played(length: Callable[[random.Random], int], waves: int = 8) -> list[ForecastOutcome]:
    """Return the forecasts of requests that arrive in waves, each larger than what the cluster serves meanwhile.

    Their answers end at a length that only the answers tell.
    """
    made, rng = cluster(), random.Random(3)
    for wave in range(waves):
        for number in range(40):
            at = (wave * 250 + number) * MS
            one = request(
                f"s{wave}-{number}", [rng.randrange(3) for _ in range(8)], max_tokens=200, min_tokens=length(rng),
                stop_token_ids=(0, 1, 2), ignore_eos=True,
            )  # fmt: skip
            made.ask(replace(one, arrival=at, slo_ms=60_000), at=at)
    made.ticks(20 * MS, 2500 * MS)
    made.run()
    made.expect()
    order = made.scheduler.order
    assert order is not None and len(order.forecasts.outcomes) == 40 * waves
    return list(order.forecasts.outcomes)


def fit(found: list[ForecastOutcome]) -> float:
    """Return R²: the share of the variance of what happened that the forecasts explain."""
    took = [each.took for each in found]
    middle = mean(took)
    rest = sum((each.took - each.forecast.end) ** 2 for each in found)
    return 1 - rest / sum((each - middle) ** 2 for each in took)


@pytest.mark.parametrize("kind", ["equal", "uniform", "two kinds"])
def test_forecasts_are_close_once_lengths_are_known(kind: str) -> None:
    draws: dict[str, Callable[[random.Random], int]] = {
        "equal": lambda rng: 20,
        "uniform": lambda rng: rng.randrange(9, 33),
        "two kinds": lambda rng: rng.choice((6, 40)),
    }
    found = played(draws[kind])[80:]  # by then, times and lengths have been learned
    assert fit(found) > 0.75
    assert abs(median(each.forecast.end / each.took for each in found) - 1) < 0.1
    within = mean(each.forecast.least <= each.took <= each.forecast.most for each in found)
    assert within > 0.8


def test_what_was_forecast_before_anything_was_known_does_not_widen_bounds() -> None:
    """The first answers are assumed to reach their limit, without variance: they are off by any number of sigmas."""
    found = played(lambda rng: rng.randrange(9, 33))[80:]
    assert mean((each.forecast.most - each.forecast.least) / each.forecast.end for each in found) < 1.5


def test_a_forecast_that_leaves_the_queue_out_is_not_close() -> None:
    """The negative control: the time of the answer alone explains nothing of what requests take."""
    found = played(lambda rng: rng.randrange(9, 33))[80:]
    alone = [
        replace(each, forecast=replace(each.forecast, end=each.forecast.end - each.forecast.wait)) for each in found
    ]
    assert fit(alone) < 0.5 < fit(found)


def test_the_queue_is_shown_by_group() -> None:
    made = cluster("qlm")
    for number in range(12):
        one = request(f"s{number}", (1, 2) * 4, max_tokens=30, ignore_eos=True)
        made.ask(replace(one, arrival=MS, slo_ms=(None, 5000)[number % 2]), at=MS)
    made.ticks(10 * MS, 60 * MS)
    made.run(until=25 * MS)
    queue = picture_of(made.scheduler).queue
    assert queue is not None and (queue.plan, queue.waiting) == ("qlm", 8)
    assert [(group.slo_ms, group.waiting) for group in queue.groups] == [(5000, 2), (None, 6)]
    assert queue.virtual == ({"cell": "d0", "groups": tuple(group.id for group in queue.groups)},)
    soon, later = queue.groups
    assert 0 < soon.first_end <= soon.last_end <= later.last_end and soon.due < later.due
    made.run()
    queue = picture_of(made.scheduler).queue
    assert queue is not None and (queue.waiting, queue.groups) == (0, ())
    assert picture_of(cluster("off").scheduler).queue is None


def test_the_work_of_a_group_follows_outcomes_and_members() -> None:
    """It is kept between them: `work` is asked for all groups at each arrival."""
    order = DeadlineOrder(OrderConfig("qlm"), 4, lambda now, told, took: None)
    answers, forecasts = class_of("m", 10, 50), order.forecasts
    forecasts.groups.add(GroupKey(0, None, answers, "m@1"), (0, 0), Member("a", 10, 0, 50))
    group = next(iter(forecasts.groups))
    found = [forecasts.work(group)]
    times, lengths = order._times, order.lengths
    for act in (
        lambda: times.start("s", 10, 0) or times.first_token("s", "m", 1, 5_000 * MS),
        lambda: times.sample("s", "m", 9, 6_000 * MS),
        lambda: lengths.add(answers, 7),
        lambda: forecasts.groups.add(GroupKey(0, None, answers, "m@1"), (0, 1), Member("b", 90, 0, 50)),
        lambda: forecasts.groups.remove("b"),
    ):
        act()
        found.append(forecasts.work(group))
        assert forecasts.work(group) is found[-1]
        assert found[-1] != found[-2]
    assert found[5] == found[3]


def test_lengths_are_those_of_all_that_began_not_only_of_those_that_ended() -> None:
    """When half of the requests have ended, these are the short ones; what still runs is longer."""
    told, true = [], []
    for seed in range(6):
        made, rng = cluster(), random.Random(seed)
        lengths = [rng.choice((6, 6, 6, 90)) for _ in range(60)]
        for number, length in enumerate(lengths):
            one = request(
                f"s{number}", [rng.randrange(3) for _ in range(8)], max_tokens=200, min_tokens=length,
                stop_token_ids=(0, 1, 2), ignore_eos=True,
            )  # fmt: skip
            made.ask(replace(one, arrival=MS, slo_ms=60_000), at=MS)
        made.ticks(10 * MS, 130 * MS)
        made.run(until=120 * MS)
        order = made.scheduler.order
        assert order is not None
        told.append(order.lengths.expected(class_of("m", 8, 200), 0, 200))
        true.append(mean(lengths))
    assert mean(told) == pytest.approx(mean(true), rel=0.12)


def test_bounds_hold_where_the_speed_is_off_for_many_requests_alike() -> None:
    """The variances of lengths say nothing of that: here all answers are equally long."""
    made, rng = cluster(), random.Random(4)
    speed = [1.0]
    made.costs = lambda plan: int(MS * speed[0])
    for wave in range(40):
        made.at(wave * 300 * MS, lambda: speed.__setitem__(0, 1 + rng.uniform(-0.25, 0.25)))
        for number in range(30):
            at = (wave * 300 + 1) * MS
            one = request(f"s{wave}-{number}", (1, 2) * 4, max_tokens=20, ignore_eos=True)
            made.ask(replace(one, arrival=at, slo_ms=60_000), at=at)
    made.ticks(20 * MS, 12_100 * MS)
    made.run()
    order = made.scheduler.order
    assert order is not None
    found = list(order.forecasts.outcomes)[300:]
    within = mean(each.forecast.least <= each.took <= each.forecast.most for each in found)
    assert within > 0.9
    assert mean(each.forecast.unit / each.forecast.end for each in found) > 2 * mean(
        each.forecast.sigma / each.forecast.end for each in found
    )


def test_outcomes_of_requests_that_wait_together_count_by_the_time_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares, add = list[float](), OutcomeBounds.add

    def noted(bounds: OutcomeBounds, score: float, within: bool, independence: float = 1.0) -> None:
        shares.append(independence)
        add(bounds, score, within, independence)

    monkeypatch.setattr(OutcomeBounds, "add", noted)
    found = played(lambda rng: rng.randint(10, 20))
    ends = sorted(each.arrived + each.took for each in found)
    waits = mean(each.took for each in found)
    assert 0.3 < sum(shares) / ((ends[-1] - ends[0]) / waits) < 3, "about one for each wait that the run is long"
    assert max(shares) <= 1 and sum(shares) < len(shares) / 5
