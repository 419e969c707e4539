"""Log-probabilities in responses: those of the chat, in OpenAI's own types, with the text that they belong to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseOutputText, ResponseTextDeltaEvent, ResponseTextDoneEvent

from runtime.frontend.choice import TextPiece, TokenEntry
from runtime.frontend.tools.calls import CallPart
from runtime.server.answers.blocks import BlockReader, blocks_of
from runtime.server.openai.format import FinishedChoice
from tests.runtime.server.harness import Running

INCLUDE: Any = ["message.output_text.logprobs"]
ASKED: Any = {"model": "org/base", "input": "say hé", "max_output_tokens": 30, "include": INCLUDE, "top_logprobs": 3}


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


@pytest.fixture(scope="module")
def of_chat(http: httpx.Client) -> Any:
    turns = [{"role": "user", "content": "say hé"}]
    body = {"model": "org/base", "messages": turns, "max_tokens": 30, "logprobs": True, "top_logprobs": 3}
    return http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]["logprobs"]["content"]


def test_a_response_has_those_of_the_chat(http: httpx.Client, of_chat: Any) -> None:
    answer = http.post("/v1/responses", json=ASKED).raise_for_status().json()
    assert answer["top_logprobs"] == 3
    (part,) = answer["output"][0]["content"]
    read = ResponseOutputText.model_validate(part, strict=True)
    assert part["logprobs"] == of_chat and len(of_chat) == 30
    assert read.logprobs is not None and all(len(each.top_logprobs) == 3 for each in read.logprobs)


def test_the_client_reads_them(client: openai.OpenAI, of_chat: Any) -> None:
    part: Any = client.responses.create(**{**ASKED, "top_logprobs": None}).output[0]
    found = part.content[0].logprobs
    assert [each.token for each in found] == [each["token"] for each in of_chat]
    assert all(each.top_logprobs == [] for each in found)
    without: Any = client.responses.create(**{**ASKED, "include": None, "top_logprobs": 0}).output[0]
    assert without.content[0].logprobs == []


def test_in_a_stream_they_come_with_the_text(http: httpx.Client, of_chat: Any) -> None:
    text = http.post("/v1/responses", json={**ASKED, "stream": True}).raise_for_status().text
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
    by_type: dict[str, list[Any]] = {}
    for event in events:
        by_type.setdefault(event["type"], []).append(event)
    deltas = by_type["response.output_text.delta"]
    for delta in deltas:
        assert ResponseTextDeltaEvent.model_validate(delta, strict=True).logprobs
    (done,) = by_type["response.output_text.done"]
    ResponseTextDoneEvent.model_validate(done, strict=True)
    given = [each for delta in deltas for each in delta["logprobs"]]
    # The last tokens may have no text: a character that does not end. They come with the end of the text.
    assert len(deltas) > 1 and given == of_chat[: len(given)] and len(given) > 20
    assert done["logprobs"] == of_chat == by_type["response.content_part.done"][0]["part"]["logprobs"]
    whole = by_type["response.incomplete"][0]["response"]
    assert whole["output"][0]["content"][0]["logprobs"] == of_chat
    plain = http.post("/v1/responses", json={**ASKED, "stream": True, "include": []} | {"top_logprobs": 0}).text
    assert '"logprobs":[]' in plain and '"logprobs":[{' not in plain


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": True}, "top_logprobs"),
        ({"include": None}, "top_logprobs"),
        ({"include": ["reasoning.encrypted_content"]}, "top_logprobs"),
        ({"include": [*INCLUDE, "file_search_call.results"]}, "include"),
        ({"include": [["message.output_text.logprobs"]]}, "include"),
    ],
)
def test_wrong_fields_are_named(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    refused = http.post("/v1/responses", json={**ASKED, **change})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def entry(token: int) -> TokenEntry:
    return TokenEntry(token, -1.0, (), 0)


CALL, MORE = CallPart(0, "", "c0", "f"), CallPart(0, "{}")


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        # A text that was held back comes with all of its tokens; tokens behind the last text belong to it.
        ([("", 1, ()), ("ab", 2, ()), ("", 3, ())], [("ab", [1, 2, 3])]),
        # What was held back and became a call is no text's, nor is what the call is written with.
        ([("a", 1, ()), ("", 2, ()), ("", 3, (CALL,)), ("", 4, ()), ("", 5, (MORE,))], [("a", [1]), ("{}", [])]),
        ([("", 1, ()), ("", 2, (CALL, MORE)), ("", 3, ()), ("b", 4, ()), ("", 5, ())], [("{}", []), ("b", [4, 5])]),
        ([("", 1, ())], [("", [1])]),
    ],
)
def test_each_text_has_those_of_its_own_tokens(pieces: list[tuple[str, int, Any]], expected: Any) -> None:
    reader, finished = BlockReader(), FinishedChoice(0)
    for at, (text, token, calls) in enumerate(pieces):
        finish: Any = "stop" if at == len(pieces) - 1 else None
        piece = TextPiece(0, text, (token,), (entry(token),), finish, calls=calls)
        finished.add(piece)
        for change in reader.read(piece):
            assert change.change != "more" or change.block.text.endswith(change.text)
    for blocks in (reader.blocks, blocks_of(finished)):
        assert [(block.text, [each.token for each in block.entries]) for block in blocks] == expected
