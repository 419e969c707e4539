"""Real models give transformers' own tokens while blocks are scaled, rearranged and balanced.

`controllers/test_autoscaler.py`, `test_locality.py` and `test_balancing.py` prove the same with counting engines;
the negative controls of these tests are there.
"""

from __future__ import annotations

import random

import pytest

from runtime.config import ClusterConfig, ControlConfig, Rebalancing
from tests.runtime.engine.conftest import Bench, bench  # noqa: F401
from tests.runtime.scheduler.real_models.test_chains import answers, ask, cluster_of, family, tokens  # noqa: F401
from tests.runtime.scheduler.virtual_cluster import MS

QUICK = dict(interval_ms=5, cooldown_ms=30, idle_ms=30, rearrange_interval_ms=1_000_000, migration_timeout_ms=400)


@pytest.mark.parametrize("seed", range(2))
def test_blocks_are_scaled_up_and_down_again(family: Bench, answers: dict[str, list[int]], seed: int) -> None:  # noqa: F811
    """A block on a full device gets another instance, sequences move there, and later it leaves."""
    config = ClusterConfig(devices=4, placement="partition", control=ControlConfig(rearranging=False, **QUICK))  # type: ignore[arg-type]
    cluster = cluster_of(family, 4, pages=60, config=config, page_bytes_per_ms=1e5)
    ask(cluster, random.Random(seed))
    cluster.ticks(4 * MS, 400 * MS)
    cluster.run()
    assert tokens(cluster) == answers
    assert cluster.trace.named("scale.up") and cluster.trace.named("scale.down")
    counts = cluster.scheduler.migrations.counts()
    assert counts.committed > 0 and counts.copied > 0
    assert any(type(message).__name__ == "UnloadStages" for _, _, _, message in cluster.sent)


def test_instances_move_to_whom_they_exchange_rows_with(family: Bench, answers: dict[str, list[int]]) -> None:  # noqa: F811
    control = ControlConfig(
        scaling=False, rearrange_interval_ms=20, interval_ms=5, migration_timeout_ms=400, crossing_us=1e6, bandwidth=1e9
    )
    config = ClusterConfig(devices=4, placement="partition", control=control, hop_cost=0.0)
    cluster = cluster_of(family, 4, config=config, servers=("x", "x", "y", "y"))
    ask(cluster, random.Random(1))
    cluster.ticks(4 * MS, 300 * MS)
    cluster.run()
    assert tokens(cluster) == answers
    assert cluster.trace.named("placement.move") and cluster.scheduler.migrations.counts().committed > 0


@pytest.mark.parametrize("balancing", ["owner", "least-busy", "recompute"])
def test_sequences_leave_busy_devices(family: Bench, answers: dict[str, list[int]], balancing: Rebalancing) -> None:  # noqa: F811
    """The second device comes back while the first one runs all sequences."""
    control = ControlConfig(
        scaling=False, rearranging=False, proactive=False, rebalance=balancing, rebalance_margin=1, interval_ms=5
    )
    config = ClusterConfig(devices=2, placement="replicate", control=control)
    cluster = cluster_of(family, 2, config=config, restart=20 * MS)
    cluster.at(MS // 2, lambda: cluster.kill("d1"))
    ask(cluster, random.Random(2))
    cluster.ticks(5 * MS, 300 * MS)
    cluster.run()
    assert tokens(cluster) == answers
    counts = cluster.scheduler.migrations.counts()
    assert counts.committed > 0
    assert (counts.copied > 0, counts.recomputed > 0) == (balancing != "recompute", balancing != "least-busy")


def test_everything_is_off_and_batches_are_plain(family: Bench, answers: dict[str, list[int]]) -> None:  # noqa: F811
    """One device with every mechanism off is plain continuous batching.

    All sequences run together, and nothing is moved, shared, scaled or speculated.
    """
    config = ClusterConfig(devices=1, placement="replicate", prefix_caching="off", control=ControlConfig.off())
    cluster = cluster_of(family, 1, config=config)
    ask(cluster, random.Random(3))
    cluster.ticks(5 * MS, 100 * MS)
    cluster.run()
    assert tokens(cluster) == answers
    kinds = {type(message).__name__ for _, _, _, message in cluster.sent}
    assert kinds == {"LoadStages", "StageReady", "OpenSequences", "RunRows", "RowsDone", "CloseSequences"}
    assert max(len(message.seqs) for _, _, _, message in cluster.sent if type(message).__name__ == "RowsDone") > 4
    assert not {event.ev for event in cluster.trace.events} & {
        "scale.up",
        "placement.move",
        "kv.move.start",
        "kv.ref",
        "spec.start",
    }
