"""Weights and pages of a device share one budget: what weights leave is pages, and each gives way to the other."""

from __future__ import annotations

import random

import pytest

from runtime.config import ClusterConfig, ControlConfig
from runtime.engine.fakes.integer_model import IntegerModel
from tests.runtime.scheduler.residency.test_swapping import Swapping, family
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import request

#: Bytes of a page. A model of `family` has 3 pages per 4 tokens, 48 for its longest sequence; its own parts have 3,000
#: bytes (46.9 pages), and the parts that all share as many.
PAGE = 64
LONGEST = 48


def sharing(
    models: list[IntegerModel], budget: int, least: int = LONGEST, devices: int = 1, **config: object
) -> Swapping:
    """A cluster of devices with `budget` bytes, of which weights leave `least` pages at all times."""
    settings = dict(devices=devices, residency="swap", swap_patience_ms=5, control=ControlConfig.off())
    return Swapping(
        models, cuts=[(3,)] * len(models), devices=devices, limits=[budget - least * PAGE] * devices, budget=budget,
        pages=budget // PAGE, config=ClusterConfig(**settings | config),  # type: ignore[arg-type]
    )  # fmt: skip


def capacity(cluster: Swapping) -> int:
    """Return the page capacity of the only device, which is also what its agent says; nothing is in use."""
    (node,) = cluster.living()
    counts = node.agent.pages()
    pages = cluster.scheduler.devices["d0"].pages.capacity
    assert counts.capacity == counts.free == pages
    return pages


def left_by(parts: int, budget: int) -> int:
    return (budget - parts * 1000) // PAGE


def ended(cluster: Swapping) -> dict[str | None, int]:
    return {event.seq: event.t for event in cluster.trace.events if event.ev == "finish"}


def test_pages_are_what_weights_leave() -> None:
    cluster, seen = sharing(family(9), 16_000), []
    for at in range(9):
        cluster.ask(request(f"s{at}", (1, 2, 3), f"m{at}", max_tokens=3), at=at * 50 * MS)
        cluster.run(until=(at * 50 + 40) * MS)
        seen.append(capacity(cluster))
    cluster.run()
    cluster.expect()
    assert seen == [left_by(parts, 16_000) for parts in (6, 9, 12, 12, 12, 12, 12, 12, 12)]
    assert cluster.scheduler.residency.counts.unloads == 6


def test_a_stage_that_cannot_be_loaded_gives_its_memory_back() -> None:
    cluster = sharing(family(9), 16_000)
    cluster.ask(request("s", (1, 2), "m0", max_tokens=2))
    cluster.run(until=20 * MS)
    before = capacity(cluster)
    (node,) = cluster.living()
    del node.engine._models["m1"]  # type: ignore[attr-defined]
    cluster.ask(request("t", (1, 2), "m1", max_tokens=2), at=20 * MS)
    cluster.run()
    assert cluster.told["t"].last.finish == "error" and capacity(cluster) == before == left_by(6, 16_000)


def test_the_longest_sequence_runs_beside_all_the_weights_that_a_device_takes() -> None:
    """Its pages are there, however many models are loaded; one page less would have shortened it."""
    cluster = sharing(family(9), 15_100)  # 12 parts leave 48 pages
    for at in range(3):
        cluster.ask(request(f"s{at}", (1, 2), f"m{at}", max_tokens=2), at=at * 20 * MS)
    cluster.ask(request("long", (1,) * 10, "m2", max_tokens=54), at=80 * MS)
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.residency.counts.unloads == 0 and len(cluster.told["long"].tokens) == 54


def test_a_load_takes_cached_prefixes_before_other_stages() -> None:
    cluster = sharing(family(9), 16_000, prefix_caching="cached")
    cluster.ask(request("a", range(44), "m0", max_tokens=2))
    cluster.ask(request("b", range(44, 88), "m1", max_tokens=2), at=30 * MS)
    cluster.run(until=60 * MS)
    pages = cluster.scheduler.devices["d0"].pages
    assert pages.idle == 2 * 33 and pages.capacity == left_by(9, 16_000)
    cluster.ask(request("c", (1, 2), "m2", max_tokens=2), at=60 * MS)
    cluster.run()
    counts = cluster.scheduler.prefix_cache.counts()
    cluster.expect()
    assert (counts.evicted, counts.standing) == (1, 1), "62 pages are left for the 66 of the prefixes"
    assert cluster.scheduler.residency.counts.unloads == 0


def busy_pages(cluster: Swapping, count: int, model: str, tokens: int = 50, at: int = 0) -> None:
    for number in range(count):
        cluster.ask(request(f"{model}.{number}", (number, 1), model, max_tokens=tokens), at=at)


