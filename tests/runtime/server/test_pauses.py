"""Requests are paused and resumed over HTTP: no token comes in between, and the tokens do not change (BL-17)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from runtime.cluster.driver.driver import ClusterDriver
from runtime.config import ClusterConfig, ControlConfig, ServerConfig
from runtime.engine.fakes.integer_model import counting_model, expected
from runtime.frontend.tokenizer import Tokenizer
from runtime.types import SamplingParams
from tests.runtime.cluster.clusters import processes
from tests.runtime.cluster.whole import answer
from tests.runtime.server.harness import BASE, FakeSource, Running, eventually, running, serving

MODEL = counting_model("org/base", "1 2* 3 4* 5 6* 7 8", max_model_len=256, vocab_size=320)
#: With these thresholds every device counts as short of memory.
CONTROL = ControlConfig(low=0.01, bandwidth=1e12)
PROMPT, LENGTH = [5, 6, 7, 8], 120


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    launcher = processes(200, 5.0, (MODEL,))
    config = ClusterConfig(placement="replicate", control=CONTROL)
    driver = ClusterDriver([MODEL.chain()], MODEL.blocks(), ("a", "b"), launcher, config)
    with driver, serving(driver, FakeSource(tokenizer, known=[MODEL.spec]), ServerConfig(api_key="k3y")) as started:
        yield started


def body(**others: Any) -> dict[str, Any]:
    asked = {
        "model": "org/base",
        "prompt": PROMPT,
        "max_tokens": LENGTH,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return asked | others


def chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def tokens_of(chunk: dict[str, Any], choice: int = 0) -> list[int]:
    return [token for each in chunk["choices"] if each["index"] == choice for token in each["token_ids"]]


def generated(client: httpx.Client) -> int:
    return int(client.get("/zoo/state").json()["counters"]["generated_tokens"])


def at_rest(client: httpx.Client) -> bool:
    before = generated(client)
    time.sleep(0.1)
    return generated(client) == before


@pytest.mark.parametrize("n", [1, 2])
def test_nothing_comes_while_it_is_paused_and_tokens_are_the_same(server: Running, n: int) -> None:
    with (
        server.http() as control,
        server.http() as client,
        client.stream("POST", "/v1/completions", json=body(stream=True, n=n)) as answer,
    ):
        coming = chunks(answer)
        first = next(coming)
        held = control.post(f"/zoo/requests/{first['id']}/pause", params={"expected_ms": 60_000})
        assert (held.status_code, held.json()) == (200, {"id": first["id"], "paused": True, "sequences": n})
        assert eventually(lambda: at_rest(control)), "tokens come though it is paused"
        before = generated(control)
        time.sleep(0.3)
        assert generated(control) == before
        assert control.get("/zoo/state").json()["running"] == n
        assert control.post(f"/zoo/requests/{first['id']}/resume").json() == {
            "id": first["id"],
            "paused": False,
            "sequences": n,
        }
        got = [tokens_of(first, choice) for choice in range(n)]
        for chunk in coming:
            for choice in range(n):
                got[choice] += tokens_of(chunk, choice)
    assert got == [expected(MODEL, PROMPT, SamplingParams(LENGTH, ignore_eos=True))] * n


def test_what_waits_moves_ahead_to_where_there_is_more_room(server: Running) -> None:
    """Two paused sequences on one device and one on the other: the smaller of the two moves meanwhile."""
    prompts = [PROMPT, [9, 8, 7], [number % 97 for number in range(100)]]
    with ExitStack() as open_ones:
        control = open_ones.enter_context(server.http())
        coming, got, names = [], [], []
        for prompt in prompts:
            client = open_ones.enter_context(server.http())
            answer = client.stream("POST", "/v1/completions", json=body(stream=True, prompt=prompt))
            coming.append(chunks(open_ones.enter_context(answer)))
            first = next(coming[-1])
            got.append(tokens_of(first))
            names.append(first["id"])
            assert control.post(f"/zoo/requests/{first['id']}/pause", params={"expected_ms": 60_000}).status_code == 200
        assert eventually(
            lambda: control.get("/zoo/state").json()["cluster"]["migration_totals"]["committed"] > 0, 10
        ), "nothing moved"
        for name, rest, tokens, prompt in zip(names, coming, got, prompts, strict=True):
            assert control.post(f"/zoo/requests/{name}/resume").status_code == 200
            for chunk in rest:
                tokens += tokens_of(chunk)
            assert tokens == expected(MODEL, prompt, SamplingParams(LENGTH, ignore_eos=True))


def test_whoever_leaves_while_paused_is_gone(server: Running) -> None:
    with server.http() as control:
        with server.http() as client, client.stream("POST", "/v1/completions", json=body(stream=True)) as answer:
            coming = chunks(answer)  # closing the stream is the disconnect
            name = next(coming)["id"]
            assert control.post(f"/zoo/requests/{name}/pause").status_code == 200
        assert eventually(lambda: control.get("/zoo/state").json()["running"] == 0)
        assert control.post(f"/zoo/requests/{name}/resume").status_code == 404


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_what_cannot_be_paused_is_said(server: Running, verb: str) -> None:
    with server.http() as client:
        unknown = client.post(f"/zoo/requests/cmpl-nobody/{verb}")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")
        assert (
            client.post(f"/zoo/requests/cmpl-nobody/{verb}", headers={"Authorization": "Bearer other"}).status_code
            == 401
        )
        assert client.get(f"/zoo/requests/cmpl-nobody/{verb}").status_code == 405
    with server.http() as client:
        wrong = client.post("/zoo/requests/cmpl-nobody/pause", params={"expected_ms": "long"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "expected_ms")


@pytest.mark.parametrize("credit", [1, 4])
def test_one_device_pauses_and_resumes(tokenizer: Tokenizer, credit: int) -> None:
    wanted = answer(BASE, PROMPT, SamplingParams(LENGTH, ignore_eos=True))
    with (
        running(tokenizer, pace=lambda _: time.sleep(0.005), credit=credit) as server,
        server.http() as other,
        server.http() as http,
        http.stream("POST", "/v1/completions", json=body(stream=True)) as response,
    ):
        parts = chunks(response)
        first = next(parts)
        paused = other.post(f"/zoo/requests/{first['id']}/pause")
        assert paused.status_code == 200, paused.text
        assert eventually(lambda: at_rest(other)) and generated(other) < LENGTH
        assert other.post(f"/zoo/requests/{first['id']}/resume").status_code == 200
        assert [token for part in (first, *parts) for token in tokens_of(part)] == wanted
