"""`/zoo/roles`, and roles in `/zoo/state`, over agent processes: hand-offs in `/metrics`, changes of roles (TI-27)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runtime.cluster.driver.driver import ClusterDriver
from runtime.config import ClusterConfig, ServerConfig
from runtime.engine.fakes.integer_model import counting_model, expected
from runtime.frontend.tokenizer import Tokenizer
from runtime.types import SamplingParams
from tests.runtime.cluster.clusters import blocks, processes
from tests.runtime.server.harness import FakeSource, Running, serving
from zoo.errors import Unavailable

MODEL = counting_model("org/base", "1 2* 3 4* 5 6* 7 8", max_model_len=256, vocab_size=320)


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    launcher = processes(models=(MODEL,), pace=1.0)
    config = ClusterConfig(roles=(("a", "prefill"), ("b", "decode")), prefix_caching="cached")
    driver = ClusterDriver([MODEL.chain()], blocks((MODEL,), ()), ("a", "b"), launcher, config)
    with driver, serving(driver, FakeSource(tokenizer, known=[MODEL.spec]), ServerConfig()) as running:
        yield running


def answer(server: Running, prompt: list[int], salt: str = "") -> None:
    """Ask for an answer, and check it."""
    body = {"return_token_ids": True} | ({"cache_salt": salt} if salt else {})
    with server.client() as client:
        got = client.completions.create(model="org/base", prompt=prompt, max_tokens=9, temperature=0, extra_body=body)
    tokens = getattr(got.choices[0], "token_ids")  # noqa: B009 - a field that OpenAI's class does not have
    assert tokens == expected(MODEL, prompt, SamplingParams(9, ignore_eos=True))


def counted(server: Running, name: str) -> float:
    with server.http() as http:
        lines = http.get("/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"blockzoo:{name}_total ")))


def roles(server: Running) -> dict[str, str]:
    return {agent["id"]: agent["role"] for agent in server.state()["agents"]}


def test_answers_are_handed_off_and_counted(server: Running) -> None:
    before = counted(server, "handoffs")
    answer(server, [5, 6, 7, 8])
    assert roles(server) == {"a": "prefill", "b": "decode"}
    assert counted(server, "handoffs") == before + 1
    assert counted(server, "handoff_bytes") > 0 and counted(server, "handoff_seconds") > 0


@pytest.mark.parametrize("salt", ["one", "other"])
def test_a_prefix_that_is_where_it_decodes_is_not_sent_again(server: Running, salt: str) -> None:
    """That of an earlier answer with the same system prompt and salt: ten of eleven page sets."""
    system = [len(salt), *range(39)]
    answer(server, [*system, 1], "one")
    sent = [counted(server, "handoff_bytes")]
    for prompt in ([*system, 2, 3], [*range(50, 90), 4, 5]):
        before = counted(server, "handoff_present_tokens")
        answer(server, prompt, salt)
        sent.append(counted(server, "handoff_bytes"))
        shares = prompt[0] == system[0] and salt == "one"
        assert counted(server, "handoff_present_tokens") - before == (40 if shares else 0)
    assert (sent[1] - sent[0]) * (11 if salt == "one" else 1) == sent[2] - sent[1] > 0


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ('{"a": "decode"}', 409, "org/base would not be whole on devices for prompts"),
        ('{"z": "decode"}', 409, "there is no agent 'z'; there are a, b"),
        ('{"a": "idle"}', 400, "must give agents their roles"),
        ('["a"]', 400, "must give agents their roles"),
        ("{", 400, "must give agents their roles"),
    ],
)
def test_a_change_that_cannot_be_is_refused_with_the_reason(server: Running, body: str, status: int, why: str) -> None:
    with server.http() as http:
        got = http.post("/zoo/roles", content=body)
    assert got.status_code == status and why in got.json()["error"]["message"]
    assert roles(server) == {"a": "prefill", "b": "decode"}


def test_roles_change_without_a_restart(server: Running) -> None:
    pids = [agent["pid"] for agent in server.state()["agents"]]
    with server.http() as http:
        got = http.post("/zoo/roles", json={"a": "decode", "b": "prefill"})
        assert got.status_code == 200 and got.json() == {"roles": {"a": "decode", "b": "prefill"}}
        before = counted(server, "handoffs")
        answer(server, [9, 8, 7, 6, 5])
        assert counted(server, "handoffs") == before + 1
        assert http.post("/zoo/roles", json={"a": "both", "b": "both"}).status_code == 200
        answer(server, [1, 2, 3])
        assert counted(server, "handoffs") == before + 1
        assert http.post("/zoo/roles", json={"a": "prefill", "b": "decode"}).status_code == 200
    assert [agent["pid"] for agent in server.state()["agents"]] == pids


def test_a_change_whose_scheduler_has_died_is_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.driver, "_death", "it is gone")
    with pytest.raises(Unavailable, match="it is gone"):
        server.driver.set_roles({"a": "decode"})
    monkeypatch.undo()
    assert roles(server) == {"a": "prefill", "b": "decode"}
