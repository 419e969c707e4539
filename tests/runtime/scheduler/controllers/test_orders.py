"""Every placement order from outside ends: in random schedules (`ordered`) and one by one."""

from __future__ import annotations

from functools import cache

import pytest

from runtime.config import ClusterConfig, ControlConfig
from runtime.engine.fakes.integer_model import counting_model
from runtime.scheduler.controllers.actions import LAST, SHORTENS, Drain, MoveRequest
from tests.runtime.scheduler.controllers.ordered import LAST as ASKED
from tests.runtime.scheduler.controllers.ordered import PATIENCE, Ordered
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

ONE = counting_model("one", "1 2* 3* 4", max_model_len=128)
CUT = (2, 3)
HEAD, MIDDLE, TAIL = (use.block for use in ONE.chain(*CUT).uses)
STILL = ControlConfig.off()
SEEDS = range(26)


@cache
def played(seed: int) -> Ordered:
    """Return a finished random schedule; two tests look at each."""
    cluster = Ordered(seed=seed)
    cluster.run()
    return cluster


@pytest.mark.parametrize("seed", SEEDS)
def test_every_order_ends(seed: int) -> None:
    """An instance ordered to leave leaves, or the refusal has a true reason; none stays about to leave for ever."""
    cluster = played(seed)
    for one in cluster.insisted:
        assert (one.left is not None and one.left - one.since < ASKED) or (one.refused == SHORTENS and one.rightly), one
    assert cluster.slowest <= 2 * PATIENCE
    scheduler = cluster.scheduler
    assert not len(scheduler.control.actions) and not len(scheduler.migrations) and not scheduler.block_map.leaving
    for device in scheduler.devices:
        for stage in device.stages.loaded:
            assert device.plan.blocks.issuperset(device.stages.wanted[stage]), (
                "a stage of blocks that are not there any more"
            )
    cluster.expect()


def test_schedules_do_have_all_of_it() -> None:
    """The schedules contain what the test above is about: orders fulfilled, refused and recalled, and deaths."""
    left = refused = dropped = moved = deaths = recalled = 0
    for seed in SEEDS:
        cluster = played(seed)
        counts = cluster.scheduler.control.counts
        left += sum(one.left is not None for one in cluster.insisted)
        refused += sum(one.refused == SHORTENS for one in cluster.insisted)
        dropped, moved = dropped + counts.dropped, moved + counts.moved
        deaths += len(cluster.trace.named("fault"))
        kept = cluster.trace.named("instance.keep")
        recalled += sum(event.extra["error"] == "it is asked for again" for event in kept)
    assert min(left, refused, dropped, moved, deaths, recalled) > 0, (left, refused, dropped, moved, deaths, recalled)


def still(devices: int = 3, **changes: object) -> VirtualCluster:
    """A cluster in which only orders change the placement; d0 holds all of the model, and 5 ms have passed."""
    config = ClusterConfig(devices=devices, placement="partition", control=STILL, hop_cost=100.0)
    cluster = VirtualCluster([ONE], [CUT], devices=devices, config=config, **changes)  # type: ignore[arg-type]
    cluster.run(until=5 * MS)
    provision = cluster.scheduler.block_map
    for block in (HEAD, MIDDLE, TAIL):
        provision.add(block, "d0")
        for name in [name for name in provision.instances[block] if name != "d0"]:
            provision.remove(block, name)
    cluster.ticks(5 * MS, 500 * MS)
    return cluster


def drained(cluster: VirtualCluster, source: str, target: str | None = None) -> str | None:
    """Order the middle block off a device within 100 ms."""
    drain = Drain(frozenset([MIDDLE]), source, target, cluster.now + 100 * MS, "a test's")
    return cluster.scheduler.control.actions.drain(drain)


def where(cluster: VirtualCluster, block: str = MIDDLE) -> list[str]:
    return sorted(cluster.scheduler.block_map.instances[block])


def test_what_cannot_go_is_refused_at_once_with_the_reason() -> None:
    """A refused order moves no sequence and marks no instance. Regression: all sequences moved away first."""
    cluster = still(pages=48)  # 32 page groups of one layer, fewer of both layers
    actions = cluster.scheduler.control.actions
    assert drained(cluster, "d0") == LAST
    assert drained(cluster, "d1") == "it is not there"
    actions.grow([TAIL], "d1", "a test's", cluster.now)
    actions.grow([MIDDLE], "d1", "a test's", cluster.now)
    assert drained(cluster, "d1") == SHORTENS
    assert not cluster.scheduler.block_map.leaving and not len(actions)
    assert drained(cluster, "d0") is None
    assert drained(cluster, "d0") == "it is about to go already"
    cluster.run()
    assert where(cluster) == ["d1"]


