"""Agents as Ray actors: the same tokens and the same recovery.

Needs the extra `ray`; the skip message says so if it is missing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.agents.lifecycle import LifeConfig
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.launch.ray_actors import RayConfig, RayLauncher
from tests.runtime.cluster.agent_programs import counting
from tests.runtime.cluster.clusters import MODELS, Load, answered, at_rest, cluster, eventually, request, verify
from zoo.errors import InputError

if find_spec("ray") is None:  # (not importorskip: Ray reads its environment when it is imported)
    pytest.skip(
        "RAY IS NOT INSTALLED: agents as actors are not tested (pip install 'blockzoo[ray]')", allow_module_level=True
    )


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[ClusterDriver, RayLauncher]]:
    from cli.serving.agent_engines import ENGINES

    launcher = RayLauncher(RayConfig(counting(MODELS, 400), ENGINES, settings=AgentSettings(report_seconds=0.1)))
    with cluster(launcher, LifeConfig(backoff_seconds=0.05)) as driver:
        yield driver, launcher


def test_tokens_are_the_models_own_over_three_actors(running: tuple[ClusterDriver, RayLauncher]) -> None:
    driver, launcher = running
    ones = [request(f"t{at}", range(at + 1, at + 20), MODELS[at % 2].spec.name) for at in range(8)]
    got = answered(driver, ones)
    for one in ones:
        verify(one, got[one.seq])
    assert launcher.seat.keys is not None and driver._remote_agents._messenger.address.startswith("tcp://")
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_an_actor_that_is_killed_is_replaced_and_its_requests_go_on(running: tuple[ClusterDriver, RayLauncher]) -> None:
    driver, launcher = running
    with Load(driver) as load:
        assert eventually(lambda: load.done > 2)
        pid = launcher.pid("b", driver._remote_agents.lifecycles.incarnation("b"))
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: driver.agents()[1].deaths == 1)
        assert eventually(lambda: driver.health()["status"] == "ok")
        before = load.done
        assert eventually(lambda: load.done > before + 2)
    assert load.wrong == []
    assert eventually(lambda: at_rest(driver))


def test_without_authentication_there_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(InputError, match="RAY_AUTH_MODE=token"):
        RayLauncher(RayConfig(counting(), {}))
