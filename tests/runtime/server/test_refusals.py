"""Invalid requests get an OpenAI-shaped 4xx that names the field, and the server goes on serving."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer
from tests.runtime.server.harness import Running, eventually, running
from zoo.store import Store

GOOD = {"model": "org/base", "prompt": "hi", "max_tokens": 2}
CHAT = {"model": "org/base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def credit() -> int:
    """Override the parameter: requests refused here never reach a driver."""
    return 1


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def check_error(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert "Traceback" not in response.text and "0x" not in error["message"]
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [320]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"model": 5}, "model"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 10**40}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"320": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"seed": 2**64}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 1}, "stream_options"),
        ({"adaptive": "no"}, "adaptive"),
        ({"slo_ms": 0}, "slo_ms"),
        ({"slo_ms": 10, "ttft_slo_ms": 10}, "ttft_slo_ms"),
        ({"priority": 2**40}, "priority"),
        ({"ignore_eos": 1}, "ignore_eos"),
    ],
)
def test_wrong_fields_of_a_completion(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    check_error(http.post("/v1/completions", json={**GOOD, **change}), 400, param)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"messages": [{"role": "function", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_wrong_fields_of_a_chat(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    check_error(http.post("/v1/chat/completions", json={**CHAT, **change}), 400, param)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": "org/base", "prompt": "\\ud800"}',
        b'{"model": "org/base", "prompt": "a", "temperature": NaN}',
        b'{"model": "org/base", "prompt": "a", "temperature": 1e999}',
        b'{"model": "org/base", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b"[" * 100_000,
    ],
)
def test_bodies_that_are_no_sound_json(http: httpx.Client, raw: bytes) -> None:
    check_error(http.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"}), 400)


def test_null_means_not_given_and_unknown_fields_are_ignored(http: httpx.Client) -> None:
    empty = dict.fromkeys(
        ("n", "stop", "seed", "temperature", "logprobs", "best_of", "suffix", "logit_bias", "stream", "stream_options")
    )
    response = http.post(
        "/v1/completions", json={**GOOD, **empty, "user": "me", "store": True, "made_up": {"deep": [1]}}
    )
    assert response.status_code == 200
    chat = dict.fromkeys(
        ("tools", "functions", "response_format", "modalities", "top_logprobs", "max_completion_tokens")
    )
    assert http.post("/v1/chat/completions", json={**CHAT, **chat, "tool_choice": "none"}).status_code == 200


def test_too_long_has_openais_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="org/base", prompt="hello", max_tokens=255)
    assert caught.value.code == "context_length_exceeded" and "256" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="org/base", prompt=[5] * 256)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="org/base", messages=[{"role": "user", "content": "ab " * 400}])
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"


@pytest.mark.parametrize("name", ["absent", "org/", "", "x" * 5000, "org/bas"])
def test_unknown_models_are_not_found(server: Running, name: str) -> None:
    with server.http() as http:
        check_error(http.post("/v1/completions", json={**GOOD, "model": name}), 404, "model", "model_not_found")


def test_routes_and_methods(http: httpx.Client) -> None:
    for path in ("/", "/nothing", "/docs", "/v1/models/", "/v1/models/missing", "/health/"):
        check_error(http.get(path), 404)
    response = http.get("/v1/completions")
    check_error(response, 405)
    assert response.headers["allow"] == "POST"
    check_error(http.delete("/v1/models"), 405)


def test_the_page_is_only_where_there_is_a_store(tokenizer: Tokenizer, tmp_path: Path) -> None:
    paths = (
        "/",
        "/ui/lineage",
        "/ui/models/x",
        "/ui/login",
        "/ui/zoo.css",
        "/ui/zoo.js",
        "/ui/live",
        "/ui/compare",
        "/ui/playground",
        "/ui/keys",
        "/ui/upkeep",
        "/ui/patterns",
        "/docs",
        "/ui/icon.svg",
    )
    with running(tokenizer) as server, server.http() as http:
        for path in paths:
            check_error(http.get(path), 404)
    with Store.open(tmp_path / "store") as store, running(tokenizer, store=store) as server, server.http() as http:
        assert {path: http.get(path).status_code for path in paths} == {
            **dict.fromkeys(paths, 200), "/ui/models/x": 404, "/ui/login": 303
        }  # fmt: skip
        for path in paths[:-1]:
            check_error(http.delete(path), 405)
        for path in ("/ui", "/ui/", "/ui/nothing", "/ui/templates/base.html", "/ui/../app.py", "/ui/zoo.css/"):
            check_error(http.get(path), 404)


def test_large_bodies_are_refused_while_they_are_read(tokenizer: Tokenizer) -> None:
    def endless() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(64):
            yield b"x" * 1000

    with running(tokenizer, config=ServerConfig(max_body_bytes=10_000)) as server:
        with server.http() as http:
            declared = http.post("/v1/completions", content=b"x" * 10_001)
            check_error(declared, 413, code="body_too_large")
        with server.http() as http:
            check_error(http.post("/v1/completions", content=endless()), 413)
        with server.http() as http:
            assert http.post("/v1/completions", json=GOOD).status_code == 200


def test_keys(tokenizer: Tokenizer) -> None:
    with running(tokenizer, config=ServerConfig(api_key="s3cret-é")) as server, server.http() as http:
        assert http.get("/health", headers={"Authorization": ""}).status_code == 200
        assert http.get("/live", headers={"Authorization": ""}).status_code == 200
        wrong = ["", "Bearer", "Bearer wrong", "Bearer s3cret", "Basic s3cret-é", "s3cret-é", "Bearer s3cret-éé"]
        for path in (
            "/v1/models",
            "/metrics",
            "/zoo/state",
            "/zoo/models",
            "/zoo/trace",
            "/nothing",
            "/docs",
            "/health/",
            "//health",
        ):
            for header in wrong:
                check_error(http.get(path, headers={"Authorization": header.encode()}), 401, code="invalid_api_key")
        check_error(http.post("/v1/completions", json=GOOD, headers={"Authorization": "Bearer x"}), 401)
        right = {"Authorization": "Bearer s3cret-é".encode()}
        assert http.post("/v1/completions", json=GOOD, headers=right).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            server.client("sk-wrong").models.list()


def test_overload_is_429_with_retry_after(tokenizer: Tokenizer) -> None:
    with running(tokenizer, config=ServerConfig(max_queued=4)) as server, server.http() as http:
        response = http.post("/v1/completions", json={**GOOD, "n": 4})
        assert response.status_code == 200
        check_error(http.post("/v1/completions", json={**GOOD, "n": 5}), 400, "prompt")
    slow = running(tokenizer, config=ServerConfig(max_queued=4), pace=lambda _: time.sleep(0.01))
    with slow as server, server.client() as client, server.http() as http:
        stream = client.completions.create(model="org/base", prompt="hi", max_tokens=200, n=3, stream=True)
        next(iter(stream))
        response = http.post("/v1/completions", json={**GOOD, "n": 2})
        check_error(response, 429, code="overloaded")
        assert int(response.headers["retry-after"]) >= 1
        stream.close()
        assert eventually(lambda: http.post("/v1/completions", json={**GOOD, "n": 2}).status_code == 200)


def test_two_hundred_malformed_bodies_never_fail_the_server(http: httpx.Client) -> None:
    rng = random.Random(7)
    junk = [
        None,
        True,
        -1,
        0,
        2**70,
        1.5,
        "",
        "x",
        [],
        [None],
        [[1], "a"],
        {},
        {"a": {}},
        "\u0000",
        [[[]]],
        -0.0,
        1e308,
    ]
    for _ in range(200):
        route, good = rng.choice([("/v1/completions", GOOD), ("/v1/chat/completions", CHAT)])
        fields = [
            *good,
            "n",
            "stop",
            "seed",
            "logprobs",
            "logit_bias",
            "stream_options",
            "temperature",
            "echo",
            "stop_token_ids",
        ]
        body = {**good, **{rng.choice(fields): rng.choice(junk) for _ in range(rng.randint(1, 3))}}
        raw = json.dumps(body).encode()
        if rng.random() < 0.3:
            cut = rng.randrange(len(raw))
            raw = raw[:cut] + bytes([rng.randrange(256)]) + raw[cut + rng.randint(0, 2) :]
        response = http.post(route, content=raw)
        assert response.status_code < 500, (raw, response.text)
        if response.status_code != 200:
            check_error(response, response.status_code)
    assert http.post("/v1/completions", json=GOOD).status_code == 200
