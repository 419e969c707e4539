"""Models that do not fit together are all served: stages come when requests need them, and others leave (QL-13)."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from runtime.config import ClusterConfig, ControlConfig
from runtime.control.agent_io import DropStage
from runtime.engine.fakes.integer_model import IntegerModel, counting_model
from tests.runtime.scheduler.virtual_cluster import MS, Node, VirtualCluster
from tests.runtime.virtual import request

#: A part is 1000 bytes. Each model has three parts of its own, behind three that all share.
SHARED = "1* 2 3*"


def family(count: int, max_model_len: int = 64) -> list[IntegerModel]:
    return [
        counting_model(f"m{at}", f"{SHARED} {at + 10}* {at + 50} {at + 90}", max_model_len=max_model_len)
        for at in range(count)
    ]


@dataclass
class Swapping(VirtualCluster):
    """A cluster whose devices' weights are checked against their limit after every event.

    Where they have a budget, so is the sum of weights and of pages with memory.
    """

    most: dict[str, int] = field(default_factory=dict)

    def check(self) -> None:
        super().check()
        for node in self.living():
            held, limit = node.engine.memory().weights, self.limits[int(node.name[1:])]
            assert held <= limit, (node.name, held)
            self.most[node.name] = max(self.most.get(node.name, 0), held)
            if self.budget:
                pages = len(node.engine.touched) * node.engine.page_bytes  # type: ignore[attr-defined]
                assert held + pages <= self.budget, (node.name, held, pages)
            device = self.scheduler.devices.get(node.name)
            counted = set() if device is None else set(device.stages.loaded)
            there = set(node.engine._stages.values())  # type: ignore[attr-defined]
            assert counted <= there, "the scheduler counts a stage that is not there"


def swapping(models: list[IntegerModel], limit: int, devices: int = 1, **config: object) -> Swapping:
    settings = dict(devices=devices, residency="swap", swap_patience_ms=5, control=ControlConfig.off())
    return Swapping(
        models, cuts=[(3,)] * len(models), devices=devices, limits=[limit] * devices,
        config=ClusterConfig(**settings | config),  # type: ignore[arg-type]
    )  # fmt: skip


def test_every_model_that_fits_alone_is_served() -> None:
    """Room for the shared parts and two models' own; ten models in turn."""
    cluster = swapping(family(10), 9_000)
    for at in range(10):
        cluster.ask(request(f"s{at}", (1, 2, 3), f"m{at}", max_tokens=3), at=at * 50 * MS)
    cluster.run()
    cluster.expect()
    counts = cluster.scheduler.residency.counts
    assert counts.loads == 10 and counts.unloads == 8
    assert counts.loaded_bytes == 3_000 + 10 * 3_000, "exactly the missing blocks come"


def test_an_unload_names_the_stage_that_comes_in_its_place() -> None:
    """So that the host's memory does not give up what comes for what leaves (UN-04)."""
    cluster, drops = swapping(family(4), 9_000), list[DropStage]()
    obey = cluster.obey

    def noted(node: Node, commands: Iterable[Any]) -> None:
        commands = list(commands)
        drops.extend(each for each in commands if isinstance(each, DropStage))
        obey(node, commands)

    cluster.obey = noted  # type: ignore[method-assign]
    for at in range(4):
        cluster.ask(request(f"s{at}", (1, 2, 3), f"m{at}", max_tokens=3), at=at * 50 * MS)
    cluster.run()
    cluster.expect()
    assert [(drop.stage.model[:2], drop.coming[0].model[:2]) for drop in drops] == [("m0", "m2"), ("m1", "m3")]


def test_fixed_residency_refuses_what_does_not_fit_beside_the_others() -> None:
    cluster = swapping(family(3), 9_000, residency="fixed")
    for at in range(3):
        cluster.ask(request(f"s{at}", (1, 2), f"m{at}", max_tokens=2), at=10 * MS)
    cluster.run()
    assert [cluster.told[f"s{at}"].last.finish for at in range(3)] == ["length", "length", "error"]
    assert "cannot hold" in (cluster.told["s2"].last.error or "")


def test_a_model_that_does_not_fit_alone_is_refused_with_the_reason() -> None:
    cluster = swapping([*family(2), counting_model("big", " ".join(f"{n}*" for n in range(200, 212)))], 9_000)
    cluster.cuts = [(3,), (3,), (3,)]
    cluster.ask(request("s", (1, 2), "big"), request("t", (1, 2), "m1"), at=10 * MS)
    cluster.run()
    assert "fits no device: it needs 12000 bytes" in (cluster.told["s"].last.error or "")
    assert cluster.told["t"].last.finish == "length"


