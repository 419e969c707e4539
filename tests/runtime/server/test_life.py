"""Disconnects, failed steps, a dead engine and drains: no page leaks, no request hangs, health is reported truly."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer
from runtime.server.run_server import bind, is_local
from tests.runtime.server.harness import Running, eventually, running

SLOW = {"model": "org/base", "prompt": "hello", "max_tokens": 200}


def slow_step(_: int) -> None:
    time.sleep(0.02)


@pytest.fixture(scope="module")
def slow(tokenizer: Tokenizer, credit: int) -> Iterator[Running]:
    with running(tokenizer, credit=credit, pace=slow_step) as server:
        yield server


def idle(server: Running) -> bool:
    state = server.state()
    pages = state["agents"][0]["pages"]
    return state["running"] == state["waiting"] == 0 and pages["free"] == pages["capacity"]


def busy(server: Running) -> bool:
    pages = server.state()["agents"][0]["pages"]
    return server.state()["running"] > 0 and pages["free"] < pages["capacity"]


def test_leaving_a_stream_frees_its_pages(slow: Running) -> None:
    with slow.client() as client:
        stream = client.completions.create(**SLOW, n=3, stream=True)
        next(iter(stream))
        assert busy(slow)
        stream.close()
    assert eventually(lambda: idle(slow))


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_leaving_before_a_whole_answer_frees_its_pages(slow: Running, route: str) -> None:
    body = (
        SLOW if route == "/v1/completions" else {"model": "org/base", "messages": [{"role": "user", "content": "hi"}]}
    )
    with slow.http() as http, pytest.raises(httpx.ReadTimeout):
        http.post(route, json=body, timeout=0.3)
    assert eventually(lambda: idle(slow))


def test_leaving_in_the_middle_of_the_body_holds_nothing(slow: Running) -> None:
    host, port = slow.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    assert eventually(lambda: idle(slow))
    with slow.client() as client:
        assert client.completions.create(model="org/base", prompt="hi", max_tokens=2).usage.completion_tokens == 2


def test_a_failed_step_is_an_error_event_in_a_stream_and_the_server_goes_on(tokenizer: Tokenizer, credit: int) -> None:
    with (
        running(tokenizer, credit=credit, pace=slow_step, fail_at=[4]) as server,
        server.client() as client,
        server.http() as http,
    ):
        with pytest.raises(openai.APIError) as caught:
            list(client.completions.create(**SLOW, stream=True))
        assert "engine failed" in str(caught.value)
        assert http.get("/health").status_code == 200
        assert client.completions.create(**{**SLOW, "max_tokens": 3}).usage.completion_tokens == 3
        assert idle(server)


@pytest.mark.parametrize("alive", [True, False])
def test_without_the_key_health_tells_the_state_and_nothing_else(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    why = "the model org/secret cannot be loaded from /srv"
    told = {"status": "degraded", "agents": [{"device": "a", "reason": why}], "unavailable": {"org/secret": why}}
    with running(tokenizer, config=ServerConfig(api_key="k3y")) as server, server.http() as http:
        with monkeypatch.context() as patch:
            patch.setattr(server.driver, "health", lambda: told)
            patch.setattr(server.driver, "_death", None if alive else why)
            stranger = httpx.get(f"{server.address}/health", timeout=60, trust_env=False)
            assert stranger.json() == {"status": "degraded" if alive else "dead"} and stranger.status_code == (
                200 if alive else 503
            )
            assert "org/secret" in http.get("/health").text
        assert httpx.get(f"{server.address}/metrics", timeout=60, trust_env=False).status_code == 401


def test_a_failed_step_is_a_500_for_a_whole_answer(tokenizer: Tokenizer, credit: int) -> None:
    with running(tokenizer, credit=credit, fail_at=[2]) as server, server.http() as http:
        response = http.post("/v1/completions", json=SLOW)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"


def test_a_dead_engine_fails_health_and_new_requests(tokenizer: Tokenizer, credit: int) -> None:
    with running(tokenizer, credit=credit, fail_at=range(1, 10)) as server, server.http() as http:
        assert http.get("/health").status_code == 200
        codes = [http.post("/v1/completions", json=SLOW).status_code for _ in range(4)]
        assert (
            codes[0] in (500, 503) and codes[-1] == 503
        )  # the last code may be of a further failure, of the step that releases the failed one
        health = http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "dead"
        assert http.get("/live").status_code == 200
        assert http.get("/zoo/state").json()["agents"][0]["alive"] is False
        assert http.get("/metrics").status_code == 200
        refused = http.post("/v1/completions", json=SLOW)
        assert refused.json()["error"]["type"] == "service_unavailable" and "retry-after" in refused.headers


_CHILD = """
import sys, time
from pathlib import Path
from runtime.config import ServerConfig
from runtime.frontend.tokenizer import NoTokenizer
from runtime.server.app import build_app
from runtime.server.run_server import address_of, bind, serve
from tests.runtime.cluster.whole import WholeEngine, inline
from tests.runtime.server.harness import BASE, FakeSource

