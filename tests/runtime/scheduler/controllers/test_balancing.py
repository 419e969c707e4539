"""Rebalancing of sequences away from a busier device: owner first, least busy, or recompute (Figure 24)."""

from __future__ import annotations

import random

import pytest

from runtime.config import ClusterConfig, ControlConfig, Rebalancing
from runtime.engine.fakes.integer_model import counting_model
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1 2* 3* 4", max_model_len=128)
N = counting_model("n", "1 2* 5* 6", max_model_len=128)


def lopsided(balancing: Rebalancing, margin: int = 4, **changes) -> VirtualCluster:
    """A cluster whose second device comes back while the first one runs all sequences."""
    control = ControlConfig(
        scaling=False, rearranging=False, proactive=False, rebalance=balancing, rebalance_margin=margin, interval_ms=5
    )
    config = ClusterConfig(devices=2, placement="replicate", control=control)
    cluster = VirtualCluster([M, N], devices=2, pages=400, config=config, restart=20 * MS, **changes)
    cluster.at(1 * MS // 2, lambda: cluster.kill("d1"))
    for number in range(10):
        cluster.ask(request(f"s{number}", range(number + 1), "mn"[number % 2], max_tokens=40), at=1 * MS)
    cluster.ticks(5 * MS, 200 * MS)
    return cluster


@pytest.mark.parametrize("balancing", ["owner", "least-busy", "recompute"])
def test_each_way_moves_as_it_says_and_changes_no_token(balancing: Rebalancing) -> None:
    cluster = lopsided(balancing)
    cluster.run()
    cluster.expect()
    counts = cluster.scheduler.migrations.counts()
    assert counts.committed > 0
    assert counts.copied > 0 or balancing == "recompute"
    assert counts.recomputed > 0 or balancing == "least-busy"
    assert not (counts.copied if balancing == "recompute" else counts.recomputed if balancing == "least-busy" else 0)
    chosen = cluster.trace.named("dispatch.choose")
    assert chosen and {event.extra["rule"] for event in chosen} == {balancing}


@pytest.mark.parametrize("balancing", ["owner", "least-busy", "recompute"])
def test_the_baselines_wait_for_their_pages_and_ours_runs_on(balancing: Rebalancing) -> None:
    """Count tokens between a move's begin and end: the baselines make at most that of the row under way."""
    cluster = lopsided(balancing, page_bytes_per_ms=50.0)
    cluster.run()
    cluster.expect()
    begins = {event.extra["move"]: event for event in cluster.trace.named("kv.move.start")}
    ends = {event.extra["move"]: event for event in cluster.trace.named("kv.meet")}
    tokens = cluster.trace.named("token")
    made = [
        sum(each.seq == begins[move].seq and begins[move].t < each.t < ends[move].t for each in tokens)
        for move in begins.keys() & ends.keys()
    ]
    assert made and (max(made) > 1 if balancing == "owner" else max(made) <= 1)


def test_the_owner_keeps_what_is_his_where_the_rule_is_strict_or_little_is_gained() -> None:
    for cluster in (lopsided("strict"), lopsided("owner", margin=20)):
        cluster.run()
        cluster.expect()
        assert cluster.scheduler.migrations.counts().started == 0


@pytest.mark.parametrize("balancing", ["owner", "least-busy", "recompute"])
@pytest.mark.parametrize("seed", range(2))
def test_deaths_while_sequences_change_sides(balancing: Rebalancing, seed: int) -> None:
    rng = random.Random(seed)
    cluster = lopsided(balancing, margin=1, page_bytes_per_ms=rng.choice((1e9, 100.0)))
    for _ in range(3):
        cluster.at(rng.randrange(200 * MS), lambda: cluster.kill(f"d{rng.randrange(2)}"))
    cluster.run()
    cluster.expect()


def test_those_that_share_no_pages_leave_first() -> None:
    """Moving a sequence that shares pages doubles them, so the two that share none go (BL-18); names say otherwise."""
    control = ControlConfig(
        scaling=False, rearranging=False, proactive=False, rebalance="owner", rebalance_margin=1, interval_ms=5
    )
    config = ClusterConfig(devices=2, placement="replicate", control=control, prefix_caching="active")
    cluster = VirtualCluster([M], devices=2, pages=400, config=config, restart=20 * MS)
    cluster.at(1 * MS // 2, lambda: cluster.kill("d1"))
    for number in range(4):
        same = tuple(range(1, 21))
        prompt = same if number < 2 else tuple(range(20 * number, 20 * number + 20))
        cluster.ask(request(f"s{number}", prompt, "m", max_tokens=60), at=(1 + 2 * number) * MS)
    cluster.ticks(5 * MS, 200 * MS)
    cluster.run()
    cluster.expect()
    assert cluster.trace.named("kv.ref"), "nothing was shared: the test shows nothing"
    movers = [event.seq or event.extra["seq"] for event in cluster.trace.named("dispatch.choose")]
    assert movers and set(movers) <= {"s2", "s3"}
