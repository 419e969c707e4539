"""Blocks are scaled one by one while a cluster serves (BL-24).

Only the full block gets a second instance, to which some of its sequences move; the instance leaves when it is idle.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from runtime.config import ClusterConfig, ControlConfig
from runtime.engine.fakes.integer_model import counting_model
from runtime.policy.scaling import autoscale
from runtime.scheduler.controllers import autoscaler
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

#: Only the second of its four blocks has K and V, so only that block's device can fill up.
ONE = counting_model("one", "1 2* 3 4 5 6", max_model_len=128)
CUT = (1, 3, 4)
HOT = ONE.chain(*CUT).uses[1].block
QUICK = ControlConfig(
    interval_ms=5, cooldown_ms=40, idle_ms=40, rearrange_interval_ms=1_000_000, migration_timeout_ms=400
)


def hot_cluster(control: ControlConfig, devices: int = 4, **changes) -> VirtualCluster:
    config = ClusterConfig(devices=devices, placement="partition", control=control)
    cluster = VirtualCluster([ONE], [CUT], devices=devices, config=config, **{"pages": 48, **changes})
    for number in range(10):
        cluster.ask(request(f"s{number}", range(number % 5 + 1), "one", max_tokens=32), at=number * MS // 2)
    return cluster


def instances(cluster: VirtualCluster) -> dict[str, int]:
    return {block: len(where) for block, where in cluster.scheduler.block_map.instances.items()}


def watched(cluster: VirtualCluster, every: int, until: int) -> list[dict[str, int]]:
    seen: list[dict[str, int]] = []
    cluster.ticks(every, until)
    for when in range(every, until, every):
        cluster.at(when, lambda: seen.append(instances(cluster)))
    return seen


def test_only_the_full_block_gets_an_instance_and_some_of_its_sequences_go_there() -> None:
    cluster = hot_cluster(QUICK)
    seen = watched(cluster, 4 * MS, 360 * MS)
    cluster.run()
    cluster.expect()
    assert max(each[HOT] for each in seen) >= 2
    assert all(count == 1 for each in seen for block, count in each.items() if block != HOT)
    moves = cluster.scheduler.migrations.counts()
    assert moves.committed > 0 and moves.copied + moves.recomputed > 0
    ups = cluster.trace.named("scale.up")
    assert ups and {event.cause for event in ups} == {"BL-24"} and {event.block for event in ups} == {HOT}


def test_an_instance_that_nobody_needs_goes_again_with_its_stages() -> None:
    cluster = hot_cluster(QUICK)
    seen = watched(cluster, 4 * MS, 360 * MS)
    cluster.run()
    cluster.expect()
    assert max(each[HOT] for each in seen) > 1 and seen[-1][HOT] == 1
    assert cluster.trace.named("scale.down") and cluster.scheduler.control.counts.dropped > 0
    dropped = [(to, message) for _, _, to, message in cluster.sent if type(message).__name__ == "UnloadStages"]
    assert dropped
    for device in cluster.scheduler.devices:
        for stage in device.stages.loaded:
            assert device.plan.blocks.issuperset(device.stages.wanted[stage]), (
                "a stage of blocks that are not there any more"
            )
            assert cluster.nodes[device.name].engine.memory().weights <= device.plan.nbytes


@pytest.mark.parametrize(("high", "grows"), [(0.8, False), (0.2, True)])
def test_a_block_gets_an_instance_above_the_configured_load(high: float, grows: bool) -> None:
    """A device that is never more than half full."""
    cluster = hot_cluster(replace(QUICK, high=high, low=0.1), pages=150)
    watched(cluster, 4 * MS, 360 * MS)
    cluster.run()
    cluster.expect()
    assert bool(cluster.trace.named("scale.up")) is grows


@pytest.mark.parametrize("cooldown", [20, 80])
def test_after_a_change_a_block_rests_for_the_configured_time(cooldown: int) -> None:
    cluster = hot_cluster(replace(QUICK, cooldown_ms=cooldown), devices=6, pages=16)
    watched(cluster, 4 * MS, 360 * MS)
    cluster.run()
    cluster.expect()
    first, second, *_ = (event.t for event in cluster.trace.named("scale.up"))
    assert cooldown * MS <= second - first <= (cooldown + 2 * QUICK.interval_ms) * MS


def test_with_an_idle_time_of_zero_no_instance_goes() -> None:
    cluster = hot_cluster(replace(QUICK, idle_ms=0))
    seen = watched(cluster, 4 * MS, 360 * MS)
    cluster.run()
    cluster.expect()
    assert seen[-1][HOT] > 1 and not cluster.trace.named("scale.down")


def test_an_instance_that_could_not_go_when_it_was_idle_goes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the instance was forgotten and stayed for ever."""
    cluster = hot_cluster(QUICK)
    router = cluster.scheduler.router
    spoils = router.spoils
    monkeypatch.setattr(router, "spoils", lambda *args: cluster.now < 400 * MS or spoils(*args))
    seen = watched(cluster, 4 * MS, 700 * MS)
    cluster.run()
    cluster.expect()
    assert seen[80][HOT] > 1 and seen[-1][HOT] == 1  # index 80 is 320 ms, when it is idle


