"""The HTTP server over a cluster of processes: right answers, true reports about agents, no request lost on a kill."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.launch.processes import ProcessLauncher
from runtime.config import ClusterConfig, ServerConfig
from runtime.engine.fakes.integer_model import counting_model, expected
from runtime.frontend.tokenizer import Tokenizer
from runtime.types import SamplingParams
from tests.runtime.cluster.clusters import blocks, eventually, processes
from tests.runtime.server.harness import FakeSource, Running, serving

MODELS = tuple(
    counting_model(name, f"1 2* 3 4* 5 6* 7 {last}", max_model_len=256, vocab_size=320)
    for name, last in (("org/base", 8), ("org/fine", 9))
)
CUTS = (3, 5)
DEVICES = ("a", "b")


@pytest.fixture(scope="module")
def cluster(tokenizer: Tokenizer) -> Iterator[tuple[Running, ProcessLauncher]]:
    """The server over agent processes with the integer engine, and the launcher of these processes."""
    launcher = processes(models=MODELS, pace=1.0)
    driver = ClusterDriver(
        [model.chain(*CUTS) for model in MODELS],
        blocks(MODELS, CUTS),
        DEVICES,
        launcher,
        ClusterConfig(placement="partition"),
    )
    with (
        driver,
        serving(driver, FakeSource(tokenizer, known=[model.spec for model in MODELS]), ServerConfig()) as server,
    ):
        yield server, launcher


def test_answers_are_the_models_own(cluster: tuple[Running, ProcessLauncher]) -> None:
    with cluster[0].client() as client:
        assert {model.id for model in client.models.list()} == {"org/base", "org/fine"}
        for model in MODELS:
            prompt = [5, 6, 7, 8]
            answer = client.completions.create(
                model=model.spec.name, prompt=prompt, max_tokens=9, temperature=0, extra_body={"return_token_ids": True}
            )
            assert answer.choices[0].token_ids == expected(model, prompt, SamplingParams(9, ignore_eos=True))  # type: ignore[attr-defined]
        chunks = list(
            client.completions.create(model="org/fine", prompt="hello", max_tokens=9, temperature=0, stream=True)
        )
        assert chunks[-1].choices[0].finish_reason == "length"


def test_state_and_metrics_are_there(cluster: tuple[Running, ProcessLauncher]) -> None:
    server, launcher = cluster
    state = server.state()
    assert [(each["id"], each["pid"], each["alive"]) for each in state["agents"]] == [
        (name, launcher.pid(name, 1), True) for name in DEVICES
    ]
    for agent in state["agents"]:
        assert agent["instances"] and {"block", "queue", "batch_limit"} <= agent["instances"][0].keys()
        assert agent["instances"][0]["batch_limit"] == ClusterConfig().max_num_seqs
        pages = agent["pages"]
        assert pages["capacity"] == sum(pages[name] for name in ("free", "local", "lent", "reserved", "in_flight")) > 0
    assert {each["block"] for agent in state["agents"] for each in agent["instances"]} == {
        block.id for block in blocks(MODELS, CUTS)
    }
    assert state["counters"]["generated_tokens"] > 0 and state["memory"]["kv_pool"] > 0
    with cluster[0].http() as http:
        metrics = http.get("/metrics").text
    assert "blockzoo:pages" in metrics
    assert all(f"\nvllm:prefix_cache_{name}_total " in metrics for name in ("queries", "hits"))
    assert all(
        f"\nblockzoo:{name}_total " in metrics
        for name in ("migrations", "migration_copied_tokens", "shared_sequences", "speculation_hits")
    )
    assert all(f'blockzoo:agent_up{{device="{name}"}} 1.0' in metrics for name in DEVICES)
    assert all(f'blockzoo:agent_deaths_total{{device="{name}"}} 0.0' in metrics for name in DEVICES)


def test_health_tells_the_truth_while_an_agent_is_replaced_and_no_request_is_lost(
    cluster: tuple[Running, ProcessLauncher],
) -> None:
    server, launcher = cluster
    prompt, answers = [9, 8, 7], []
    wanted = expected(MODELS[0], prompt, SamplingParams(120, ignore_eos=True))

    def ask() -> None:
        with server.client() as client:
            answer = client.completions.create(
                model="org/base", prompt=prompt, max_tokens=120, temperature=0, extra_body={"return_token_ids": True}
            )
            answers.append(answer.choices[0].token_ids)  # type: ignore[attr-defined]

    with server.http() as http:

        def agents() -> list[dict[str, object]]:
            return list(http.get("/health").json()["agents"])

        assert http.get("/health").json()["status"] == "ok"
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert eventually(lambda: server.state()["running"] == 3)
        victim = launcher.pid("a", 1)
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        assert eventually(lambda: agents()[0]["deaths"] == 1)
        assert http.get("/health").status_code == 200
        for thread in threads:
            thread.join(20)
        assert answers == [wanted] * 3
        assert eventually(lambda: http.get("/health").json()["status"] == "ok")
        assert [each["incarnation"] for each in agents()] == [2, 1]
