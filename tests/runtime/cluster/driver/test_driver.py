"""The cluster driver as a server uses it: tokens over real processes, deaths, hangs, refusals and shutdown.

Nothing is lost or delivered twice.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from runtime.cluster.agents.lifecycle import LifeConfig
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.launch.launcher import AgentSlot
from runtime.cluster.launch.processes import ProcessConfig, ProcessLauncher
from runtime.config import ClusterConfig
from runtime.control.scheduler_io import ServeModel
from runtime.engine.fakes.integer_model import IntegerModel, counting_model, expected
from runtime.messages import RowsDone
from runtime.transport.messenger import Messenger
from runtime.types import TokenEvent
from tests.runtime.cluster.agent_programs import counting
from tests.runtime.cluster.clusters import (
    CUTS,
    DEVICES,
    LIMIT,
    MODELS,
    Load,
    answered,
    at_rest,
    blocks,
    cluster,
    eventually,
    oracle,
    processes,
    request,
    verify,
)
from zoo.errors import NotFound, NotServable, Unavailable

#: A later version of MODELS[1].
NEXT = counting_model("org/n-2", "1 2* 3 4* 5 6* 7 10", max_model_len=512)
EAGER = LifeConfig(silent_seconds=1.0, backoff_seconds=0.02, steady_seconds=0.1, starts=6)


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[ClusterDriver, ProcessLauncher]]:
    launcher = processes(pace=0.3)
    with cluster(launcher, EAGER) as driver:
        yield driver, launcher


@pytest.fixture
def driver(running: tuple[ClusterDriver, ProcessLauncher]) -> Iterator[ClusterDriver]:
    assert eventually(lambda: running[0].health()["status"] == "ok")
    yield running[0]
    assert eventually(lambda: at_rest(running[0])), running[0].state()


@pytest.fixture
def launcher(running: tuple[ClusterDriver, ProcessLauncher]) -> ProcessLauncher:
    return running[1]


def pid(driver: ClusterDriver, launcher: ProcessLauncher, device: str) -> int:
    found = launcher.pid(device, driver._remote_agents.lifecycles.incarnation(device))
    assert found is not None
    return found


def requests(prefix: str, count: int = 8, max_tokens: int = 12) -> list[Any]:
    return [
        request(f"{prefix}{at}", range(at + 1, at + 20), MODELS[at % 2].spec.name, max_tokens) for at in range(count)
    ]


def test_tokens_are_the_models_own_over_three_processes(driver: ClusterDriver) -> None:
    ones = requests("t")
    got = answered(driver, ones)
    for one in ones:
        verify(one, got[one.seq])
    assert {
        hop
        for model in MODELS
        for use in model.chain(*CUTS).uses
        for hop in driver._scheduler.block_map.instances[use.block]
    } == {*DEVICES}


def test_agents_say_on_which_machine_they_are(driver: ClusterDriver) -> None:
    assert {device.facts.server for device in driver._scheduler.devices} == {platform.node()}


def test_tokens_are_the_models_own_over_three_threads() -> None:
    with cluster("threads") as threaded:
        ones = requests("t")
        got = answered(threaded, ones)
        for one in ones:
            verify(one, got[one.seq])
        assert threaded.restart("b", LIMIT)
        (again,) = requests("u", 1)
        verify(again, answered(threaded, [again])["u0"])


def test_over_the_network_everything_is_encrypted_and_works() -> None:
    launcher = processes(host="127.0.0.1", warm=False)
    with cluster(launcher) as driver:
        assert launcher.seat.keys is not None and driver._remote_agents._messenger.address.startswith(
            "tcp://127.0.0.1:"
        )
        ones = requests("n", 2)
        got = answered(driver, ones)
        for one in ones:
            verify(one, got[one.seq])


def test_streams_work_on_an_event_loop_and_leaving_aborts(driver: ClusterDriver) -> None:
    async def whole() -> list[TokenEvent]:
        async with asyncio.timeout(LIMIT), driver.open_stream([request("s", [1, 2, 3])]) as stream:
            return [event async for events in stream for event in events]

    async def part() -> None:
        async with asyncio.timeout(LIMIT), driver.open_stream(requests("p", 3, 400)) as stream:
            await anext(stream)

    verify(request("s", [1, 2, 3]), asyncio.run(whole()))
    asyncio.run(part())
    assert eventually(lambda: at_rest(driver))


def test_what_cannot_be_served_is_refused_with_the_reason(driver: ClusterDriver) -> None:
    (end,) = answered(driver, [request("r", [1], model="org/none")])["r"]
    assert end.finish == "error" and "not loaded" in str(end.error)
    (end,) = answered(driver, [request("r", range(600))])["r"]
    assert end.finish == "error"
    with pytest.raises(ValueError, match="same name"):
        driver.run([request("r", [1]), request("r", [1])])


def test_models_come_and_go_and_are_replaced_under_load() -> None:
    """Over real processes: running sequences keep their version, and unused versions are unloaded from agents."""
    newer = counting_model("org/m-2", "1 2* 3 4* 5 6* 7 11", max_model_len=512)

    def described(model: IntegerModel, name: str) -> ServeModel:
        chain = model.chain(*CUTS)
        return ServeModel(
            replace(chain, spec=replace(chain.spec, name=name), source=model.spec.name), model.blocks(*CUTS)
        )

    launcher = processes(pace=0.3, models=(*MODELS, newer))
    chains = [MODELS[0].chain(*CUTS)]
    driver = ClusterDriver(
        chains,
        blocks(MODELS[:1]),
        DEVICES,
        launcher,
        ClusterConfig(placement="partition"),
        describe=lambda name: described(MODELS[1], name),
    )
    try:
        assert driver.load("org/n").name == "org/n"
        one = request("n", range(9), "org/n")
        verify(one, answered(driver, [one])["n"])
        old = request("old", range(7), max_tokens=300)
        events = driver.run([old])
        first = next(events)
        driver.serve(described(newer, "org/m"))
        new = request("new", range(7))
        assert [event.token for event in answered(driver, [new])["new"]] == expected(newer, new.prompt, new.sampling)
        verify(old, [first, *events])
        driver.unload("org/n")
        assert answered(driver, [request("late", [1], "org/n")])["late"][-1].finish == "error"
        with pytest.raises(NotServable, match="no model named"):
            driver.serve(described(counting_model("org/m-9", "1 2* 3 4* 5 6* 7 12"), "org/m"))
        assert eventually(lambda: at_rest(driver))
        held = {stage.model for device in driver._scheduler.devices for stage in device.stages.loaded}
        assert held == {"org/m-2"} and {spec.name for spec in driver.models()} == {"org/m"}
        assert driver.memory().weights_unshared == 8000
    finally:
        assert driver.shutdown(LIMIT)


def test_models_are_those_of_the_start(driver: ClusterDriver) -> None:
    assert {spec.name for spec in driver.models()} == {"org/m", "org/n"}
    assert driver.load("org/m").name == "org/m"
    with pytest.raises(NotServable):
        driver.load("org/other")
    with pytest.raises(NotServable):
        driver.unload("org/m")
    with pytest.raises(NotFound):
        driver.unload("org/other")


def test_memory_counts_what_is_on_all_devices(driver: ClusterDriver) -> None:
    answered(driver, requests("m", 2))
    memory = driver.memory()
    assert memory.weights == sum(block.nbytes for block in blocks()) and memory.weights_unshared == 16 * 1000
    assert memory.kv_pool == 3 * 400 * 64


def test_an_agent_that_is_killed_is_replaced_and_its_requests_go_on(
    driver: ClusterDriver, launcher: ProcessLauncher
) -> None:
    with Load(driver) as load:
        for device in DEVICES:
            before = load.done
            assert eventually(lambda before=before: load.done > before)  # type: ignore[misc]
            incarnation = driver._remote_agents.lifecycles.incarnation(device)
            os.kill(pid(driver, launcher, device), signal.SIGKILL)
            assert eventually(lambda d=device, i=incarnation: driver._remote_agents.lifecycles.incarnation(d) > i)  # type: ignore[misc]
            assert eventually(lambda: driver.health()["status"] == "ok")
    assert load.wrong == []
    facts = {each.device: each for each in driver.agents()}
    assert all("signal 9" in facts[device].reason or "cannot be reached" in facts[device].reason for device in DEVICES)


def test_an_agent_that_hangs_is_noticed_and_replaced(driver: ClusterDriver, launcher: ProcessLauncher) -> None:
    with Load(driver, clients=2) as load:
        assert eventually(lambda: load.done > 1)
        victim = pid(driver, launcher, "b")
        os.kill(victim, signal.SIGSTOP)
        assert eventually(lambda: driver.health()["status"] == "degraded")
        assert "not been heard of" in next(each.reason for each in driver.agents() if each.device == "b")
        assert eventually(lambda: driver.health()["status"] == "ok")
        before = load.done
        assert eventually(lambda: load.done > before + 2)
    assert load.wrong == []


def test_a_rolling_restart_loses_nothing(driver: ClusterDriver) -> None:
    deaths = {each.device: each.deaths for each in driver.agents()}
    with Load(driver) as load:
        assert eventually(lambda: load.done > 0)
        assert driver.roll(LIMIT)
    assert load.wrong == []
    assert {each.device: each.deaths for each in driver.agents()} == deaths


def test_whoever_says_what_is_not_its_to_say_is_replaced(driver: ClusterDriver, launcher: ProcessLauncher) -> None:
    impostor = Messenger("b", driver._remote_agents.lifecycles.incarnation("b"), purpose="main")
    impostor.learn("scheduler", 0, driver._remote_agents._messenger.address)
    incarnation = driver._remote_agents.lifecycles.incarnation("b")
    impostor.send("scheduler", RowsDone("a", ("s",), (1,), (1,), (None,)))
    assert eventually(lambda: driver._remote_agents.lifecycles.incarnation("b") > incarnation)
    impostor.close()
    assert eventually(lambda: driver.health()["status"] == "ok")
    one = request("i", [4, 5])
    verify(one, answered(driver, [one])["i"])


# -- tests with a cluster of their own ---------------------------------------------------------------------------------


def test_an_agent_of_another_version_is_refused_on_both_sides() -> None:
    chains = [model.chain(*CUTS) for model in MODELS]
    with pytest.raises(Unavailable, match=r"it is of version .* the cluster of '0.0.other'"):
        ClusterDriver(chains, blocks(), DEVICES, processes(warm=False), ClusterConfig(), version="0.0.other")


def test_an_engine_that_cannot_be_made_is_the_reason_why_there_is_no_cluster() -> None:
    broken = ProcessConfig(counting(MODELS, -1), warm=False)
    with pytest.raises(Unavailable, match="cannot be brought up"):
        ClusterDriver(
            [MODELS[0].chain(*CUTS)], blocks(), ["a"], ProcessLauncher(broken), ClusterConfig(), LifeConfig(starts=1)
        )


class NeverUp:
    """A launcher whose agents never come up. `bind`: the address on which the scheduler should listen."""

    def __init__(self, bind: str) -> None:
        self.seat, self.ended = AgentSlot(bind, context=zmq.Context()), False

    def attach(self, listener: Any, scheduler: str) -> None: ...

    def start(self, device: str, incarnation: int) -> None: ...

    def kill(self, device: str, incarnation: int) -> None: ...

    def shutdown(self, timeout: float) -> None:
        self.ended = True


@pytest.mark.parametrize("bind", ["nowhere", "ipc:///no/such/folder/scheduler"])
def test_a_scheduler_that_cannot_listen_is_a_reason_and_its_fleet_ends(bind: str) -> None:
    launcher = NeverUp(bind)
    with pytest.raises(Unavailable, match="cannot listen"):
        ClusterDriver([MODELS[0].chain(*CUTS)], blocks(), ["a"], launcher)
    assert launcher.ended


def test_ctrl_c_while_agents_come_up_ends_the_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(driver: ClusterDriver) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(ClusterDriver, "_complete", interrupt)
    launcher = NeverUp("inproc://interrupted")
    with pytest.raises(KeyboardInterrupt):
        ClusterDriver([MODELS[0].chain(*CUTS)], blocks(), ["a"], launcher)
    assert eventually(lambda: launcher.ended)


def test_a_drain_waits_for_a_request_that_is_just_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster("threads") as driver:
        drained, submit = [], driver._scheduler_loop.submit

        def late(requests: Any) -> None:
            drained.append(driver.drain(0.0))
            submit(requests)

        monkeypatch.setattr(driver._scheduler_loop, "submit", late)
        one = request("late", [1, 2])
        verify(one, list(driver.run([one])))
        assert drained == [False] and driver.drain(LIMIT)


def test_a_device_that_does_not_come_back_ends_what_needs_it() -> None:
    launcher = processes(pace=1.0)
    with cluster(launcher, LifeConfig(starts=1)) as driver:
        stream = driver.run([request("e", [1, 2, 3], max_tokens=400)])
        next(stream)
        (shared,) = driver._scheduler.block_map.instances[MODELS[0].chain(*CUTS).uses[0].block]
        os.kill(pid(driver, launcher, shared), signal.SIGKILL)
        end = list(stream)[-1]
        assert end.finish == "error" and "does not come back" in str(end.error)
        assert eventually(lambda: not driver.alive)
        # The end of the process and that of its socket are noticed on two ways; either may be first.
        assert any(why in str(driver.death) for why in ("signal 9", "cannot be reached"))
        with pytest.raises(Unavailable, match="does not come back"):
            driver.run([request("f", [1])])


def test_what_began_on_a_version_whose_device_does_not_come_back_ends_though_its_model_goes_on() -> None:
    """The next version is on other devices: new sequences run, and those of the old version end with an error."""
    launcher = processes(pace=1.0, models=[*MODELS, NEXT])
    with cluster(launcher, LifeConfig(starts=1), ("a", "b", "c", "d")) as driver:
        stream = driver.run([request("e", [1, 2, 3], "org/n", max_tokens=400)])
        next(stream)
        (own,) = driver._scheduler.block_map.instances[MODELS[1].chain(*CUTS).uses[-1].block]
        others = {
            name for use in MODELS[0].chain(*CUTS).uses for name in driver._scheduler.block_map.instances[use.block]
        }
        assert own not in others
        chain = replace(NEXT.chain(*CUTS), spec=MODELS[1].spec, source=NEXT.spec.name)
        with driver._changed:  # so that the device of the block it replaces has no room
            driver._scheduler.devices[own].plan.limit = 1
        driver.serve(ServeModel(chain, NEXT.blocks(*CUTS)), LIMIT)
        os.kill(pid(driver, launcher, own), signal.SIGKILL)
        end = list(stream)[-1]
        assert end.finish == "error" and "does not come back" in str(end.error)
        one = request("f", [1, 2, 3], "org/n")
        tokens = [event.token for event in driver.run([one]) if event.token is not None]
        assert tokens == expected(NEXT, one.prompt, one.sampling) and driver.alive
        assert driver.health()["status"] == "degraded" and "unavailable" not in driver.health()


def test_a_drain_waits_and_a_shutdown_ends_what_is_left_and_every_process() -> None:
    launcher = processes(pace=1.0)
    with cluster(launcher) as driver:
        pids = [pid(driver, launcher, device) for device in DEVICES]
        short, long = driver.run([request("d", [1, 2])]), driver.run([request("l", [1, 2], max_tokens=400)])
        next(long)
        assert not driver.drain(0.05)
        with pytest.raises(Unavailable, match="shutting down"):
            driver.run([request("x", [1])])
        verify(request("d", [1, 2]), list(short))
        began = time.monotonic()
        assert driver.shutdown(LIMIT)
        assert list(long)[-1].error == "the driver was shut down"
        assert time.monotonic() - began < LIMIT / 2
        assert all(not Path(f"/proc/{each}").exists() for each in pids)
        assert not launcher._folder.path.exists()


def test_answers_are_those_of_the_oracle() -> None:
    """Check of the oracle itself: another prompt token gives another answer."""
    assert oracle(request("o", [1, 2, 3])) != oracle(request("o", [1, 2, 4]))
