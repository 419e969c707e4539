"""Anthropic's Messages: the answers of chat, by blocks, with errors and keys as its clients expect them."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import NoTokenizer, Tokenizer
from tests.runtime.server.harness import Running, running

GOOD: Any = {
    "model": "org/base",
    "max_tokens": 12,
    "system": "short",
    "messages": [{"role": "user", "content": "say hé"}],
}
COUNT = "/v1/messages/count_tokens"
TOOL = {"name": "f", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of a stream, by their names."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if line)
        if lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


def expected(client: openai.OpenAI, turns: Any, **more: Any) -> Any:
    return client.chat.completions.create(model="org/base", messages=turns, **more)


def test_a_message_is_the_answer_of_the_chat_that_it_stands_for(client: openai.OpenAI, http: httpx.Client) -> None:
    turns = [{"role": "system", "content": "short"}, *GOOD["messages"]]
    chat = expected(client, turns, max_tokens=12)
    found = http.post("/v1/messages", json=GOOD).raise_for_status().json()
    assert found.pop("id").startswith("msg_")
    assert found == {
        "type": "message",
        "role": "assistant",
        "model": "org/base",
        "content": [{"type": "text", "text": chat.choices[0].message.content}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": chat.usage.prompt_tokens, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
            "output_tokens": 12,
        },
    }  # fmt: skip
    counted = {name: GOOD[name] for name in ("model", "system", "messages")}
    assert http.post(COUNT, json=counted).json() == {"input_tokens": chat.usage.prompt_tokens}


def test_blocks_are_the_turns_of_the_chat(client: openai.OpenAI, http: httpx.Client) -> None:
    turns = [
        {"role": "system", "content": "short"}, {"role": "user", "content": "say hé"},
        {"role": "assistant", "content": "hé"}, {"role": "user", "content": "again"},
    ]  # fmt: skip
    blocks: Any = [
        {
            "role": turn["role"],
            "content": [{"type": "text", "text": turn["content"], "cache_control": {"type": "ephemeral"}}],
        }
        for turn in turns[1:]
    ]
    given = {**GOOD, "system": [{"type": "text", "text": "short"}], "messages": blocks, "max_tokens": 9}
    found = http.post("/v1/messages", json=given).raise_for_status().json()
    assert found["content"][0]["text"] == expected(client, turns, max_tokens=9).choices[0].message.content


def test_results_and_texts_of_a_turn_keep_their_order(client: openai.OpenAI, http: httpx.Client) -> None:
    call: Any = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turns: Any = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "so", "tool_calls": [call, {**call, "id": "d"}]},
        {"role": "user", "content": "first"},
        {"role": "tool", "tool_call_id": "c", "content": "one"},
        {"role": "tool", "tool_call_id": "d", "content": "two\nthree"},
        {"role": "user", "content": "last"},
    ]
    used = [{"type": "tool_use", "id": name, "name": "f", "input": {"x": 1}} for name in "cd"]
    blocks: Any = [
        {"type": "text", "text": "first"},
        {"type": "tool_result", "tool_use_id": "c", "content": "one", "is_error": False},
        {"type": "tool_result", "tool_use_id": "d", "content": [{"type": "text", "text": t} for t in ("two", "three")]},
        {"type": "text", "text": "last"},
    ]
    given: Any = [
        turns[0],
        {"role": "assistant", "content": [{"type": "text", "text": "so"}, *used]},
        {"role": "user", "content": blocks},
    ]
    found = http.post("/v1/messages", json={"model": "org/base", "max_tokens": 9, "messages": given})
    text = found.raise_for_status().json()["content"][0]["text"]
    assert text == expected(client, turns, max_tokens=9).choices[0].message.content


def test_a_stream_has_the_named_events_in_their_order(http: httpx.Client) -> None:
    whole = http.post("/v1/messages", json=GOOD).json()
    response = http.post("/v1/messages", json={**GOOD, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assert [name for name, _ in itertools.groupby(name for name, _ in events)] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert all(data["type"] == name for name, data in events)
    start = events[0][1]["message"]
    assert start["usage"] == {**whole["usage"], "output_tokens": 0} and start["content"] == []
    assert events[1][1] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert len(deltas) > 1 and "".join(delta["text"] for delta in deltas) == whole["content"][0]["text"]
    ended = events[-2][1]
    assert ended["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert ended["usage"] == whole["usage"]


def test_the_stop_sequence_that_ended_the_answer_is_named(http: httpx.Client) -> None:
    text = http.post("/v1/messages", json=GOOD).json()["content"][0]["text"]
    at = next(at for at in range(1, len(text) - 3) if text.find(text[at + 1 : at + 4]) == at + 1)
    longer, shorter = text[at : at + 4], text[at + 1 : at + 4]  # both are complete at the same character
    stops = {**GOOD, "stop_sequences": ["no such text", shorter, longer]}
    found = http.post("/v1/messages", json=stops).json()
    ended = {"stop_reason": "stop_sequence", "stop_sequence": longer}
    assert found["content"] == [{"type": "text", "text": text[:at]}] and ended.items() <= found.items()
    events = events_of(http.post("/v1/messages", json={**stops, "stream": True}).text)
    assert events[-2][1]["delta"] == ended
    assert "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta") == text[:at]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 250}, "context"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "content"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
            "tool_use",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "user", "content": "ab " * 400}]}, "context"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"temperature": 3}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"stop_sequences": ["a" * 1025]}, "stop_sequences"),
        ({"stop": "a"}, "stop"),
        ({"n": 2}, "n"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [{**TOOL, "type": "bash_20250124"}]}, "tools"),
        ({"tools": [{"name": "a b"}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"output_config": {"effort": "low"}}, "effort"),
        ({"output_config": {"format": {"type": "poem"}}}, "output_config"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_wrong_fields_are_errors_of_anthropics_shape(http: httpx.Client, change: dict[str, Any], word: str) -> None:
    routes = (
        ("/v1/messages",)
        if {"max_tokens", "stop_sequences"} & change.keys() or word == "context"
        else ("/v1/messages", COUNT)
    )
    for route in routes:
        response = http.post(route, json={**GOOD, **change})
        if route == COUNT and {"output_config", "tool_choice"} & change.keys() and response.status_code == 200:
            continue  # only answers have a form
        assert response.status_code == 400, response.text
        found = response.json()
        assert found["type"] == "error" and found["error"]["type"] == "invalid_request_error"
        assert word in found["error"]["message"] and set(found["error"]) == {"type", "message"}


def test_what_changes_nothing_is_taken(http: httpx.Client) -> None:
    more = {"metadata": {"user_id": "me"}, "thinking": {"type": "disabled"}, "service_tier": "auto", "tools": []}
    assert http.post("/v1/messages?beta=true", json={**GOOD, **more}).status_code == 200
    assert (
        http.post("/v1/messages", json={**GOOD, "tool_choice": {"type": "none"}, "cache_salt": "a"}).status_code == 200
    )


def test_errors_have_anthropics_words_for_their_statuses(tokenizer: Tokenizer) -> None:
    config = ServerConfig(api_key="secret", max_body_bytes=1000, max_queued=1)
    with running(tokenizer, config=config) as server, server.http() as http:
        for route in ("/v1/messages", COUNT):
            given = [
                (401, "authentication_error", http.post(route, json=GOOD, headers={"Authorization": "Bearer x"})),
                (404, "not_found_error", http.post(route, json={**GOOD, "model": "nothing"})),
                (413, "request_too_large", http.post(route, json={**GOOD, "x": "x" * 1000})),
                (405, "invalid_request_error", http.get(route)),
                (404, "not_found_error", http.post(f"{route}/nothing", json=GOOD)),
            ]
            with server.gate.place():
                given.append((429, "rate_limit_error", http.post(route, json=GOOD)))
            for status, kind, response in given:
                assert response.status_code == status and response.json()["error"]["type"] == kind, response.text
        assert "retry-after" in given[-1][2].headers
        assert http.post("/v1/messagesx", json=GOOD).json()["error"]["code"] == "not_found"


def test_the_key_may_come_as_x_api_key(tokenizer: Tokenizer) -> None:
    served = running(tokenizer, config=ServerConfig(api_key="s3cret-é"))
    with served as server, httpx.Client(base_url=server.address, trust_env=False) as http:
        for key, status in (("s3cret-é", 200), ("s3cret", 401), ("", 401), ("Bearer s3cret-é", 401)):
            for route, body in (("/v1/messages", GOOD), ("/v1/completions", {"model": "org/base", "prompt": "a"})):
                response = http.post(route, json=body, headers={b"x-api-key": key.encode()})
                assert response.status_code == status, (key, route)
        both = {b"x-api-key": b"wrong", b"authorization": "Bearer s3cret-é".encode()}
        assert http.post("/v1/messages", json=GOOD, headers=both).status_code == 200


def test_a_model_without_tokenizer_has_no_messages() -> None:
    with running(NoTokenizer()) as server, server.http() as http:
        for route in ("/v1/messages", COUNT):
            refused = http.post(route, json=GOOD)
            assert refused.status_code == 400 and "no tokenizer" in refused.json()["error"]["message"]


def test_an_engine_that_fails_is_an_error_in_answer_and_stream(tokenizer: Tokenizer, tmp_path: Path) -> None:
    # Steps are slow, so that the stream has begun when one of them fails.
    slow = running(tokenizer, fail_at=(8,), pace=lambda _: time.sleep(0.05))
    with slow as server, server.http() as http:
        name, data = events_of(http.post("/v1/messages", json={**GOOD, "stream": True}).text)[-1]
        assert (name, data["type"], data["error"]["type"]) == ("error", "error", "api_error")
    with running(tokenizer, fail_at=(4,), queue=str(tmp_path / "queue")) as server, server.http() as http:
        for _ in range(2):
            failed = http.post("/v1/messages", json=GOOD, headers={"Idempotency-Key": "k"})
            assert failed.status_code == 500 and failed.json()["error"]["type"] == "api_error", failed.text


def test_the_same_key_gives_the_same_stream_and_goes_on_behind_an_event(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with running(tokenizer, queue=str(tmp_path / "queue")) as server, server.http() as http:
        body, headers = {**GOOD, "stream": True}, {"Idempotency-Key": "streamed"}
        whole = http.post("/v1/messages", json=body, headers=headers).text
        assert http.post("/v1/messages", json=body, headers=headers).text == whole
        events = [block for block in whole.split("\n\n") if block]
        assert "event: message_stop" in events[-1] and events[-1].startswith("id: ")
        numbers = [int(block.split("\n")[0][4:]) for block in events if block.startswith("id: ")]
        middle = next(at for at, block in enumerate(events) if block.startswith(f"id: {numbers[2]}\n"))
        rest = http.post("/v1/messages", json=body, headers={**headers, "Last-Event-ID": str(numbers[2])}).text
        assert rest == "\n\n".join(events[middle + 1 :]) + "\n\n"
        plain = http.post("/v1/messages", json=GOOD).json()
        texts = [json.loads(line[6:]) for line in whole.split("\n") if line.startswith("data: ")]
        deltas = "".join(each["delta"]["text"] for each in texts if each["type"] == "content_block_delta")
        assert deltas == plain["content"][0]["text"]
        assert http.post("/v1/messages", json={**body, "seed": 2}, headers=headers).status_code == 422
