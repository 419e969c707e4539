"""Hops dispatched among agents over processes and sockets (BL-23): each of the model's tokens comes once.

Agents die meanwhile.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.launch.processes import ProcessConfig, ProcessLauncher
from runtime.config import ClusterConfig
from runtime.types import TokenEvent
from tests.runtime.cluster.agent_programs import counting
from tests.runtime.cluster.clusters import CUTS, LIMIT, MODELS, Load, answered, blocks, eventually, request, verify

#: Each holds half a chain: two have the first half, the other two the second.
DEVICES = ("a", "b", "c", "d")


@contextmanager
def broadcasting() -> Iterator[ClusterDriver]:
    settings = AgentSettings(report_seconds=0.05, weights=6500)
    launcher = ProcessLauncher(ProcessConfig(counting(MODELS, 400, pace=0.2), settings=settings, beat_seconds=0.1))
    config = ClusterConfig(placement="replicate", dispatch="broadcast", devices=len(DEVICES), prefill_chunk=16)
    driver = ClusterDriver([model.chain(*CUTS) for model in MODELS], blocks(), list(DEVICES), launcher, config)
    try:
        yield driver
    finally:
        assert driver.shutdown(LIMIT)


def test_real_agents_offer_hops_and_lose_and_double_none() -> None:
    with broadcasting() as driver:

        def won() -> int:
            return driver.state().counters.hops_won

        def warm() -> bool:
            """Run a request; return whether a hop was won. Alternatives are loaded when they are first considered."""
            one = request(f"warm-{won()}-{os.urandom(4).hex()}", (1, 2, 3), max_tokens=2)
            verify(one, answered(driver, [one])[one.seq])
            return won() > 0

        assert eventually(warm)
        ones = [request(f"s{number}", range(5 + number * 3), MODELS[number % 2].spec.name, 12) for number in range(12)]
        got: dict[str, list[TokenEvent]] = answered(driver, ones)
        for one in ones:
            verify(one, got[one.seq])
        assert won() >= 6
        with Load(driver, clients=4, max_tokens=20) as load:
            for name in ("b", "d", "c"):
                before = won()
                assert eventually(lambda before=before: won() > before + 2), load.wrong
                os.kill(driver._scheduler.devices[name].facts.pid, signal.SIGKILL)
                assert eventually(lambda name=name: not driver._scheduler.devices.alive(name))
                assert eventually(lambda: all(device.alive for device in driver._scheduler.devices)), load.wrong
        assert not load.wrong and load.done > 8

        def at_rest() -> bool:
            pages = driver.state().pages
            return pages.free == pages.capacity and not any(
                device.passing.asked for device in driver._scheduler.devices
            )

        assert eventually(at_rest)
