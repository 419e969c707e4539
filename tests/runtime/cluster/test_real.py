"""Stored models over real agents, as plain processes and as Ray actors: each model's own tokens, whatever happens.

- Two agents as `zoo serve --agents 2` starts them, with every mechanism off.
- Three agents with moves of each kind, instances that come, go and change places, speculated hops and `kill -9`.

Agents are slow to start, so all tests of a kind share theirs. Ray is an extra; the skip message says so if it is
missing.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from cli.serving.cluster import start_cluster
from cli.serving.models import Chosen
from cli.serving.options import gather
from runtime.chains import devices_of
from runtime.cluster.driver.driver import ClusterDriver
from runtime.config import ClusterConfig, ControlConfig, SpeculationConfig
from runtime.scheduler.controllers.actions import Drain, MoveRequest
from runtime.scheduler.scheduler import Scheduler
from tests.runtime.cluster.clusters import eventually
from tests.runtime.cluster.real import (
    MODELS,
    Load,
    Question,
    answers_of,
    asked,
    cluster,
    on_scheduler,
    put_family,
    tokens,
)
from tests.runtime.engine.conftest import Bench, bench  # noqa: F401
from tests.runtime.virtual import ListTrace
from zoo import Zoo

NO_RAY = pytest.mark.skipif(
    find_spec("ray") is None,
    reason="RAY IS NOT INSTALLED: real models on actors are not tested (pip install 'blockzoo[ray]')",
)
BACKENDS = ["processes", pytest.param("ray", marks=NO_RAY)]
DEVICES = ("agent-0", "agent-1", "agent-2")
SOON = 180.0


@pytest.fixture(scope="module")
def family(bench: Bench) -> Bench:  # noqa: F811
    put_family(bench)
    return bench


@pytest.fixture(scope="module")
def answers(family: Bench) -> dict[Question, list[int]]:
    return answers_of(family)


@pytest.fixture(scope="module", params=BACKENDS)
def two(request: pytest.FixtureRequest, family: Bench) -> Iterator[ClusterDriver]:
    """A cluster as `zoo serve` makes it, without prefix caching; no periodic mechanism is due during the tests."""
    given = {
        "agents": 2,
        "backend": request.param,
        "placement": "partition",
        "prefix_caching": "off",
        "kv_cache_memory_bytes": "8MiB",
    }
    with Zoo(family.store.root) as zoo:
        driver = start_cluster(zoo, gather(None, given), Chosen(tuple(MODELS), ()), None, None)
        try:
            yield driver
        finally:
            assert driver.shutdown(SOON)


@pytest.fixture(scope="module", params=BACKENDS)
def three(request: pytest.FixtureRequest, family: Bench) -> Iterator[tuple[ClusterDriver, Any, ListTrace]]:
    control = ControlConfig(
        rebalance="owner",
        rebalance_margin=1,
        interval_ms=20,
        rearrange_interval_ms=200,
        idle_ms=1500,
        cooldown_ms=100,
        migration_timeout_ms=5000,
    )
    config = ClusterConfig(
        placement="partition",
        prefix_caching="off",
        prefill_chunk=8,
        migration_final_sets=1,
        control=control,
        speculation=SpeculationConfig("exact", top=0.5),
    )
    trace = ListTrace()
    with cluster(family, request.param, 3, config, trace) as (driver, launcher):
        yield driver, launcher, trace


def at_rest(driver: ClusterDriver) -> bool:
    """Return whether no sequence runs and every page is free, by the scheduler's and each agent's count.

    Cached prefixes are dropped first.
    """

    def look(scheduler: Scheduler, now: int) -> bool:
        scheduler.prefix_cache.clear()
        return not scheduler.busy and all(device.alive and device.pages.used == 0 for device in scheduler.devices)

    reports = driver.view.reports()
    return bool(on_scheduler(driver, look)) and all(
        each.pages_free == driver._scheduler.devices[each.device].pages.capacity for each in reports.values()
    )


def test_plain_batches_over_two_agents_give_each_models_own_tokens(
    two: ClusterDriver, answers: dict[Question, list[int]]
) -> None:
    """All questions are sent at once."""
    ones = {f"q{number}": question for number, question in enumerate(answers)}
    got: dict[str, list[Any]] = {seq: [] for seq in ones}
    for event in two.run([asked(question, seq) for seq, question in ones.items()]):
        got[event.seq].append(event)
    assert {question: tokens(got[seq]) for seq, question in ones.items()} == answers
    for chain in two._scheduler.chains():
        assert {name for use in chain.uses for name in two._scheduler.block_map.instances[use.block]} == {
            *DEVICES[:2]
        }  # the chain is spread over both agents
    counters = two.state().counters
    assert (
        two.view.moves().started,
        two.view.speculation().started,
        two._scheduler.sharing().matches,
        counters.preemptions,
    ) == (
        0,
        0,
        0,
        0,
    )
    assert eventually(lambda: at_rest(two))


def test_moves_of_each_kind(three: tuple[ClusterDriver, Any, ListTrace], answers: dict[Question, list[int]]) -> None:
    driver, _, _ = three
    rng = random.Random(1)
    before = driver.view.moves()

    def move(scheduler: Scheduler, now: int, ends: dict[str, bool]) -> None:
        running = [each for each in scheduler.sequences.values() if each.path]
        if running:
            sequence = rng.choice(running)
            devices = devices_of(sequence.chain, sequence.path)
            first = rng.choice((0, rng.randrange(len(devices)))) if ends.get("copy", True) else 0
            last = first + 1
            while last < len(devices) and devices[last] == devices[first] and rng.random() < 0.6:
                last += 1
            scheduler.migrations.start(sequence, range(first, last), rng.choice(DEVICES), now, **ends)

    with Load(driver, answers) as load:
        for ends, part in (({"copy": False}, "recomputed"), ({"recompute": False}, "copied"), ({}, "committed")):
            start = getattr(driver.view.moves(), part)

            def moved(ends: dict[str, bool] = ends, part: str = part, start: int = start) -> bool:
                on_scheduler(driver, lambda scheduler, now: move(scheduler, now, ends))
                return getattr(driver.view.moves(), part) > start + (40 if part != "committed" else 5) or bool(
                    load.wrong
                )

            assert eventually(moved, SOON)
    assert load.wrong == [] and load.done
    assert driver.view.moves().committed > before.committed
    between = []
    on_scheduler(driver, lambda scheduler, _: between.extend(each.facts.between_steps for each in scheduler.devices))
    assert between and all(between), "what a move is expected to take depends on it"
    assert eventually(lambda: at_rest(driver))


def test_blocks_of_the_middle_recomputed_from_what_was_kept(family: Bench, answers: dict[Question, list[int]]) -> None:
    """Over real processes, hidden states are sent for the front and pages for the back; tokens are each model's own."""
    config, trace, rng = (
        ClusterConfig(placement="partition", prefix_caching="off", prefill_chunk=8, migration_final_sets=1),
        ListTrace(),
        random.Random(2),
    )

    def move(scheduler: Scheduler, now: int, ends: dict[str, bool]) -> None:
        running = [each for each in scheduler.sequences.values() if len(each.path) > 1]
        if running:
            sequence = rng.choice(running)
            hop = rng.choice(sequence.path[1:])
            blocks = [at for at, use in enumerate(sequence.chain.uses) if hop.lo <= use.lo < hop.hi]
            scheduler.migrations.start(sequence, range(blocks[0], blocks[-1] + 1), rng.choice(DEVICES), now, **ends)

    with (
        cluster(family, "processes", 3, config, trace, boundary_bytes=1 << 24) as (driver, _),
        Load(driver, answers, clients=4) as load,
    ):

        def moved(ends: dict[str, bool], start: int) -> bool:
            on_scheduler(driver, lambda scheduler, now: move(scheduler, now, ends))
            return driver.view.moves().inputs > start or bool(load.wrong)

        for ends in ({}, {"copy": False}):
            start = driver.view.moves().inputs
            assert eventually(lambda ends=ends, start=start: moved(ends, start), SOON)
        before = load.done
        assert eventually(lambda: load.done > before + 4 or bool(load.wrong), SOON)
    assert load.wrong == []
    told = [event for event in trace.named("kv.recompute") if event.extra["front"] == "inputs"]
    assert told and all(event.bytes and event.n for event in told)