def test_an_instance_is_not_idle_while_it_loads() -> None:
    """The sequences it was made for may have ended meanwhile; later ones may use it once it is loaded."""
    cluster = hot_cluster(QUICK, loading=lambda: (1 if cluster.now < 60 * MS else 400) * MS)
    watched(cluster, 4 * MS, 900 * MS)
    loading: list[bool] = []

    def look() -> None:
        for event in cluster.trace.named("scale.down")[len(loading) :]:
            loading.append(cluster.scheduler.devices[event.dev or ""].stages.brings([event.block or ""]))

    for when in range(4, 900, 4):
        cluster.at(when * MS + 1, look)
    cluster.run()
    cluster.expect()
    assert loading and not any(loading)


def test_beside_an_instance_that_has_nothing_to_do_no_further_one_is_loaded() -> None:
    """Sequences move to an idle second instance instead of to a third one.

    The second instance came with a longer part of the chain, after all sequences had been placed on the first.
    Regression: a third instance was loaded beside it.
    """
    cluster = hot_cluster(QUICK, devices=5)
    blocks = [use.block for use in ONE.chain(*CUT).uses]
    second: list[str] = []

    def copied() -> None:
        second.extend(device.name for device in cluster.scheduler.devices if not device.passing.count)
        cluster.scheduler.control.actions.grow(blocks[1:3], second[0], "a test's", cluster.now)

    cluster.at(61 * MS, copied)  # the first instance is full from 65 ms on
    cluster.ticks(4 * MS, 100 * MS)
    seen: list[tuple[int, int]] = []
    for when in range(61, 90):
        cluster.at(
            when * MS + 1,
            lambda: seen.append((instances(cluster)[HOT], cluster.scheduler.devices[second[0]].passing.count)),
        )
    cluster.run()
    cluster.expect()
    assert {count for count, _ in seen} == {2} and not cluster.trace.named("scale.up")
    evens = cluster.trace.named("scale.even")
    assert evens and {(event.cause, event.block, event.dev) for event in evens} == {("BL-24", HOT, second[0])}
    assert max(sequences for _, sequences in seen) >= 2 and cluster.scheduler.migrations.counts().committed >= 2


@pytest.mark.parametrize(("locality", "policy"), [(True, "locality"), (False, "frag-min")])
def test_the_switch_says_how_new_instances_are_placed(
    locality: bool, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[object] = set()

    def spied(*given: object) -> autoscale.Scaling:
        asked.add(given[-1])
        return autoscale.scale(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(autoscaler, "scale", spied)
    cluster = hot_cluster(replace(QUICK, locality=locality))
    watched(cluster, 4 * MS, 100 * MS)
    cluster.run()
    cluster.expect()
    assert asked == {policy} and cluster.trace.named("scale.up")


def test_negative_control_switched_off_nothing_is_scaled() -> None:
    cluster = hot_cluster(ControlConfig.off())
    seen = watched(cluster, 4 * MS, 300 * MS)
    cluster.run()
    cluster.expect()
    assert {max(each.values()) for each in seen} == {1}
    assert not cluster.trace.named("scale.up") and cluster.scheduler.migrations.counts().started == 0


def test_traffic_with_a_block_that_has_gone_since_is_nothing_to_go_by() -> None:
    """Traffic of a block whose version was replaced after it was counted does not stop the scheduler.

    Regression, found by random schedules.
    """
    cluster = hot_cluster(QUICK)
    cluster.at(3 * MS, lambda: setattr(cluster.scheduler.control.traffic, "pairs", {("gone", HOT): 9.0}))
    cluster.ticks(4 * MS, 200 * MS)
    cluster.run()
    cluster.expect()
    assert cluster.trace.named("scale.up")


def test_it_pays_more_sequences_run_at_once() -> None:
    """Sequences that waited for memory run on the second instance, so the last one ends earlier."""

    def last(control: ControlConfig) -> int:
        cluster = hot_cluster(control)
        ends: list[int] = []
        cluster.ticks(4 * MS, 360 * MS)
        hear: Callable = cluster.hear

        def told(events) -> None:
            ends.extend(cluster.now for event in events if event.finish)
            hear(events)

        cluster.hear = told  # type: ignore[method-assign]
        cluster.run()
        cluster.expect()
        return max(ends)

    assert last(QUICK) < last(ControlConfig.off())


@pytest.mark.parametrize("seed", range(4))
def test_deaths_while_it_scales_lose_and_alter_nothing(seed: int) -> None:
    rng = random.Random(seed)
    cluster = hot_cluster(QUICK, page_bytes_per_ms=rng.choice((1e9, 200.0)))
    cluster.ticks(4 * MS, 300 * MS)
    for _ in range(4):
        cluster.at(rng.randrange(150 * MS), lambda: cluster.kill(f"d{rng.randrange(4)}"))
    cluster.run()
    cluster.expect()


def test_an_instance_whose_device_died_meanwhile_goes_again_too() -> None:
    cluster = hot_cluster(QUICK)
    seen = watched(cluster, 4 * MS, 700 * MS)
    killed: list[str] = []

    def kill() -> None:
        for event in cluster.trace.named("scale.up")[: 1 - len(killed)]:
            killed.append(event.dev or "")
            cluster.kill(killed[0])

    for when in range(4, 200, 4):
        cluster.at(when * MS, kill)
    cluster.run()
    cluster.expect()
    assert killed and max(each[HOT] for each in seen) > 1 and seen[-1][HOT] == 1
