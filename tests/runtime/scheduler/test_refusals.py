"""Blocks of a device that refuses to load them run on other devices, now or when those are back.

No request ends because of one refusal.
"""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest

from runtime.chains import Stage
from runtime.cluster.driver.view import ClusterView
from runtime.config import ClusterConfig
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.engine.fakes.integer_model import counting_model
from runtime.types import ModelSpec
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request
from zoo.errors import NotServable

M = counting_model("m", "1 2* 3* 4")


class Small(IntegerEngine):
    """An engine that refuses every load."""

    def load(self, stage: Stage) -> ModelSpec:
        raise NotServable("no room")


def one_small(*small: str) -> VirtualCluster:
    """A cluster of two devices that should hold everything; those named in `small` refuse every load."""

    def made(name: str) -> IntegerEngine:
        return (Small if name in small else IntegerEngine)([M], 256, device=name)

    return VirtualCluster([M], devices=2, config=ClusterConfig(devices=2, placement="replicate"), make_engine=made)


def test_what_a_device_refuses_runs_on_the_others() -> None:
    cluster = one_small("d1")
    cluster.ask(*(request(f"s{at}", (at,), "m", max_tokens=8) for at in range(6)))
    cluster.run()
    cluster.expect()


def test_while_the_others_are_away_it_waits_for_them() -> None:
    """d1 gets the load only once d0 has died; its refusal does not end the sequences that d0 will run again."""
    cluster = one_small("d1")
    cluster.ask(request("a", range(4), "m", max_tokens=40))
    cluster.at(10 * MS, lambda: cluster.kill("d0"))
    cluster.ask(request("b", range(4), "m", max_tokens=8), at=20 * MS)
    for when in range(20):  # new sequences prefer the device with less load
        cluster.ask(request(f"c{when}", range(4), "m", max_tokens=8), at=(80 + 2 * when) * MS)
    cluster.run()
    cluster.expect()


def test_what_every_device_refuses_ends_with_the_reason() -> None:
    cluster = one_small("d0", "d1")
    cluster.ask(request("a", range(4), "m"))
    cluster.run()
    assert cluster.told["a"].last.finish == "error" and "no room" in (cluster.told["a"].last.error or "")
    cluster.expect_empty()


def test_what_a_device_was_given_again_and_has_refused_runs_on_the_others() -> None:
    cluster = one_small("d1")
    cluster.ask(*(request(f"s{at}", (at,), "m", max_tokens=8) for at in range(6)))
    cluster.run()
    blocks = [block.id for block in M.blocks()]
    assert all(cluster.scheduler.block_map.instances[block] == ["d0"] for block in blocks)
    cluster.scheduler.control.actions.grow(blocks, "d1", "a test", cluster.now)
    cluster.ask(*(request(f"t{at}", (at,), "m", max_tokens=8) for at in range(6)), at=cluster.now)
    cluster.run()
    cluster.expect()
    assert all(cluster.scheduler.block_map.instances[block] == ["d0"] for block in blocks)


class Stuffed(IntegerEngine):
    """An engine that refuses every load while it is full.

    `asked`: how many loads it was sent.
    """

    asked = 0
    full = True

    def load(self, stage: Stage) -> ModelSpec:
        self.asked += 1
        if self.full:
            raise NotServable("no room yet")
        return super().load(stage)


def stuffed(*, ticks: int = 4000) -> tuple[VirtualCluster, Stuffed]:
    engine = Stuffed([M], 256, device="d0")
    cluster = VirtualCluster(
        [M], devices=1, config=ClusterConfig(devices=1, placement="replicate"), make_engine=lambda name: engine
    )
    cluster.ticks(1000 * MS, ticks * 1000 * MS)
    return cluster, engine


def test_what_was_refused_is_tried_again_after_a_while_and_runs() -> None:
    """A device without room for the moment is tried again later in the same incarnation."""
    cluster, engine = stuffed(ticks=200)
    cluster.ask(request("a", range(4), "m"), at=MS)
    cluster.ask(request("soon", range(4), "m"), at=5_000 * MS)  # the load is not retried at once
    cluster.at(8_000 * MS, lambda: setattr(engine, "full", False))
    view, seen = ClusterView(cluster.scheduler, None, None, threading.Condition()), []  # type: ignore[arg-type]
    for second in (3, 14, 50):
        cluster.at(second * 1000 * MS, lambda: seen.append(view.refused()))
    cluster.ask(request("late", range(4), "m", max_tokens=8), at=60_000 * MS)
    cluster.run()
    ends = {seq: cluster.told[seq].last.finish for seq in ("a", "soon", "late")}
    assert ends == {"a": "error", "soon": "error", "late": "length"} and engine.asked == 2
    assert seen == [{"m[0:4]": "no room yet"}] * 3, (
        "whoever asks once all is loaded or refused hears of it, however long that took"
    )
    assert len(cluster.told["late"].tokens) == 8
    (device,) = cluster.scheduler.devices
    assert not device.stages.refused and not device.stages.refusals


def test_what_is_refused_again_and_again_is_asked_for_less_and_less() -> None:
    """One request a second for an hour: each ends with the reason, and few of them cost the device an attempt."""
    cluster, engine = stuffed()
    in_flight: list[int] = []
    for second in range(1, 3600):
        cluster.ask(request(f"s{second}", range(4), "m"), at=second * 1000 * MS)
        cluster.at(second * 1000 * MS + 500 * MS, lambda: in_flight.append(engine.asked))
    cluster.run()
    assert all("no room yet" in (told.last.error or "") for told in cluster.told.values())
    at = [second for second, (before, after) in enumerate(pairwise([0, *in_flight])) if after > before]
    pauses = [after - before for before, after in pairwise(at)]
    assert all(15 <= pause <= 965 for pause in pauses) and pauses == sorted(pauses) and 6 <= len(at) <= 10


@pytest.mark.parametrize("large", range(12))
def test_the_one_of_many_devices_that_is_large_enough_is_found(large: int) -> None:
    """Each request weighs only some of the candidates."""

    def made(name: str) -> IntegerEngine:
        return IntegerEngine([M], 40 if name == f"d{large}" else 8, device=name)

    cluster = VirtualCluster([M], devices=12, config=ClusterConfig(devices=12, placement="replicate"), make_engine=made)
    cluster.ask(request("long", range(30), "m", max_tokens=20), at=50 * MS)
    cluster.run()
    cluster.expect()
