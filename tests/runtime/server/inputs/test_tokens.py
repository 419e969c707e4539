"""Text to token ids and back: what the generating routes take, with their bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from runtime.config import ServerConfig
from runtime.frontend.served_models import StoredModel
from runtime.frontend.tokenizer import NoTokenizer, Tokenizer, adapt
from tests.runtime.frontend.samples import sentence_piece
from tests.runtime.server.harness import Running, running

MESSAGES = [{"role": "system", "content": "short"}, {"role": "user", "content": "say hé"}]


@pytest.fixture(scope="module")
def credit() -> int:
    """Override the parameter: these requests never reach a driver."""
    return 1


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def tokenized(http: httpx.Client, **body: Any) -> dict[str, Any]:
    found: dict[str, Any] = http.post("/tokenize", json={"model": "org/base", **body}).raise_for_status().json()
    return found


@pytest.mark.parametrize("text", ["", "hé llo", "a" * 2000, "<s>x</s>"])
def test_a_text_gives_the_ids_that_completions_take(http: httpx.Client, tokenizer: Tokenizer, text: str) -> None:
    found = tokenized(http, prompt=text)
    assert found == {
        "count": len(tokenizer.encode(text)), "max_model_len": 256, "tokens": tokenizer.encode(text), "token_strs": None
    }  # fmt: skip
    if 0 < found["count"] < 200:
        done = http.post(
            "/v1/completions", json={"model": "org/base", "prompt": text, "max_tokens": 1, "return_token_ids": True}
        ).json()
        assert done["choices"][0]["prompt_token_ids"] == found["tokens"]
    again = http.post("/detokenize", json={"model": "org/base", "tokens": found["tokens"]}).json()
    assert again == {"prompt": text}


def test_a_conversation_gives_the_ids_that_chat_takes(http: httpx.Client, tokenizer: Tokenizer) -> None:
    found = tokenized(http, messages=MESSAGES, return_token_strs=True)
    assert found["tokens"] == tokenizer.encode_chat(MESSAGES) and found["count"] == len(found["tokens"])
    done = http.post(
        "/v1/chat/completions",
        json={"model": "org/base", "messages": MESSAGES, "max_tokens": 1, "return_token_ids": True},
    ).json()
    assert done["prompt_token_ids"] == found["tokens"]
    assert len(found["token_strs"]) == found["count"] and "<system>" in "".join(found["token_strs"])


def test_special_tokens_are_added_unless_refused_and_come_back_as_text() -> None:
    with running(adapt(sentence_piece())) as server, server.http() as http:
        with_bos, without = tokenized(http, prompt="hello"), tokenized(http, prompt="hello", add_special_tokens=False)
        assert with_bos["tokens"] == [1, *without["tokens"]]
        shown = tokenized(http, prompt="hello", return_token_strs=True)["token_strs"]
        assert shown[0] == "<s>" and "".join(shown[1:]) == " hello"
        text = http.post("/detokenize", json={"model": "org/base", "tokens": with_bos["tokens"]}).json()["prompt"]
        assert text.startswith("<s>") and text.endswith("hello")


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "king", "content": "a"}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{"type": "web_search"}]}, "tools"),
        ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
)
def test_wrong_fields(http: httpx.Client, route: str, body: dict[str, Any], param: str) -> None:
    response = http.post(route, json={"model": "org/base", **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_without_a_tokenizer_there_is_the_error_of_completions() -> None:
    with running(NoTokenizer()) as server, server.http() as http:
        errors = [
            http.post(route, json={"model": "org/base", "prompt": "hi"}) for route in ("/v1/completions", "/tokenize")
        ]
        assert errors[0].status_code == errors[1].status_code == 400 and errors[0].json() == errors[1].json()
        refused = http.post("/detokenize", json={"model": "org/base", "tokens": [5]})
        assert refused.status_code == 400 and "no tokenizer" in refused.json()["error"]["message"]


def test_a_stored_model_is_served_first(tokenizer: Tokenizer) -> None:
    with running(tokenizer, on_demand=(StoredModel("org/spare"),)) as server, server.http() as http:
        assert http.post("/tokenize", json={"model": "spare", "prompt": "hi"}).json()["count"] == 2
        assert [model for model in server.service.models.all() if model.name == "org/spare"]


def test_the_servers_places_key_and_size_hold(tokenizer: Tokenizer) -> None:
    config = ServerConfig(api_key="secret", max_body_bytes=1000, max_queued=1)
    with running(tokenizer, config=config) as server, server.http() as http:
        for route, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
            body["model"] = "org/base"
            assert http.post(route, json=body, headers={"Authorization": "Bearer x"}).status_code == 401
            assert http.post(route, json={**body, "x": "x" * 1000}).status_code == 413
            assert http.post(route, json={**body, "model": "nothing"}).status_code == 404
            with server.gate.place():
                assert http.post(route, json=body).status_code == 429
            assert http.post(route, json=body).status_code == 200
