"""Answers of real agents that are lost on their way are detected from reports, and clients get all their tokens."""

from __future__ import annotations

import pytest

from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.launch.threads import ThreadLauncher
from runtime.config import ClusterConfig
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.messages import RowsDone
from tests.runtime.cluster.clusters import CUTS, DEVICES, MODELS, Load, at_rest, blocks, eventually


def test_lost_answers_cost_a_wait_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[RowsDone] = []
    engines = ThreadLauncher(
        lambda device: lambda: IntegerEngine(list(MODELS), 400, device=device),
        settings=AgentSettings(report_seconds=0.05),
        beat_seconds=0.1,
    )
    config = ClusterConfig(placement="partition", row_timeout_s=0.5)
    with ClusterDriver([model.chain(*CUTS) for model in MODELS], blocks(), DEVICES, engines, config) as driver:
        receive = driver._remote_agents.receive

        def losing(timeout: float) -> list[object]:
            told = receive(timeout)
            gone = [each for each in told if isinstance(each, RowsDone)][: max(0, 3 - len(lost))]
            lost.extend(gone)
            return [each for each in told if not any(each is other for other in gone)]

        monkeypatch.setattr(driver._remote_agents, "receive", losing)
        with Load(driver, clients=3, max_tokens=10) as load:
            assert eventually(
                lambda: len(lost) == 3 and driver.state().counters.preemptions >= 1 and load.done > 3, 30.0
            )
        assert not load.wrong
        assert eventually(lambda: at_rest(driver))
