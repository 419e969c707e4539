"""A sequence that moves shares the prefix that its new path has: only the rest is copied or recomputed (BL-16)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from runtime.config import AgentConfig, ClusterConfig
from runtime.engine.fakes.integer_model import counting_model
from runtime.scheduler.migration.estimate import move_seconds
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1 2* 3 4* 5* 6", page_tokens=4, max_model_len=512)
#: Five page sets.
SYSTEM = tuple(range(20, 40))


def moved(*blocks: range, devices: int = 2, **how: Any) -> VirtualCluster:
    """Move the blocks of two sequences with the same prefix, one after the other, to the same device."""
    cluster = VirtualCluster(
        [M], [(1, 3, 4)], devices=devices, pages=4000, config=ClusterConfig(devices=devices, placement="replicate"),
        agent_config=AgentConfig(recompute_chunk=8, fetch_window=2, activation_cache_bytes=1 << 20),
        page_bytes_per_ms=200.0,
    )  # fmt: skip
    cluster.ask(request("a", (*SYSTEM, 1, 2), "m", max_tokens=120))
    cluster.run(until=20 * MS)
    cluster.ask(request("b", (*SYSTEM, 3, 4, 5), "m", max_tokens=120), at=cluster.now)
    cluster.run(until=30 * MS)
    first, second = (cluster.scheduler.sequences[seq] for seq in "ab")
    assert first.path == second.path
    source = first.path[0].device
    target = next(f"d{at}" for at in range(devices) if f"d{at}" != source)
    for at, name in enumerate("ab"):
        for part in blocks:
            committed = cluster.scheduler.migrations.counts().committed
            while cluster.migrate(name, part, target, **how) is not None:
                cluster.run_one()
            expect_estimate(cluster)
            while cluster.scheduler.migrations.counts().committed == committed:
                cluster.run_one()
        if not at:
            before = cluster.scheduler.migrations.counts()
            assert before.copied + before.recomputed > len(SYSTEM)
            cluster.before = before  # type: ignore[attr-defined]
    return cluster


def expect_estimate(cluster: VirtualCluster) -> None:
    """Assert that a move is expected to take as long as what it brings, once the speed is known."""
    (move,) = cluster.scheduler.migrations
    uses = [use for use in move.chain.uses if move.parts[0].hop.lo <= use.lo < move.parts[0].hop.hi]
    where = move.source, move.target, move.copy, move.recompute
    whole = move_seconds(cluster.scheduler._state, move.sequence, uses, *where)
    known = cluster.scheduler.migrations.counts().committed > 0 and whole > 0
    assert (move.estimate < whole) == (move.present > 0 and known), (move.estimate, whole)


@pytest.mark.parametrize("how", [{}, {"copy": False}, {"recompute": False}], ids=["both", "recompute", "copy"])
@pytest.mark.parametrize("blocks", [range(4), range(2)], ids=["whole", "beginning"])
def test_the_second_one_brings_only_the_rest(blocks: range, how: dict[str, bool]) -> None:
    cluster = moved(blocks, **how)
    before, after = cluster.before, cluster.scheduler.migrations.counts()  # type: ignore[attr-defined]
    brought = after.copied + after.recomputed - before.copied - before.recomputed
    b = cluster.scheduler.sequences["b"]
    assert 0 < brought <= b.computed - len(SYSTEM)
    layers = sum(use.kv_layers for use in b.chain.uses[blocks.start : blocks.stop])
    pages = sum(one.pages.groups for one in cluster.scheduler.sequences.values()) * layers
    target = cluster.scheduler.devices[b.path[0].device]
    assert target.pages.used == pages - len(SYSTEM) // 4 * layers
    cluster.run()
    cluster.expect()


@pytest.mark.parametrize("behind", [16, 60], ids=["kept", "in the way"])
def test_what_is_shared_is_not_evicted_for_the_rest(behind: int) -> None:
    """It is the least recently used prefix of a device that has too few free pages; a long one is in the way."""
    config = ClusterConfig(
        devices=2, placement="replicate", prefix_caching="cached", watermark=0.0, max_num_seqs=1
    )  # fmt: skip
    cluster = VirtualCluster([M], [(1, 3, 4)], devices=2, pages=30 * M.spec.kv_layers, config=config)
    cached = [("a", (*SYSTEM, *range(behind))), ("x", range(60, 84))]
    for name, prompt in cached if behind < 60 else cached[:1]:
        cluster.ask(request(name, prompt, "m", max_tokens=2), at=max(cluster.now, 20 * MS))
        cluster.run()
    assert {each.path[0].device for each in cluster.scheduler.prefix_cache} == {"d0"}
    cluster.ask(request("y", range(50, 60), "m", max_tokens=60), at=cluster.now)
    cluster.run(until=cluster.now + 5 * MS)
    cluster.ask(request("b", (*SYSTEM, *range(80, 95), *range(30)), "m", max_tokens=20), at=cluster.now)
    cluster.run(until=cluster.now + 5 * MS)
    assert cluster.scheduler.sequences["b"].path[0].device == "d1"
    before = cluster.scheduler.prefix_cache.counts().evicted
    assert cluster.migrate("b", range(4), "d0") is None
    assert cluster.scheduler.prefix_cache.counts().evicted > before
    (move,) = cluster.scheduler.migrations
    assert move.present == (len(SYSTEM) if behind < 60 else 0)
    cluster.run()
    cluster.expect()
    counts = cluster.scheduler.migrations.counts()
    assert (counts.committed, counts.aborted) == (1, 0)


@pytest.mark.parametrize("victim", ["d0", "d1"])
@pytest.mark.parametrize("events", range(0, 40, 5))
def test_deaths_amid_it_change_no_token(victim: str, events: int) -> None:
    cluster = VirtualCluster(
        [M], [(1, 3, 4)], devices=2, pages=4000, config=ClusterConfig(devices=2, placement="replicate"),
        page_bytes_per_ms=50.0,
    )  # fmt: skip
    cluster.ask(request("a", (*SYSTEM, 1, 2), "m", max_tokens=90))
    cluster.run(until=20 * MS)
    cluster.ask(request("b", (*SYSTEM, *range(30)), "m", max_tokens=90), at=cluster.now)
    cluster.run(until=30 * MS)
    source = cluster.scheduler.sequences["a"].path[0].device
    target = "d1" if source == "d0" else "d0"
    cluster.migrate("a", range(4), target)
    while cluster.scheduler.sequences["a"].path[0].device == source:
        cluster.run_one()
        if not list(cluster.scheduler.migrations) and cluster.scheduler.sequences["a"].path[0].device == source:
            cluster.migrate("a", range(4), target)
    while cluster.migrate("b", range(4), target) is not None:
        cluster.run_one()
    (move,) = cluster.scheduler.migrations
    assert move.present == len(SYSTEM)
    rng = random.Random(events)
    for _ in range(events + rng.randrange(3)):
        cluster.run_one()
    cluster.kill(victim)
    cluster.run()
    cluster.expect()
