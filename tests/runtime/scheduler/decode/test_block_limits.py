"""Block instances with a batch limit of their own (BL-14), of which slots are kept for who is expected back (BL-22): no
token changes.
"""

from __future__ import annotations

import random

from runtime.config import ClusterConfig
from runtime.engine.fakes.integer_model import counting_model
from runtime.types import StepPlan
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

A = counting_model("a", "1 2* 3 4*")
B = counting_model("b", "11 2* 3 4*")
#: Their second block is the same.
CUT = (1,)


def batches(block_rows: int, moves: int = 0) -> tuple[VirtualCluster, dict[str, int]]:
    """Two models with a block in common on two devices; the most rows of a step, by where their stages begin."""
    most: dict[str, int] = {}

    def costs(plan: StepPlan) -> int:
        for lo in ("0", "1"):
            rows = sum(f"[{lo}:" in row.model for row in plan.rows)
            most[lo] = max(most.get(lo, 0), rows)
        return MS

    config = ClusterConfig(devices=2, placement="partition", max_batch_per_block=block_rows)
    cluster = VirtualCluster([A, B], [CUT, CUT], devices=2, config=config, costs=costs)
    rng = random.Random(1)
    cluster.ask(*(request(f"s{at}", range(at % 5 + 1), "ab"[at % 2], max_tokens=20) for at in range(12)))
    for _ in range(moves):
        cluster.at(rng.randrange(60 * MS), lambda: cluster.migrate_some(rng) and None)
    cluster.run()
    cluster.expect()
    return cluster, most


def test_no_step_takes_more_rows_through_a_block_than_it_may() -> None:
    _, limited = batches(2)
    _, free = batches(0)
    # Each model's own first block takes two; the one in common two of both together, without a limit of more than
    # either's own.
    assert limited["1"] <= 2 < free["1"] and limited["0"] <= 4 < free["0"]


def test_nobody_is_expected_back_for_ever() -> None:
    """Whoever has moved, within a device too, or ended: no slot is kept for it any more."""
    cluster, _ = batches(2, moves=60)
    assert cluster.scheduler.migrations.counts().committed > 3
    assert [len(node.agent._returns.expected()) for node in cluster.living()] == [0, 0]
