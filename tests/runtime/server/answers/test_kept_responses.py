"""Responses that are kept on a server with a queue: shown, continued, removed, and answered again after a restart."""

from __future__ import annotations

import json
import threading
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

ASKED: Any = {"model": "org/base", "input": "say hé", "instructions": "short", "max_output_tokens": 12}


@pytest.fixture(scope="module")
def kept(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("kept") / "queue"
    with running(tokenizer, queue=str(folder), pace=lambda _: time.sleep(0.001), credit=4) as started:
        yield started


@pytest.fixture(scope="module")
def http(kept: Running) -> Iterator[httpx.Client]:
    with kept.http() as client:
        yield client


@pytest.fixture(scope="module")
def client(kept: Running) -> Iterator[openai.OpenAI]:
    with kept.client() as made:
        yield made


def ask(http: httpx.Client, **more: Any) -> dict[str, Any]:
    answer: dict[str, Any] = http.post("/v1/responses", json={**ASKED, **more}).raise_for_status().json()
    return answer


def test_a_response_is_shown_until_it_is_removed(client: openai.OpenAI, http: httpx.Client) -> None:
    made = ask(http)
    assert made["store"] is True
    assert http.get(f"/v1/responses/{made['id']}").json() == made
    assert client.responses.retrieve(made["id"]).output_text == made["output"][0]["content"][0]["text"]
    removed = http.delete(f"/v1/responses/{made['id']}")
    assert removed.json() == {"id": made["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        assert http.request(method, f"/v1/responses/{made['id']}").status_code == 404
    assert http.get(f"/zoo/requests/{made['id']}").status_code == 404


def test_what_a_response_answers_is_listed_with_what_it_continues(client: openai.OpenAI, http: httpx.Client) -> None:
    first = ask(http)
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "4"}
    second = ask(http, input=[{"role": "user", "content": [{"type": "input_text", "text": "on"}]}, call, result],
                 previous_response_id=first["id"])  # fmt: skip
    path = f"/v1/responses/{second['id']}/input_items"
    items = list(client.responses.input_items.list(second["id"], order="asc", limit=2))  # three pages
    assert [item.type for item in items] == ["message"] * 3 + ["function_call", "function_call_output"]
    said = [(item.role, item.content[0].text) for item in items[:3] if item.type == "message"]
    assert said == [("user", "say hé"), ("assistant", first["output"][0]["content"][0]["text"]), ("user", "on")]
    assert items[3].model_dump(include=set(call)) == call and items[4].model_dump(include=set(result)) == result
    assert len({item.id for item in items}) == 5
    newest = http.get(path, params={"limit": 3}).json()
    assert [each["id"] for each in newest["data"]] == [item.id for item in items[:1:-1]] and newest["has_more"] is True
    assert (newest["first_id"], newest["last_id"]) == (items[4].id, items[2].id)
    rest = http.get(path, params={"after": newest["last_id"]}).json()
    assert [each["id"] for each in rest["data"]] == [items[1].id, items[0].id] and rest["has_more"] is False
    for wrong in ({"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"order": "up"}, {"after": "msg_none"}):
        refused = http.get(path, params=wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(wrong)))
    assert http.get("/v1/responses/resp_none/input_items").status_code == 404


def test_one_that_is_not_to_be_stored_is_not(kept: Running, http: httpx.Client) -> None:
    made = ask(http, store=False)
    keyed = http.post("/v1/responses", json={**ASKED, "store": False}, headers={"Idempotency-Key": "unstored"}).json()
    kept_one = http.post("/v1/responses", json=ASKED, headers={"Idempotency-Key": "stored"}).json()
    assert kept_one["store"] is True and http.get(f"/v1/responses/{kept_one['id']}").json() == kept_one
    for response in (made, keyed):
        assert response["store"] is False and http.get(f"/v1/responses/{response['id']}").status_code == 404
        refused = http.post("/v1/responses", json={**ASKED, "previous_response_id": response["id"]})
        assert refused.json()["error"]["code"] == "previous_response_not_found"


def test_a_response_continues_earlier_ones(client: openai.OpenAI, http: httpx.Client) -> None:
    first = client.responses.create(**ASKED)
    second = client.responses.create(**{**ASKED, "input": "again", "previous_response_id": first.id})
    third = client.responses.create(**{**ASKED, "input": "more", "previous_response_id": second.id, "store": False})
    assert third.previous_response_id == second.id
    turns: Any = [
        {"role": "system", "content": "short"},
        {"role": "user", "content": "say hé"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "more"},
    ]
    chat = client.chat.completions.create(model="org/base", messages=turns, max_tokens=12)
    assert third.output_text == chat.choices[0].message.content
    assert third.usage and chat.usage and third.usage.input_tokens == chat.usage.prompt_tokens
    client.responses.delete(first.id)  # the second one has the conversation before it
    later = client.responses.create(**{**ASKED, "input": "more", "previous_response_id": second.id})
    assert later.output_text == third.output_text


def test_instructions_are_those_of_the_request_alone(http: httpx.Client) -> None:
    first = ask(http)
    del ASKED["instructions"]
    try:
        without = ask(http, input="again", previous_response_id=first["id"])
    finally:
        ASKED["instructions"] = "short"
    assert without["instructions"] is None
    assert (
        without["usage"]["input_tokens"]
        < ask(http, input="again", previous_response_id=first["id"])["usage"]["input_tokens"]
    )


@pytest.mark.parametrize("name", ["resp_nothing", "cmpl-1", ""])
def test_an_earlier_response_must_be_there(http: httpx.Client, name: str) -> None:
    refused = http.post("/v1/responses", json={**ASKED, "previous_response_id": name})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "previous_response_id")


def test_other_durable_requests_are_no_responses(http: httpx.Client) -> None:
    done = http.post(
        "/v1/chat/completions",
        json={"model": "org/base", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        headers={"Idempotency-Key": "a chat"},
    ).json()
    assert http.get(f"/zoo/requests/{done['id']}").status_code == 200
    assert http.get(f"/v1/responses/{done['id']}").status_code == 404
    assert http.delete(f"/v1/responses/{done['id']}").status_code == 404
    assert http.post("/v1/responses", json={**ASKED, "previous_response_id": done["id"]}).status_code == 400


def test_a_conversation_is_bounded_as_a_body(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = ServerConfig(max_body_bytes=900)
    with running(tokenizer, queue=str(tmp_path / "queue"), config=config) as server, server.http() as http:
        first = ask(http, input="a" * 150)
        more = {"metadata": {"a": "x" * 480, "b": "y" * 170}}
        assert ask(http, **more)
        refused = http.post("/v1/responses", json={**ASKED, **more, "previous_response_id": first["id"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (413, "previous_response_id"), refused.text


def test_the_same_key_gives_the_same_stream_and_goes_on_behind_an_event(http: httpx.Client) -> None:
    body, headers = {**ASKED, "stream": True}, {"Idempotency-Key": "streamed"}
    whole = http.post("/v1/responses", json=body, headers=headers).text
    assert http.post("/v1/responses", json=body, headers=headers).text == whole
    events = [block for block in whole.split("\n\n") if block]
    numbers = [int(block.split("\n")[0].removeprefix("id: ")) for block in events if block.startswith("id: ")]
    assert numbers == sorted(numbers) and len(numbers) > 3
    assert events[-1].startswith("id: ") and "event: response.incomplete" in events[-1]
    middle = next(at for at, block in enumerate(events) if block.startswith(f"id: {numbers[1]}\n"))
    rest = http.post("/v1/responses", json=body, headers={**headers, "Last-Event-ID": str(numbers[1])}).text
    assert rest == "\n\n".join(events[middle + 1 :]) + "\n\n"
    changed = http.post("/v1/responses", json={**body, "seed": 2}, headers=headers)
    assert changed.status_code == 422


def test_one_that_runs_is_shown_and_removed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = threading.Event()
    slow = running(tokenizer, queue=str(tmp_path / "queue"), pace=lambda _: gate.wait(20))
    with slow as server, server.http() as http, server.http() as other:
        asking = threading.Thread(target=lambda: http.post("/v1/responses", json=ASKED))
        asking.start()
        try:
            assert eventually(lambda: len(server.unfinished()) == 1)
            (name,) = server.unfinished()
            shown = other.get(f"/v1/responses/{name}").json()
            assert (shown["status"], shown["output"], shown["instructions"]) == ("in_progress", [], "short")
            continued = other.post("/v1/responses", json={**ASKED, "previous_response_id": name})
            assert continued.status_code == 400
            gate.set()
            assert other.delete(f"/v1/responses/{name}").status_code == 200
            assert other.get(f"/v1/responses/{name}").status_code == 404
        finally:
            gate.set()
            asking.join()


def test_responses_belong_to_the_key_that_they_came_with(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = str(tmp_path / "queue")
    with running(tokenizer, queue=folder, config=ServerConfig(api_key="one")) as server, server.http() as http:
        made = ask(http)
        assert httpx.get(f"{server.address}/v1/responses/{made['id']}", trust_env=False).status_code == 401
    with running(tokenizer, queue=folder, config=ServerConfig(api_key="two")) as server, server.http() as http:
        assert http.get(f"/v1/responses/{made['id']}").status_code == 404
        assert http.post("/v1/responses", json={**ASKED, "previous_response_id": made["id"]}).status_code == 400
    with running(tokenizer, queue=folder, config=ServerConfig(api_key="one")) as server, server.http() as http:
        assert http.get(f"/v1/responses/{made['id']}").json() == made


def test_one_that_a_server_put_down_is_continued_by_the_next(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder, steps, headers = str(tmp_path / "queue"), 0, {"Idempotency-Key": "restarted"}
    shut = threading.Event()

    def pace(_: int) -> None:
        nonlocal steps
        steps += 1
        if steps > 6:
            shut.wait(3)

    with running(tokenizer, queue=folder) as server, server.http() as http:
        first = ask(http)
        body = {**ASKED, "input": "again", "previous_response_id": first["id"], "stream": True}
        expected = http.post("/v1/responses", json=body).text
    with running(tokenizer, queue=folder, pace=pace) as server:
        with server.http() as http, http.stream("POST", "/v1/responses", json=body, headers=headers) as response:
            seen = next(response.iter_bytes()).decode()
        assert "response.created" in seen, seen
        (name,) = server.unfinished()
    shut.set()
    with running(tokenizer, queue=folder) as server, server.http() as http:
        http.delete(f"/v1/responses/{first['id']}")
        again = http.post("/v1/responses", json=body, headers=headers).text
        assert again.startswith(seen) and json.loads(again.split("data: ")[-1])["response"]["id"] == name
        texts = [_deltas(stream) for stream in (expected, again)]
        assert texts[0] == texts[1] and len(texts[0]) > 3


def _deltas(stream: str) -> str:
    events = [json.loads(line[6:]) for line in stream.split("\n") if line.startswith("data: ")]
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
