"""An agent is killed under keyed requests: the same server goes on with them; nothing lost, nothing twice."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.cluster.driver.driver import ClusterDriver
from runtime.config import ClusterConfig, ServerConfig
from runtime.engine.fakes.integer_model import expected
from runtime.frontend.tokenizer import Tokenizer
from runtime.types import SamplingParams
from tests.runtime.cluster.clusters import LIMIT, blocks, eventually, processes
from tests.runtime.server.durable.test_kills import Client, assert_continued
from tests.runtime.server.harness import FakeSource, Running, serving
from tests.runtime.server.test_cluster import CUTS, DEVICES, MODELS

TOKENS = 60


def kill(server: Running, device: str) -> None:
    """Kill an agent once it lives, and wait until its death is known."""

    def agent(route: str, name: str) -> Any:
        with server.http() as http:
            return next(each for each in http.get(route).json()["agents"] if each[name] == device)

    assert eventually(lambda: agent("/zoo/state", "id")["alive"], LIMIT)
    pid, before = agent("/zoo/state", "id")["pid"], agent("/health", "device")["deaths"]
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: agent("/health", "device")["deaths"] > before, LIMIT)


@pytest.fixture(params=DEVICES)
def victim(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cluster_server(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Running]:
    launcher = processes(models=MODELS, pace=12.0)
    chains = [model.chain(*CUTS) for model in MODELS]
    driver = ClusterDriver(chains, blocks(MODELS, CUTS), DEVICES, launcher, ClusterConfig(placement="partition"))
    source = FakeSource(tokenizer, known=[model.spec for model in MODELS])
    with driver, serving(driver, source, ServerConfig(), queue=str(tmp_path / "queue")) as server:
        yield server


def test_a_death_of_an_agent_at_any_point_is_made_good(cluster_server: Running, victim: str) -> None:
    """Killed once the request is stored, in the midst of its answer twice, and once some of it was read again."""
    clients = [
        Client(f"key-{number}", model=model.spec.name, prompt=[9, 8, number + 1], max_tokens=TOKENS, temperature=0)
        for number, model in enumerate((*MODELS, *MODELS))
    ]
    threads = [threading.Thread(target=each.read, args=(cluster_server,)) for each in clients]
    for thread in threads:
        thread.start()
    assert eventually(lambda: cluster_server.state()["queue"]["running"] > 0, LIMIT)
    kill(cluster_server, victim)
    for count in (TOKENS // 4, TOKENS // 2):
        assert eventually(lambda least=count: all(len(each.events) >= least for each in clients[:2]), LIMIT)
        assert not all(each.ended for each in clients), "the kill is to be in the midst of an answer"
        kill(cluster_server, victim)
    for thread in threads:
        thread.join(2 * LIMIT)
    for number, client in enumerate(clients):
        assert client.statuses == [200], "the server lives: no client has to come back"
        assert_continued(client, [])
        wanted = expected(MODELS[number % 2], client.body["prompt"], SamplingParams(TOKENS, ignore_eos=True))
        assert client.tokens() == wanted
    assert cluster_server.state()["queue"] == {"waiting": 0, "running": 0, "dead": 0}
    again = Client(
        "key-0", **{name: clients[0].body[name] for name in ("model", "prompt", "max_tokens", "temperature")}
    )
    again.read(cluster_server)
    assert again.events == clients[0].events, "the stored answer is what was sent"
