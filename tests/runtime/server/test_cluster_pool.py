"""Managers of the pool over agent processes: `/zoo/ledger`, metrics, silence and restart (IL-11, IL-16)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.driver.pool_threads import PoolThreads
from runtime.cluster.launch.processes import ProcessConfig, ProcessLauncher
from runtime.config import ClusterConfig, ServerConfig
from runtime.engine.fakes.integer_model import counting_model, expected
from runtime.frontend.tokenizer import Tokenizer
from runtime.lending_config import LendingConfig
from runtime.types import SamplingParams
from tests.runtime.cluster.agent_programs import counting
from tests.runtime.cluster.clusters import eventually
from tests.runtime.server.harness import FakeSource, Running, serving

MODEL = counting_model("org/base", "1* 2 3* 4* 5", max_model_len=2000, vocab_size=320)
LENDING = LendingConfig("negotiated", 0.5, beat_ms=30, gone_ms=20_000, managers=2)


@pytest.fixture(scope="module")
def driver() -> Iterator[ClusterDriver]:
    settings = AgentSettings(report_seconds=0.05, loan_seconds=5.0, pool_beat_seconds=0.03)
    engines = counting([MODEL], 400, pools={"a": 60}, holders=["a"], pace=1.0)
    launcher = ProcessLauncher(ProcessConfig(engines, settings=settings, beat_seconds=0.1))
    config = ClusterConfig(placement="replicate", lending=LENDING)
    with ClusterDriver([MODEL.chain()], MODEL.blocks(), ("a", "b", "c"), launcher, config) as driver:
        yield driver


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer, driver: ClusterDriver) -> Iterator[Running]:
    with serving(driver, FakeSource(tokenizer, known=[MODEL.spec]), ServerConfig()) as running:
        yield running


def prompt(tokens: int) -> list[int]:
    return [5 + at % 90 for at in range(tokens)]


def complete(server: Running, tokens: int, answer: int = 40) -> bool:
    """Return whether an answer is exactly the model's."""
    with server.client() as client:
        made = client.completions.create(
            model="org/base", prompt=prompt(tokens), max_tokens=answer, temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
    sampling = SamplingParams(answer, ignore_eos=True)
    return list(getattr(made.choices[0], "token_ids")) == expected(MODEL, prompt(tokens), sampling)  # noqa: B009


def ledger(server: Running) -> dict[str, Any]:
    with server.http() as http:
        found: dict[str, Any] = http.get("/zoo/ledger").json()
        return found


def counted(server: Running) -> dict[str, float]:
    with server.http() as http:
        lines = http.get("/metrics").text.splitlines()
    rows = (line.split() for line in lines if line.startswith("blockzoo:pool_"))
    return {name.removeprefix("blockzoo:pool_").removesuffix("_total"): float(value) for name, value in rows}


def agrees(found: dict[str, Any]) -> bool:
    """Return whether each manager knows of each agent, and has the debts of the scheduler's account."""
    books = {each["id"]: (each["lent"], each["borrowed"]) for each in found["instances"]}
    views = [{each["id"]: (each["lent"], each["borrowed"]) for each in one["instances"]} for one in found["pool"]]
    return len(views) == LENDING.managers and all(view == books for view in views)


def test_managers_follow_the_account_and_say_their_age(server: Running) -> None:
    assert eventually(lambda: agrees(ledger(server)))
    found = ledger(server)
    for one in found["pool"]:
        assert one["sorted_age_ms"] >= 0 and all(each["age_ms"] >= 0 for each in one["instances"])
        rooms = {each["id"]: each["room"] for each in one["instances"]}
        assert rooms == {"a": 30, "b": 200, "c": 200}, "half of each agent's pages"
    lent: list[bool] = []
    done: list[bool] = []
    client = threading.Thread(target=lambda: done.append(complete(server, 200)))
    client.start()
    while client.is_alive():
        found = ledger(server)
        lent += [any(each["lent"] for each in one["instances"]) for one in found["pool"]]
    client.join()
    assert done == [True] and any(lent), "the managers have heard of the loans"
    assert eventually(lambda: agrees(ledger(server)))
    said = counted(server)
    assert said["grants"] > 0 and said["offers"] >= said["grants"] and said["queries"] >= said["grants"]


def test_a_restart_of_all_managers_costs_nothing(server: Running, driver: ClusterDriver) -> None:
    pool = require(driver)
    pool.restart()
    assert eventually(lambda: agrees(ledger(server)))
    assert complete(server, 150)


def test_answers_go_on_while_managers_are_silent(server: Running, driver: ClusterDriver) -> None:
    pool, before, done = require(driver), counted(server), list[bool]()
    pool.mute()
    try:
        client = threading.Thread(target=lambda: done.append(complete(server, 150)))
        client.start()
        assert eventually(lambda: counted(server)["unanswered"] > before["unanswered"])
        assert not done and counted(server)["grants"] == before["grants"]
    finally:
        pool.mute(False)
    client.join(60)
    assert done == [True] and counted(server)["grants"] > before["grants"]


def require(driver: ClusterDriver) -> PoolThreads:
    assert driver.pool is not None
    return driver.pool