def test_what_is_asked_for_again_while_it_drains_stays() -> None:
    cluster = still()
    actions = cluster.scheduler.control.actions
    cluster.ask(request("s", range(4), "one", max_tokens=60), at=10 * MS)
    cluster.at(30 * MS, lambda: actions.grow([MIDDLE, TAIL], "d1", "a test's", cluster.now))
    both = Drain(frozenset([MIDDLE, TAIL]), "d0", "d1", 400 * MS, "a test's")
    cluster.at(31 * MS, lambda: actions.drain(both))
    cluster.at(32 * MS, lambda: actions.grow([MIDDLE], "d0", "a test's", cluster.now))
    cluster.run()
    cluster.expect()
    assert where(cluster) == ["d0", "d1"] and where(cluster, TAIL) == ["d1"]
    (kept,) = cluster.trace.named("instance.keep")
    assert kept.extra["error"] == "it is asked for again" and not cluster.scheduler.block_map.leaving


def test_moves_of_other_blocks_to_its_device_hold_nothing_up() -> None:
    """Regression: a device that sequences kept moving to because of another block never finished draining."""
    cluster = still(page_bytes_per_ms=2.0)  # a move takes long
    for block in (HEAD, MIDDLE):
        cluster.scheduler.control.actions.grow([block], "d1", "a test's", cluster.now)
    cluster.ask(request("s", range(40), "one", max_tokens=80), at=10 * MS)

    def move() -> None:
        if not cluster.scheduler.sequences["s"].waits.move:
            cluster.migrate("s", range(1), "d1", recompute=False)

    for when in range(20, 60, 4):  # the stages of its path have to be loaded first
        cluster.at(when * MS, move)
    cluster.run(until=60 * MS)
    assert len(cluster.scheduler.migrations) == 1
    assert drained(cluster, "d1") is None
    cluster.run(until=70 * MS)
    assert where(cluster) == ["d0"] and len(cluster.scheduler.migrations) == 1
    cluster.run()
    cluster.expect()


def test_a_sequence_is_not_moved_to_an_instance_that_is_about_to_go() -> None:
    """It would have to leave again at once, or reach a stage of a block that no device holds."""
    cluster = still()
    actions = cluster.scheduler.control.actions
    actions.grow([MIDDLE], "d1", "a test's", cluster.now)
    cluster.ask(request("s", range(4), "one", max_tokens=60), at=10 * MS)
    cluster.at(
        30 * MS, lambda: actions.move_request(MoveRequest("s", frozenset([MIDDLE]), "d0", "d1", 400 * MS, "a test's"))
    )
    cluster.at(30 * MS, lambda: drained(cluster, "d1"))
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.migrations.counts().started == 0 and actions.counts.lapsed == 1
    assert where(cluster) == ["d0"] and not cluster.scheduler.devices["d1"].stages.loaded


def test_sequences_go_elsewhere_where_the_instance_that_was_named_has_gone() -> None:
    cluster = still()
    actions = cluster.scheduler.control.actions
    for name in ("d1", "d2"):
        actions.grow([MIDDLE], name, "a test's", cluster.now)
    cluster.ask(request("s", range(4), "one", max_tokens=80), at=10 * MS)
    cluster.at(30 * MS, lambda: drained(cluster, "d1"))
    cluster.at(40 * MS, lambda: drained(cluster, "d0", target="d1"))
    cluster.run()
    cluster.expect()
    assert where(cluster) == ["d2"] and cluster.scheduler.migrations.counts().committed == 1
    assert not cluster.scheduler.devices["d1"].stages.loaded


def test_a_stage_that_loads_for_long_is_waited_for_and_then_the_instance_goes() -> None:
    """Regression: the instance stayed for ever when the load took longer than sequences have to leave."""
    cluster = still(loading=lambda: 200 * MS)
    actions = cluster.scheduler.control.actions
    actions.grow([MIDDLE], "d1", "a test's", cluster.now)
    cluster.ask(request("s", range(4), "one", max_tokens=1), at=10 * MS)
    chain = cluster.scheduler.chains()[0]
    assert [use.block for use in chain.uses if (use.lo, use.hi) == (2, 3)] == [MIDDLE]
    cluster.at(20 * MS, lambda: cluster.scheduler._state.ask_for(chain, "d1", chain.stage(2, 3)))
    cluster.at(25 * MS, lambda: drained(cluster, "d1"))
    cluster.run(until=150 * MS)
    assert where(cluster) == ["d0", "d1"]
    cluster.run()
    assert where(cluster) == ["d0"] and not cluster.scheduler.devices["d1"].stages.loaded
