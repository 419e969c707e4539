"""On-demand placement: one copy of each chain at first, whole on a device; models in demand get more copies."""

from __future__ import annotations

import random

import pytest

from runtime.config import ClusterConfig, ControlConfig
from runtime.engine.fakes.integer_model import IntegerModel, counting_model
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

MODELS = [
    counting_model(f"m{at}", f"{10 * at + 1} {10 * at + 2}* {10 * at + 3}* {10 * at + 4}", max_model_len=128)
    for at in range(3)
]
CUTS = [(2,)] * 3
CONTROL = ControlConfig(
    rearranging=False, interval_ms=5, cooldown_ms=30, idle_ms=60, rebalance_margin=2, migration_timeout_ms=300
)


def cluster_of(control: ControlConfig, devices: int = 5, limit: int = 9000, **changes) -> VirtualCluster:
    config = ClusterConfig(devices=devices, placement="on-demand", control=control)
    return VirtualCluster(MODELS, CUTS, devices=devices, pages=200, config=config, limits=(limit,) * devices, **changes)


def ask(cluster: VirtualCluster, model: IntegerModel, count: int, every: int = 1) -> None:
    for number in range(count):
        seq = f"{model.spec.name}-{number}"
        cluster.ask(request(seq, range(1 + number % 6), model.spec.name, max_tokens=40), at=number * every * MS)


def where(cluster: VirtualCluster, model: IntegerModel) -> set[str]:
    held = [set(cluster.scheduler.block_map.instances[use.block]) for use in model.chain(*CUTS[0]).uses]
    assert all(each == held[0] for each in held), "a chain that fits a device is torn apart"
    return held[0]


def test_what_is_asked_for_gets_copies_and_loses_them_again() -> None:
    cluster = cluster_of(CONTROL)
    seen: list[tuple[int, int]] = []
    ask(cluster, MODELS[0], 24)
    ask(cluster, MODELS[1], 2)
    cluster.ticks(4 * MS, 300 * MS)
    for when in range(2, 300, 8):
        cluster.at(when * MS, lambda: seen.append((len(where(cluster, MODELS[0])), len(where(cluster, MODELS[1])))))
    cluster.run()
    cluster.expect()
    assert seen[0] == (1, 1)
    assert max(most for most, _ in seen) >= 3 and max(few for _, few in seen) == 1
    assert seen[-1] == (1, 1)
    copies = cluster.trace.named("scale.copy")
    assert copies and {event.cause for event in copies} == {"BL-24"}
    assert all(device.plan.nbytes <= device.plan.limit for device in cluster.scheduler.devices)
    assert not [message for *_, message in cluster.sent if type(message).__name__ == "ForwardRows"], (
        "rows changed their device"
    )


def test_newcomers_run_where_it_is_loaded_while_a_copy_loads() -> None:
    """No request waits for the copy: those that arrive meanwhile are placed on the first one."""
    cluster = cluster_of(CONTROL)
    ask(cluster, MODELS[0], 16)
    cluster.ticks(4 * MS, 300 * MS)
    cluster.run()
    cluster.expect()
    inserted = {event.seq: event.t for event in cluster.trace.named("batch.insert")}
    arrived = {event.seq: event.t for event in cluster.trace.named("arrive")}
    first = min(inserted.values())
    assert all(inserted[seq] - max(arrived[seq], first) <= MS // 2 for seq in inserted)


def test_negative_controls_without_room_or_switched_off_there_are_no_copies() -> None:
    for cluster in (cluster_of(ControlConfig.off()), cluster_of(CONTROL, devices=3, limit=4000)):
        ask(cluster, MODELS[0], 16)
        cluster.ticks(4 * MS, 200 * MS)
        cluster.run()
        cluster.expect()
        assert len(where(cluster, MODELS[0])) == 1 and not cluster.trace.named("scale.copy")


@pytest.mark.parametrize("seed", range(4))
def test_everything_at_once_with_deaths_loses_and_alters_nothing(seed: int) -> None:
    rng = random.Random(seed)
    control = ControlConfig(
        interval_ms=4,
        cooldown_ms=20,
        idle_ms=30,
        rebalance_margin=1,
        migration_timeout_ms=100,
        rearrange_interval_ms=30,
        crossing_us=1e6,
        rebalance="owner",
    )
    cluster = cluster_of(control, devices=4, servers=("x", "x", "y", "y"), page_bytes_per_ms=rng.choice((1e9, 100.0)))
    for model in MODELS:
        ask(cluster, model, rng.randrange(2, 9), every=rng.randrange(1, 6))
    cluster.ticks(4 * MS, 250 * MS)
    for _ in range(4):
        cluster.at(rng.randrange(150 * MS), lambda: cluster.kill(f"d{rng.randrange(4)}"))
    cluster.run()
    cluster.expect()