def test_a_load_takes_no_page_of_a_running_sequence() -> None:
    """Four sequences come to have 156 pages, which leave room for 6 parts. The load waits for the first of them."""
    cluster = sharing(family(9), 16_000)
    busy_pages(cluster, 4, "m0")
    cluster.ask(request("other", (1, 2), "m1", max_tokens=2), at=45 * MS)
    cluster.ticks(5 * MS, 400 * MS)
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.state().counters.preemptions == 0
    assert cluster.trace.named("stage.wait") and ended(cluster)["other"] > min(ended(cluster).values())


def test_sequences_that_keep_coming_do_not_keep_a_load_out_for_ever() -> None:
    """The pages of a popular model's sequences are in the way; after some time later ones take no more."""
    cluster = sharing(family(9), 16_000, eviction="lru")
    for at in range(60):
        cluster.ask(request(f"p{at}", (at, 2), "m0", max_tokens=40, arrival=at * 6 * MS), at=at * 6 * MS)
    cluster.ask(request("other", (1, 2), "m1", max_tokens=2, arrival=62 * MS), at=62 * MS)
    cluster.ticks(5 * MS, 1500 * MS)
    cluster.run()
    cluster.expect()
    assert ended(cluster)["other"] < ended(cluster)["p25"], "it waited for all of the popular model's sequences"


@pytest.mark.parametrize("idle", [2, 40])
def test_idle_stages_leave_for_pages_once_they_have_been_idle_for_long(idle: int) -> None:
    """m0 and m1 are idle from 30 ms on; six sequences of m2 find room for four at first. 20 ms count as long."""
    cluster = sharing(family(9), 16_000, swap_patience_ms=20)
    for at, model in enumerate(("m2", "m1", "m0", "m1")):
        cluster.ask(request(f"s{at}", (1, 2), model, max_tokens=1), at=at * 9 * MS)
    cluster.ticks(MS, 300 * MS)
    for at in range(6):
        cluster.ask(request(f"t{at}", (at,) * 20, "m2", max_tokens=20), at=(30 + idle) * MS)
    cluster.run(until=(32 + idle) * MS)
    scheduler = cluster.scheduler
    assert (len(scheduler._state.running), scheduler.residency.counts.unloads) == ((4, 0) if idle == 2 else (6, 1))
    cluster.run()
    cluster.expect()
    assert scheduler.residency.counts.unloads > 0, "they did not wait for each other, but for a tick"


def test_a_sequence_that_grows_lets_an_idle_stage_leave_instead_of_being_preempted() -> None:
    for budget, preempted in ((16_000, False), (12_100, True)):  # in the second there is no idle stage
        cluster = sharing(family(9), budget)
        for at in range(3 if budget > 13_000 else 1):
            cluster.ask(request(f"s{at}", (1, 2), f"m{at}", max_tokens=1), at=at * 10 * MS)
        busy_pages(cluster, 3, "m0", 55, at=100 * MS)
        cluster.ticks(5 * MS, 600 * MS)
        cluster.run()
        cluster.expect()
        assert (cluster.scheduler.state().counters.preemptions > 0) == preempted, budget
        assert (cluster.scheduler.residency.counts.unloads > 0) != preempted, budget


@pytest.mark.parametrize("seed", range(16))
def test_random_requests_over_devices_that_die(seed: int) -> None:
    """Tokens are right, weights and touched pages never exceed the budget, and everything ends."""
    rng = random.Random(seed)
    count, devices = rng.choice((4, 9, 16)), rng.choice((1, 1, 2, 3))
    least = rng.choice((LONGEST, LONGEST, 60))
    cluster = sharing(
        family(count), rng.choice((6_000, 7_000, 9_500, 15_000)) + least * PAGE, least, devices,
        eviction=rng.choice(("furthest", "lru")), prefix_caching=rng.choice(("off", "active", "cached")),
        max_num_seqs=rng.choice((2, 8, 64)), placement=rng.choice(("auto", "replicate", "on-demand")),
        control=ControlConfig(interval_ms=5, idle_ms=40, cooldown_ms=20) if rng.random() < 0.5 else ControlConfig.off(),
    )  # fmt: skip
    cluster.loading = lambda: rng.choice((MS // 10, 3 * MS, 20 * MS))
    for at in range(rng.randrange(10, 50)):
        model = f"m{min(int(rng.paretovariate(0.8)) - 1, count - 1)}"
        prompt = [rng.randrange(9) for _ in range(rng.randrange(1, 30))]
        cluster.ask(request(f"s{at}", prompt, model, max_tokens=rng.randrange(1, 34)), at=rng.randrange(150 * MS))
    for _ in range(rng.choice((0, 0, 3))):
        cluster.at(rng.randrange(200 * MS), lambda: cluster.kill(f"d{rng.randrange(devices)}"))
    cluster.ticks(5 * MS, 2500 * MS)
    cluster.run()
    cluster.expect()
