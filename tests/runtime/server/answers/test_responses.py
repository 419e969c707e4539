"""OpenAI's Responses through the real client: the answers of chat, by items."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from runtime.frontend.tokenizer import Tokenizer
from tests.runtime.server.harness import Running, running

TURNS = [
    {"role": "system", "content": "short"},
    {"role": "user", "content": "say hé"},
    {"role": "assistant", "content": "hé"},
    {"role": "user", "content": "again"},
]


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def chat(client: openai.OpenAI, messages: Any, **more: Any) -> Any:
    return client.chat.completions.create(model="org/base", messages=messages, **more)


def test_a_response_is_the_answer_of_the_chat_that_it_stands_for(client: openai.OpenAI) -> None:
    expected = chat(client, TURNS[:2], max_tokens=12)
    done = client.responses.create(model="org/base", instructions="short", input="say hé", max_output_tokens=12)
    assert done.output_text == expected.choices[0].message.content
    assert (done.status, done.model, done.object) == ("incomplete", "org/base", "response")
    assert done.incomplete_details is not None and done.incomplete_details.reason == "max_output_tokens"
    assert done.id.startswith("resp_") and done.output[0].id.startswith("msg_") and done.store is False
    assert done.usage is not None and expected.usage is not None
    assert (done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens) == (
        expected.usage.prompt_tokens, 12, expected.usage.total_tokens
    )  # fmt: skip


def test_items_are_the_turns_of_the_chat(client: openai.OpenAI) -> None:
    expected = chat(client, TURNS, max_tokens=9).choices[0].message.content
    first = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "say hé"}]}
    said = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "hé", "annotations": []}]}  # fmt: skip
    given: Any = [{"role": "developer", "content": "short"}, first, said, TURNS[3]]
    done = client.responses.create(model="org/base", input=given, max_output_tokens=9)
    assert done.output_text == expected


def test_a_stream_has_the_typed_events_in_their_order(client: openai.OpenAI) -> None:
    asked: Any = {"model": "org/base", "input": "say hé", "max_output_tokens": 12, "metadata": {"a": "b"}}
    whole = client.responses.create(**asked)
    events: list[Any] = list(client.responses.create(**asked, stream=True))
    names = [name for name, _ in itertools.groupby(event.type for event in events)]
    assert names == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1 and "".join(event.delta for event in deltas) == whole.output_text
    assert len({event.item_id for event in deltas}) == 1
    last, opened = events[-1].response, events[0].response
    assert (opened.status, opened.output, opened.usage) == ("in_progress", [], None)
    assert (last.output_text, last.status, last.usage, last.metadata) == (
        whole.output_text, whole.status, whole.usage, {"a": "b"}
    )  # fmt: skip
    assert last.output[0].status == events[-2].item.status == "incomplete" and opened.id == last.id


def test_an_answer_that_ends_by_itself_is_completed(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    text = client.responses.create(model="org/base", input="say hé", max_output_tokens=12).output_text
    more: Any = {"stop": text[3:5]}
    done = client.responses.create(model="org/base", input="say hé", max_output_tokens=12, extra_body=more)
    assert (done.status, done.output_text, done.incomplete_details) == ("completed", text[:3], None)
    events: list[Any] = list(
        client.responses.create(model="org/base", input="say hé", max_output_tokens=12, stream=True, extra_body=more)
    )
    assert events[-1].type == "response.completed" and events[-1].response.output_text == text[:3]


GOOD = {"model": "org/base", "input": "hi", "max_output_tokens": 2}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "king", "content": "a"}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c", "arguments": "no"}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"input": "ab " * 400}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 255}, "input"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"text": {"format": {"type": "poem"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"background": 1}, "background"),
        ({"background": True, "store": True, "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"stream_options": {}}, "stream_options"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_wrong_fields_are_named(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    response = http.post("/v1/responses", json={**GOOD, **change})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and error["message"] and "max_completion" not in error["message"]


def test_null_means_not_given_and_what_changes_nothing_is_taken(http: httpx.Client) -> None:
    nulls = dict.fromkeys(("instructions", "tools", "text", "reasoning", "previous_response_id", "store", "metadata"))
    more = {"truncation": "disabled", "include": ["reasoning.encrypted_content"], "service_tier": "auto", "user": "me"}
    done = http.post("/v1/responses", json={**GOOD, **nulls, **more, "store": False, "background": False})
    assert done.status_code == 200 and json.loads(done.text)["store"] is False


def test_nothing_is_kept_without_a_queue(http: httpx.Client) -> None:
    made = http.post("/v1/responses", json=GOOD).json()["id"]
    for method in ("GET", "DELETE"):
        response = http.request(method, f"/v1/responses/{made}")
        assert (response.status_code, response.json()["error"]["code"]) == (501, "queue_off")


def test_an_engine_that_fails_in_a_stream_is_an_event_of_it(tokenizer: Tokenizer) -> None:
    # Steps are slow, so that the stream has begun when one of them fails.
    slow = running(tokenizer, fail_at=(8,), pace=lambda _: time.sleep(0.05))
    with slow as server, server.http() as http:
        text = http.post("/v1/responses", json={**GOOD, "max_output_tokens": 20, "stream": True}).text
    events = [block.split("\n") for block in text.split("\n\n") if block]
    name, data = events[-1]
    last = json.loads(data.removeprefix("data: "))
    assert name == "event: error" and last["sequence_number"] == len(events) - 1 and last["message"]
