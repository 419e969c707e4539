"""Short answers first among equals in a virtual cluster (`short_first_ms`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.config import ClusterConfig, OrderConfig, Plan
from tests.runtime.scheduler.order.test_deadlines import M, ask, ends, learned
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request


def cluster(plan: Plan, limit: int) -> VirtualCluster:
    order = OrderConfig(plan, short_first_ms=limit, cap_batches=False, evict=False)
    config = ClusterConfig(max_num_seqs=1, order=order)
    return VirtualCluster((M,), devices=1, pages=600, config=config, costs=lambda plan: MS, latency=MS // 100)


@pytest.mark.parametrize("plan", ["edf", "qlm"])
@pytest.mark.parametrize(("limit", "first"), [(0, "long"), (5_000, "short"), (20, "long")])
def test_short_answers_go_before_earlier_long_ones(plan: Plan, limit: int, first: str) -> None:
    """With a limit of 20 ms they came too long after them."""
    made = cluster(plan, limit)
    learned(made)
    ask(made, "running", 100, 200 * MS)
    ask(made, "long", 200, 210 * MS, 10_000)
    ask(made, "short", 4, 260 * MS, 10_000)
    found = ends(made)
    assert min(("long", "short"), key=found.__getitem__) == first


def test_other_objectives_and_priorities_are_no_equals() -> None:
    made = cluster("qlm", 5_000)
    learned(made)
    ask(made, "running", 100, 200 * MS)
    ask(made, "long", 200, 210 * MS, 9_000)
    ask(made, "short", 4, 260 * MS, 10_000)
    one = request("urgent", range(1, 9), max_tokens=150, ignore_eos=True, priority=-1)
    made.ask(replace(one, arrival=270 * MS, slo_ms=10_000), at=270 * MS)
    found = ends(made)
    assert found["urgent"] < found["long"] < found["short"]


def test_a_limit_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="short_first_ms is at least 0"):
        OrderConfig("qlm", short_first_ms=-1)
