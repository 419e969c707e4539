"""`/zoo/ledger` and loans in `/zoo/state` and `/metrics`, over agent processes (IL-11)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.driver.driver import ClusterDriver
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
PROMPT = [5 + at % 90 for at in range(200)]


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    settings = AgentSettings(report_seconds=0.05, loan_seconds=5.0)
    engines = counting([MODEL], 400, pools={"a": 60}, holders=["a"], pace=1.0)
    launcher = ProcessLauncher(ProcessConfig(engines, settings=settings, beat_seconds=0.1))
    config = ClusterConfig(placement="replicate", lending=LendingConfig("planned", 0.5))
    driver = ClusterDriver([MODEL.chain()], MODEL.blocks(), ("a", "b"), launcher, config)
    with driver, serving(driver, FakeSource(tokenizer, known=[MODEL.spec]), ServerConfig()) as running:
        yield running


def ledger(server: Running) -> dict[str, dict[str, Any]]:
    with server.http() as http:
        return {each["id"]: each for each in http.get("/zoo/ledger").json()["instances"]}


def test_the_ledger_names_debtors_and_creditors_while_a_loan_stands(server: Running) -> None:
    empty = {
        "a": {"id": "a", "capacity": 60, "free": 60, "lent": {}, "borrowed": {}},
        "b": {"id": "b", "capacity": 400, "free": 400, "lent": {}, "borrowed": {}},
    }
    assert eventually(lambda: ledger(server) == empty)
    seen: list[dict[str, dict[str, Any]]] = []
    with server.client() as client:
        stream = client.completions.create(
            model="org/base", prompt=PROMPT, max_tokens=40, temperature=0, stream=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        tokens: list[int] = []
        for part in stream:
            for choice in part.choices:
                tokens += getattr(choice, "token_ids")  # noqa: B009 - a field that OpenAI's class does not have
            seen.append(ledger(server))
            pages = {each["id"]: each["pages"] for each in server.state()["agents"]}
            assert all(each["free"] + each["local"] + each["lent"] == each["capacity"] for each in pages.values())
    assert tokens == expected(MODEL, PROMPT, SamplingParams(40, ignore_eos=True))
    owed = [each["a"]["borrowed"].get("b", 0) for each in seen]
    assert max(owed) >= 200 / 4 * 3 - 60 and max(owed) <= 200
    for each in seen:
        assert each["b"]["lent"].get("a", 0) == each["a"]["borrowed"].get("b", 0)
        assert not each["a"]["lent"] and not each["b"]["borrowed"]
        assert each["b"]["free"] == 400 - each["b"]["lent"].get("a", 0) or each["b"]["free"] < 400
    assert eventually(lambda: ledger(server) == empty)


def test_loans_are_counted(server: Running) -> None:
    with server.http() as http:
        lines = http.get("/metrics").text.splitlines()
    found = {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("blockzoo:loan")}
    assert found["blockzoo:loans_total"] > 0 and found["blockzoo:loans_refused_total"] == 0
    assert found["blockzoo:loan_bytes_total"] == 64 * found["blockzoo:loan_pages_total"] > 0
    assert found["blockzoo:loan_seconds_total"] > 0