source, config = FakeSource(NoTokenizer()), ServerConfig(drain_seconds=float(sys.argv[1]))
with inline(WholeEngine([BASE], 64, pace=lambda _: time.sleep(0.02))) as driver:
    bound = bind("127.0.0.1", 0)
    app = build_app(driver, [source.served(BASE)], source, config)
    serve(app, config, bound, lambda: print(address_of(bound), flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_with_zero(number: signal.Signals) -> None:
    child = subprocess.Popen([sys.executable, "-c", _CHILD, "20"], stdout=subprocess.PIPE, text=True)
    try:
        address = (child.stdout.readline() if child.stdout else "").strip()
        with (
            httpx.Client(base_url=address, timeout=20, trust_env=False) as http,
            openai.OpenAI(base_url=f"{address}/v1", api_key="x") as client,
        ):
            stream = client.completions.create(
                model="base", prompt=[5], max_tokens=50, stream=True, extra_body={"return_token_ids": True}
            )
            parts = iter(stream)
            count = len(next(parts).choices[0].token_ids)
            assert http.get("/health").status_code == 200
            os.kill(child.pid, number)
            assert eventually(lambda: refuses(address))
            rest = [part.choices[0] for part in parts]
            assert count + sum(len(part.token_ids) for part in rest) == 50
            assert rest[-1].finish_reason == "length"
        assert child.wait(60) == 0
        assert child.stdout is not None and child.stdout.read() == ""
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("stream", [True, False])
def test_a_drain_ends_in_time_and_says_so_to_who_still_waits(stream: bool) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, "1"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        address = (child.stdout.readline() if child.stdout else "").strip()
        threading.Thread(target=end_once_it_runs, args=(child, address)).start()
        with (
            openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client,
            pytest.raises(openai.APIError) as caught,
        ):
            done = client.completions.create(model="base", prompt=[5], max_tokens=250, stream=stream)
            if stream:
                list(done)
        assert "shutting down" in str(caught.value)
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()


def end_once_it_runs(child: subprocess.Popen[str], address: str) -> None:
    with httpx.Client(base_url=address, timeout=60, trust_env=False) as http:
        assert eventually(lambda: http.get("/zoo/state").json()["running"] > 0)
    child.send_signal(signal.SIGTERM)


def refuses(address: str) -> bool:
    """Return whether a new client is turned away."""
    try:
        return httpx.get(f"{address}/health", timeout=60, trust_env=False).status_code == 503
    except httpx.TransportError:
        return True


def test_a_closed_gate_refuses_on_open_connections(tokenizer: Tokenizer, credit: int) -> None:
    with running(tokenizer, credit=credit) as server, server.http() as http:
        assert http.get("/health").status_code == 200
        server.gate.closed = True
        assert http.get("/health").json() == {"status": "draining"}
        refused = http.post("/v1/completions", json=SLOW)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert json.loads(refused.text)["error"]["code"] == "unavailable"


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("localhost", True), ("127.9.9.9", True), ("0.0.0.0", False)],  # noqa: S104
)
def test_an_address_of_this_machine_alone_is_told_from_others(host: str, local: bool) -> None:
    """By what the socket is bound to: a name says nothing (`localhost.example`)."""
    with bind(host, 0) as bound:
        assert is_local(bound) == local