def test_predicted_hops_and_a_death(
    three: tuple[ClusterDriver, Any, ListTrace], answers: dict[Question, list[int]]
) -> None:
    """The hop of the blocks that a stand-in replaces is speculated exactly, while an agent is killed."""
    driver, launcher, _ = three
    (chain,) = (each for each in driver._scheduler.chains() if each.model == "llama")
    blocks = [use.block for use in chain.uses if use.lo < 5 and use.hi > 3]

    def where(block: str) -> list[str]:
        return list(driver._scheduler.block_map.instances[block])

    home = where(chain.uses[0].block)[0]  # the device where the chain begins, which is never the last hop

    def gather(scheduler: Scheduler, now: int) -> None:
        for block, source in [(each, name) for each in blocks for name in where(each) if name != home]:
            scheduler.control.actions.grow([block], home, "BL-24", now)
            scheduler.control.actions.drain(Drain(frozenset([block]), source, home, now + 20_000_000_000, "BL-26"))

    def gathered() -> bool:
        if all(where(block) == [home] for block in blocks):
            return True
        on_scheduler(driver, gather)
        return False

    assert eventually(gathered, SOON)
    on_scheduler(driver, lambda scheduler, now: scheduler.speculation.pin([(block, home) for block in blocks]))
    with Load(driver, {question: answer for question, answer in answers.items() if question[0] == "llama"}) as load:
        assert eventually(
            lambda: driver.view.speculation().hits + driver.view.speculation().misses > 10 or bool(load.wrong), SOON
        )
        victim = launcher.pid("agent-1", driver._remote_agents.lifecycles.incarnation("agent-1"))
        os.kill(victim, signal.SIGKILL)
        assert eventually(lambda: driver.agents()[1].deaths == 1 and driver.health()["status"] == "ok", SOON)
        before = load.done
        assert eventually(lambda: load.done > before + 5 or bool(load.wrong), SOON)
    on_scheduler(driver, lambda scheduler, now: scheduler.speculation.pin(None))
    assert load.wrong == []
    assert eventually(lambda: at_rest(driver))


