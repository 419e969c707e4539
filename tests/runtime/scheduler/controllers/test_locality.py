"""Instances move close to the instances they exchange rows with (BL-26).

Traffic between servers falls, also after the workload flips, and tokens do not change.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from runtime.config import ClusterConfig, ControlConfig
from runtime.engine.fakes.integer_model import counting_model
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

#: Two models that share a middle block; each has a head and a tail of its own.
A = counting_model("a", "1 2* 3* 4", max_model_len=128)
B = counting_model("b", "11 12* 3* 14", max_model_len=128)
CUTS = [(2, 3), (2, 3)]
PERIOD = 40
CONTROL = ControlConfig(
    scaling=False,
    rearrange_interval_ms=PERIOD,
    interval_ms=5,
    migration_timeout_ms=2000,
    crossing_us=1e6,
    bandwidth=1e9,
)


def two_servers(control: ControlConfig, **changes) -> VirtualCluster:
    """A cluster on two servers where placement by depth puts each model's head and tail on different servers."""
    config = ClusterConfig(devices=4, placement="partition", control=control, hop_cost=0.0)
    return VirtualCluster(
        [A, B], CUTS, devices=4, pages=400, config=config, servers=("x", "x", "y", "y"), limits=(4500,) * 4, **changes
    )  # fmt: skip


def ask(cluster: VirtualCluster, model: str, first: int, until: int, every: int = 8) -> None:
    for when in range(first, until, every):
        cluster.ask(request(f"{model}{when}", range(1 + when % 4), model, max_tokens=12), at=when * MS)


def crossings_per_step(cluster: VirtualCluster, marks: list[int]) -> list[float]:
    """Return, between each two times (ms), the rows that crossed servers per step from block to block."""
    seen: list[tuple[int, int]] = []

    def look() -> None:
        totals = cluster.scheduler.control.crossings()
        seen.append((totals.crossings, totals.steps))

    for mark in marks:
        cluster.at(mark * MS, look)
    cluster.run()
    return [(after[0] - before[0]) / max(after[1] - before[1], 1) for before, after in pairwise(seen)]


def test_traffic_between_servers_falls_and_a_flip_is_followed_after_a_period() -> None:
    cluster = two_servers(CONTROL)
    cluster.ticks(4 * MS, 700 * MS)
    ask(cluster, "a", 0, 240)
    ask(cluster, "b", 320, 560)
    shares = crossings_per_step(cluster, [1, 40, 200, 260, 321, 361, 480, 600])
    cluster.expect()
    moves = cluster.trace.named("placement.move")
    assert moves and {event.cause for event in moves} == {"BL-26"}
    assert all(event.t >= PERIOD * MS for event in moves)
    flipped = [event for event in moves if event.t >= 320 * MS]
    assert flipped and flipped[0].t >= 320 * MS
    assert shares[2] < shares[0], "the first workload's traffic has not fallen"
    assert shares[6] < shares[4], "the second workload's traffic has not fallen"


def test_negative_control_switched_off_nothing_moves() -> None:
    cluster = two_servers(ControlConfig.off())
    cluster.ticks(5 * MS, 200 * MS)
    ask(cluster, "a", 0, 120)
    cluster.run()
    cluster.expect()
    assert not cluster.trace.named("placement.move") and cluster.scheduler.migrations.counts().started == 0


@pytest.mark.parametrize("seed", range(3))
def test_deaths_while_instances_move_lose_and_alter_nothing(seed: int) -> None:
    rng = random.Random(seed)
    cluster = two_servers(CONTROL, page_bytes_per_ms=rng.choice((1e9, 100.0)))
    cluster.ticks(5 * MS, 320 * MS)
    ask(cluster, "a", 0, 80)
    ask(cluster, "b", 80, 160)
    for _ in range(3):
        cluster.at(rng.randrange(150 * MS), lambda: cluster.kill(f"d{rng.randrange(4)}"))
    cluster.run()
    cluster.expect()


def placed_by_hand(monkeypatch: pytest.MonkeyPatch, *where: tuple[str, str]) -> None:
    """Place blocks initially at these (block, device) pairs."""
    monkeypatch.setattr(
        "runtime.scheduler.placement.by_role.laid_out", lambda *_: SimpleNamespace(instances=where, lacking={})
    )


def test_a_swap_begins_with_what_makes_room_and_never_takes_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model's halves lie on two servers; one device has room for one more block, the other for none."""
    a, b = counting_model("a", "1 2*", max_model_len=128), counting_model("b", "11 12*", max_model_len=128)
    (a1, a2), (b1, b2) = ([block.id for block in model.blocks(1)] for model in (a, b))
    placed_by_hand(monkeypatch, (a1, "d0"), (b2, "d0"), (b1, "d1"), (a2, "d1"))
    config = ClusterConfig(devices=2, placement="partition", control=CONTROL, hop_cost=0.0)
    cluster = VirtualCluster(
        [a, b], [(1,), (1,)], devices=2, pages=400, config=config, servers=("x", "y"), limits=(3000, 2000)
    )
    most = {"d0": 0, "d1": 0}

    def look() -> None:
        for device in cluster.scheduler.devices:
            most[device.name] = max(most[device.name], device.plan.nbytes)

    for when in range(1, 400):
        cluster.at(when * MS, look)
    cluster.ticks(4 * MS, 400 * MS)
    ask(cluster, "a", 0, 300)
    ask(cluster, "b", 0, 300)
    cluster.run()
    cluster.expect()
    assert len(cluster.trace.named("placement.move")) == 2 and len(cluster.trace.named("instance.drop")) == 2
    assert most == {"d0": 3000, "d1": 2000}
    instances = cluster.scheduler.block_map.instances
    assert instances[a1] == instances[a2] and instances[b1] == instances[b2] != instances[a1]


def test_no_chain_is_brought_where_its_longest_sequences_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both halves on one device would save every hop, but leave pages for 24 tokens instead of 48."""
    model = counting_model("a", "1* 2*", max_model_len=48)
    one, other = (block.id for block in model.blocks(1))
    placed_by_hand(monkeypatch, (one, "d0"), (other, "d1"))
    config = ClusterConfig(devices=2, placement="partition", control=CONTROL, hop_cost=0.0)
    cluster = VirtualCluster([model], [(1,)], devices=2, pages=12, config=config, servers=("x", "y"))
    cluster.ticks(4 * MS, 400 * MS)
    ask(cluster, "a", 0, 200)
    cluster.ask(request("long", range(8), "a", max_tokens=40), at=250 * MS)
    cluster.run()
    cluster.expect()
    assert not cluster.trace.named("placement.move") and len(cluster.told["long"].tokens) == 40


@pytest.mark.parametrize("switch", ["rearranging", "locality"])
def test_rows_are_counted_by_periods_though_nothing_is_rearranged(switch: str) -> None:
    """New instances are placed near the blocks they exchange rows with, by the same counts."""
    cluster = two_servers(replace(CONTROL, **{switch: False}))
    cluster.ticks(4 * MS, 200 * MS)
    ask(cluster, "a", 0, 160)
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.control.traffic.pairs and not cluster.trace.named("placement.move")


def test_where_the_old_instance_has_to_stay_no_copy_is_left() -> None:
    cluster = two_servers(CONTROL)
    cluster.scheduler.control.actions.drain = lambda drain: "it has become the last one"  # type: ignore[method-assign]
    cluster.ticks(4 * MS, 300 * MS)
    ask(cluster, "a", 0, 240)
    cluster.run()
    cluster.expect()
    assert cluster.trace.named("placement.move")
    assert all(len(devices) == 1 for devices in cluster.scheduler.block_map.instances.values())
