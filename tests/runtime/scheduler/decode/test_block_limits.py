"""Batch limits per block instance (BL-14), with slots kept for sequences expected back (BL-22), change no token."""

from __future__ import annotations

import random

import pytest

from runtime.agent.steps import round_trips
from runtime.config import ClusterConfig
from runtime.engine.fakes.integer_model import counting_model
from runtime.policy.profiles import BlockProfile, DeviceProfile, Grid, Line
from runtime.policy.routing.variants import DispatchLimits
from runtime.scheduler.admission.variant_choice import VariantChoice
from runtime.types import StepPlan
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

A = counting_model("a", "1 2* 3 4*")
B = counting_model("b", "11 2* 3 4*")
#: Their second block is the same.
CUT = (1,)


def batches(block_rows: int, moves: int = 0) -> tuple[VirtualCluster, dict[str, int]]:
    """Run two models that share a block on two devices.

    Returns the cluster, and the most rows of a step by the first block of the rows' stages.
    """
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
    # Each model's own first block takes two rows, and the shared block takes two of both models together.
    assert limited["1"] <= 2 < free["1"] and limited["0"] <= 4 < free["0"]


def test_nobody_is_expected_back_for_ever() -> None:
    """No slot is kept any more for a sequence that has moved, within a device too, or ended."""
    cluster, _ = batches(2, moves=60)
    assert cluster.scheduler.migrations.counts().committed > 3
    assert [len(node.agent._round_trips.expected()) for node in cluster.living()] == [0, 0]


def entered_beside_running() -> int:
    """Return the steps of the shared block in which a new row ran beside one of two running sequences.

    The second of these runs half a round trip behind the first, so that one is expected back while the other is
    here. The block takes two rows.
    """
    seen = 0

    def costs(plan: StepPlan) -> int:
        nonlocal seen
        rows = [row for row in plan.rows if "[1:" in row.model]
        running = any(row.seq.startswith("running") for row in rows)
        seen += running and any(row.seq.startswith("new") and row.start == 0 for row in rows)
        return MS

    config = ClusterConfig(devices=2, placement="partition", max_batch_per_block=2)
    cluster = VirtualCluster([A, B], [CUT, CUT], devices=2, config=config, costs=costs)
    cluster.ask(request("running", (1, 2), "a", max_tokens=60))
    cluster.ask(request("running too", (2, 1), "b", max_tokens=60), at=3 * MS // 2)
    cluster.ask(*(request(f"new{at}", (at, 1), "ab"[at % 2], max_tokens=1) for at in range(6)), at=30 * MS)
    cluster.run()
    cluster.expect()
    return seen


def test_a_slot_is_kept_for_a_sequence_that_is_expected_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert entered_beside_running() == 0
    monkeypatch.setattr(round_trips, "countdown", lambda now, round_trip, slack: now)  # ends at once
    assert entered_beside_running() > 0


def profiled(cluster_pages: int, batch_gain: float) -> tuple[VirtualCluster, dict[str, int]]:
    """Run one model. By their profiles its first block gains from eight rows at most, the second from four.

    Returns the cluster, and the most rows of a step by the first component of the rows' stages.
    """
    most: dict[str, int] = {}

    def costs(plan: StepPlan) -> int:
        for row in plan.rows:
            at = row.model.partition("[")[2].partition(":")[0]
            most[at] = max(most.get(at, 0), sum(other.model == row.model for other in plan.rows))
        return MS

    first, second = (use.block for use in A.chain(*CUT).uses)
    chunks = Line((1, 64), (0.001, 0.002))
    knees = (Grid((1, 8, 64), (64,), ((0.01,), (0.01,), (0.08,))), Grid((1, 4, 64), (64,), ((0.01,), (0.01,), (0.16,))))
    profiles = [BlockProfile(name, 1, knee, chunks, 0.0) for name, knee in zip((first, second), knees, strict=True)]
    config = ClusterConfig(devices=2, placement="partition", batch_gain=batch_gain)
    adaptation = VariantChoice((), DispatchLimits(), DeviceProfile("d", tuple(profiles), ()))
    cluster = VirtualCluster(
        [A], [CUT], devices=2, config=config, costs=costs, adaptation=adaptation, pages=cluster_pages
    )
    cluster.ask(*(request(f"s{at}", range(at % 5 + 1), "a", max_tokens=20) for at in range(12)))
    cluster.run()
    cluster.expect()
    return cluster, most


def test_a_block_takes_as_many_rows_as_its_profile_says() -> None:
    _, limited = profiled(10_000, batch_gain=0.1)
    assert limited == {"0": 8, "1": 4}, "two instances of one chain have different batches"
    _, free = profiled(10_000, batch_gain=0.0)
    assert free["0"] > 8 and free["1"] > 4


def test_a_block_takes_no_more_rows_than_memory_holds() -> None:
    width = A.spec.page_tokens
    _, limited = profiled(3 * A.spec.kv_layers * -(-256 // width), batch_gain=0.1)
    assert limited["1"] == 3, "three rows of 256 tokens, where the profile says four"