def test_instances_come_and_go_and_change_places(
    three: tuple[ClusterDriver, Any, ListTrace], answers: dict[Question, list[int]]
) -> None:
    """For several blocks in turn: add an instance, move sequences to it, and remove the old instance."""
    driver, _, trace = three
    names = list(dict.fromkeys(use.block for chain in driver._scheduler.chains() for use in chain.uses))

    def grow(scheduler: Scheduler, now: int, block: str, target: str) -> None:
        orders = scheduler.control.actions
        orders.grow([block], target, "BL-24", now)
        for seq, sequence in scheduler.sequences.items():
            for use, source in zip(
                sequence.chain.uses, devices_of(sequence.chain, sequence.path) if sequence.path else (), strict=False
            ):
                if use.block == block and source != target:
                    orders.move_request(
                        MoveRequest(seq, frozenset([block]), source, target, now + 5_000_000_000, "BL-24")
                    )

    def where(block: str) -> list[str]:
        return list(driver._scheduler.block_map.instances[block])

    said: list[str | None] = []

    def leave(scheduler: Scheduler, now: int, block: str, source: str, target: str) -> None:
        grow(scheduler, now, block, target)
        drain = Drain(frozenset([block]), source, target, now + 20_000_000_000, "BL-26")
        said.append(scheduler.control.actions.drain(drain))

    with Load(driver, answers, clients=3) as load:
        for block in names[1:7:2]:
            source, target = where(block)[0], next(name for name in DEVICES if name not in where(block)[:1])

            def left(block: str = block, source: str = source, target: str = target) -> bool:
                if source not in where(block) or load.wrong:
                    return True
                on_scheduler(driver, lambda scheduler, now: leave(scheduler, now, block, source, target))
                return False

            assert eventually(left, SOON), said[-1]
    assert load.wrong == []
    counts = driver._scheduler.control.counts
    assert counts.grown >= 3 and counts.dropped >= 3 and counts.moved > 0
    assert len(trace.named("instance.add")) >= 3
    assert eventually(lambda: at_rest(driver))