def test_the_stage_that_is_needed_last_leaves_first() -> None:
    """m3 comes while m0 and m1 are idle, and m2 runs on the only place. m0 has a later waiting sequence, m1 none."""
    for order, gone in (("furthest", "m1"), ("lru", "m0")):
        cluster = swapping(family(4), 12_000, eviction=order, max_num_seqs=1)
        for at, (model, tokens) in enumerate((("m0", 2), ("m1", 2), ("m2", 30))):
            cluster.ask(request(f"s{at}", (1,), model, max_tokens=tokens), at=at * 20 * MS)
        cluster.ask(request("later", (1,), "m0", max_tokens=2, arrival=2), at=50 * MS)
        cluster.ask(request("first", (1,), "m3", max_tokens=2, arrival=1), at=51 * MS)
        cluster.run()
        cluster.expect()
        assert cluster.trace.named("stage.unload")[0].extra["stage"].startswith(gone), order


def test_a_popular_model_does_not_keep_another_out_for_ever() -> None:
    """m0 always has a running sequence. m1 waits its patience, then m0 takes no new ones, and leaves."""
    cluster = swapping(family(2), 6_000)
    for at in range(60):
        cluster.ask(request(f"p{at}", (1, 2), "m0", max_tokens=6), at=at * 4 * MS)
    cluster.ask(request("other", (1, 2), "m1", max_tokens=2), at=30 * MS)
    cluster.ticks(5 * MS, 600 * MS)
    cluster.run()
    cluster.expect()
    assert cluster.trace.named("stage.close"), "nothing was closed for it"
    ends = {event.seq: event.t for event in cluster.trace.events if event.ev == "finish"}
    assert ends["other"] < ends["p40"], "it waited for all of the popular model's sequences"


def test_a_sequence_that_leaves_while_it_waits_for_room_closes_nothing_for_ever() -> None:
    cluster = swapping(family(2), 6_000)
    cluster.ask(request("long", (1, 2), "m0", max_tokens=40))
    cluster.ask(request("other", (1, 2), "m1", max_tokens=2), at=10 * MS)
    cluster.abort("other", at=30 * MS)
    cluster.ask(request("late", (1, 2), "m0", max_tokens=2), at=32 * MS)
    cluster.ticks(2 * MS, 200 * MS)
    cluster.run()
    assert cluster.told["late"].last.finish == "length"
    ends = {event.seq: event.t for event in cluster.trace.events if event.ev == "finish"}
    assert ends["late"] < ends["long"]


@pytest.mark.parametrize("seed", range(12))
def test_random_requests_over_devices_that_die(seed: int) -> None:
    """Tokens are right, no device ever holds more than it may, and everything ends."""
    rng = random.Random(seed)
    count, devices = rng.choice((4, 9, 16)), rng.choice((1, 1, 2, 3))
    cluster = swapping(
        family(count), rng.choice((6_000, 7_000, 9_500, 15_000)), devices, eviction=rng.choice(("furthest", "lru")),
        prefix_caching=rng.choice(("off", "active", "cached")), max_num_seqs=rng.choice((2, 8, 64)),
        placement=rng.choice(("auto", "replicate", "on-demand")),
        control=ControlConfig(interval_ms=5, idle_ms=40, cooldown_ms=20) if rng.random() < 0.5 else ControlConfig.off(),
    )  # fmt: skip
    cluster.pages = rng.choice((40, 256))
    cluster.loading = lambda: rng.choice((MS // 10, 3 * MS, 20 * MS))
    for at in range(rng.randrange(10, 40)):
        model = f"m{min(int(rng.paretovariate(0.8)) - 1, count - 1)}"
        prompt = [rng.randrange(90) for _ in range(rng.randrange(1, 10))]
        cluster.ask(request(f"s{at}", prompt, model, max_tokens=rng.randrange(1, 12)), at=rng.randrange(150 * MS))
    for _ in range(rng.choice((0, 0, 3))):
        cluster.at(rng.randrange(200 * MS), lambda: cluster.kill(f"d{rng.randrange(devices)}"))
    cluster.ticks(5 * MS, 1500 * MS)
    cluster.run()
    cluster.expect()


def test_no_later_sequence_loads_a_model_past_one_that_waits_for_room() -> None:
    """Two models' own parts are in use by long sequences, a third's is idle. `big` needs two of these places."""
    big = counting_model("big", f"{SHARED} 200* 201 202 203 204 205")
    cluster = swapping([*family(4), big], 12_000)
    for at, tokens in ((0, 60), (1, 60), (2, 1)):
        cluster.ask(request(f"s{at}", (1,), f"m{at}", max_tokens=tokens), at=at * MS)
    cluster.ask(request("big", (1,), "big", max_tokens=1), at=40 * MS)
    cluster.ask(request("late", (1,), "m3", max_tokens=1), at=42 * MS)
    cluster.ticks(2 * MS, 300 * MS)
    cluster.run()
    cluster.expect()
    ends = {event.seq: event.t for event in cluster.trace.events if event.ev == "finish"}
    assert ends["big"] < ends["late"]
