"""A planned order of groups in a virtual cluster: what it moves, and what stays by deadline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runtime.config import ClusterConfig, OrderConfig
from runtime.engine.fakes.integer_model import counting_model
from runtime.scheduler.order.deadlines import DeadlineOrder
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1* 2 3* 4", max_model_len=1024)
N = counting_model("n", "1* 2 5* 6", max_model_len=1024)


def cluster() -> VirtualCluster:
    config = ClusterConfig(max_num_seqs=1, order=OrderConfig("qlm", evict=False))
    return VirtualCluster((M, N), devices=1, pages=600, config=config, costs=lambda plan: MS, latency=MS // 100)


def ask(made: VirtualCluster, seq: str, slo_ms: int, model: str = "m", priority: int = 0, at: int = 2 * MS) -> None:
    one = request(seq, range(1, 9), model, max_tokens=10, ignore_eos=True, priority=priority)
    made.ask(replace(one, arrival=at, slo_ms=slo_ms), at=at)


def order_of(made: VirtualCluster) -> DeadlineOrder:
    assert made.scheduler.order is not None
    return made.scheduler.order


def plan(made: VirtualCluster, seqs: Sequence[str]) -> None:
    """Order the groups of these sequences."""
    groups = [order_of(made).forecasts.groups.group_of(seq) for seq in seqs]
    order_of(made).follow({"": [group.id for group in groups if group is not None]})


def ended(made: VirtualCluster) -> list[str]:
    made.ticks(10 * MS, 1200 * MS)
    made.run(until=1200 * MS)
    made.expect()
    return [each.seq for each in made.trace.named("finish")]


def test_groups_run_in_the_planned_order_over_all_models() -> None:
    made = cluster()
    ask(made, "first", 60_000, at=MS)
    for seq, slo, model in (("a", 3000, "m"), ("b", 5000, "n"), ("c", 9000, "m"), ("b2", 5000, "n")):
        ask(made, seq, slo, model)
    made.run(until=5 * MS)
    plan(made, "cba")
    ask(made, "d", 4000, at=7 * MS)  # not planned: before the first planned group of a later deadline
    assert ended(made) == ["first", "d", "c", "b", "b2", "a"]


def test_without_a_plan_deadlines_order_the_same_requests() -> None:
    made = cluster()
    ask(made, "first", 60_000, at=MS)
    for seq, slo, model in (("a", 3000, "m"), ("b", 5000, "n"), ("c", 9000, "m"), ("b2", 5000, "n")):
        ask(made, seq, slo, model)
    ask(made, "d", 4000, at=7 * MS)
    assert ended(made) == ["first", "a", "d", "b", "b2", "c"]


def test_priorities_come_before_a_plan() -> None:
    made = cluster()
    ask(made, "first", 60_000, at=MS)
    ask(made, "low", 3000, priority=1)
    ask(made, "high", 9000)
    made.run(until=5 * MS)
    plan(made, ("low", "high"))
    assert ended(made) == ["first", "high", "low"]


def test_a_planned_sequence_that_is_late_keeps_its_place() -> None:
    """A plan has decided already what becomes of those that are late."""
    orders = {}
    for planned in (False, True):
        made = cluster()
        for number in range(4):
            ask(made, f"warm{number}", 60_000, at=number * 20 * MS)
        ask(made, "first", 60_000, at=100 * MS)
        ask(made, "late", 5, at=102 * MS)
        ask(made, "fine", 45, at=102 * MS)
        made.run(until=105 * MS)
        if planned:
            plan(made, ("late", "fine"))
        orders[planned] = ended(made)[5:]
    assert orders == {False: ["fine", "late"], True: ["late", "fine"]}


def test_a_queue_is_cut_into_groups_from_the_first_request_on() -> None:
    """QL-03: four times the places, until it is known how many requests run on average."""
    made = cluster()
    ask(made, "first", 60_000, at=MS)
    for number in range(10):
        ask(made, f"s{number}", 60_000, at=2 * MS)
    made.run(until=5 * MS)
    assert [len(group) for group in order_of(made).forecasts.groups] == [4, 4, 2]
