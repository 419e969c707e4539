"""Embeddings: pooled hidden states, which the integer engine states as (id, place, 1) of each token."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from runtime.config import ServerConfig
from runtime.frontend.served_models import StoredModel
from runtime.frontend.tokenizer import NoTokenizer, Tokenizer
from tests.runtime.cluster.whole import WholeEngine, inline
from tests.runtime.server.harness import BASE, FINE, FakeSource, Running, running, serving

ROUTE = "/v1/embeddings"
IDS = [5, 7, 9, 30]


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def embedded(http: httpx.Client, given: Any, **more: Any) -> list[list[float]]:
    """Return embeddings as they are, not of unit length."""
    found = http.post(ROUTE, json={"model": "org/base", "input": given, "normalize": False, **more})
    data = found.raise_for_status().json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return [one["embedding"] for one in data]


def mean(ids: list[int]) -> list[float]:
    return pytest.approx([sum(ids) / len(ids), (len(ids) - 1) / 2, 1.0], abs=1e-4)  # type: ignore[return-value]


def test_states_are_pooled_over_all_tokens_or_taken_from_the_last(http: httpx.Client) -> None:
    assert embedded(http, IDS) == [mean(IDS)]
    assert embedded(http, IDS, pooling="last") == [[30.0, 3.0, 1.0]]
    long = [*range(3, 253)]
    assert embedded(http, long) == [mean(long)] and embedded(http, long, pooling="last") == [[252.0, 249.0, 1.0]]
    assert embedded(http, [7] * 256) == [mean([7] * 256)]


def test_a_cached_prefix_changes_nothing(tokenizer: Tokenizer) -> None:
    engine, ids = WholeEngine((BASE, FINE), 512, device="fake"), [9] * 100 + [11]
    caching, source = inline(engine, sharing="cached"), FakeSource(tokenizer)
    with caching as driver, serving(driver, source, ServerConfig()) as server, server.http() as http:
        for _ in range(3):
            http.post("/v1/completions", json={"model": "org/base", "prompt": ids, "max_tokens": 2})
            assert embedded(http, ids) == [mean(ids)]
            assert embedded(http, ids, pooling="last") == [[11.0, 100.0, 1.0]]
        hits = [line for line in http.get("/metrics").text.splitlines() if line.startswith("vllm:prefix_cache_hits")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in hits) >= 5 * 96, hits


def test_texts_lists_and_ids_are_taken_in_their_order(http: httpx.Client, tokenizer: Tokenizer) -> None:
    texts = ["say hé", "again", "say hé"]
    assert embedded(http, texts) == [mean(tokenizer.encode(text)) for text in texts]
    assert embedded(http, texts[0]) == [mean(tokenizer.encode(texts[0]))]
    assert embedded(http, [IDS, [4]]) == [mean(IDS), mean([4])]


def test_the_openai_client_reads_vectors_of_unit_length(client: openai.OpenAI, http: httpx.Client) -> None:
    done = client.embeddings.create(model="org/base", input=IDS)  # the client asks for base64
    as_numbers = client.embeddings.create(model="org/base", input=IDS, encoding_format="float")
    (raw,) = embedded(http, IDS)
    expected = [value / math.hypot(*raw) for value in raw]
    for found in (done, as_numbers):
        assert found.data[0].embedding == pytest.approx(expected, abs=1e-6)
        assert (found.model, found.usage.prompt_tokens, found.usage.total_tokens) == ("org/base", 4, 4)
    coded = http.post(ROUTE, json={"model": "org/base", "input": IDS, "encoding_format": "base64"}).json()
    assert array("f", base64.b64decode(coded["data"][0]["embedding"])).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [320]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": [5] * 257}, "input"),
        ({"input": ["a", "ab " * 400]}, "input"),
        ({"dimensions": 2}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"normalize": "no"}, "normalize"),
        ({"priority": 2**40}, "priority"),
        ({"early_exit": 1}, "early_exit"),
    ],
)
def test_wrong_fields(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    refused = http.post(ROUTE, json={"model": "org/base", "input": "hi", **change})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def test_prompts_are_counted(tokenizer: Tokenizer) -> None:
    with running(tokenizer) as server, server.http() as http:
        embedded(http, [IDS, IDS])
        lines = [line for line in http.get("/metrics").text.splitlines() if "prompt_tokens_total{" in line]
        assert sum(float(line.rsplit(" ", 1)[1]) for line in lines) == 8


def test_limits_and_keys_are_those_of_completions(tokenizer: Tokenizer) -> None:
    config = ServerConfig(api_key="secret", max_body_bytes=1000, max_queued=3)
    with running(tokenizer, config=config) as server, server.http() as http:
        body: Any = {"model": "org/base", "input": "hi"}
        assert http.post(ROUTE, json=body, headers={"Authorization": "Bearer x"}).status_code == 401
        assert http.post(ROUTE, json={**body, "x": "x" * 1000}).status_code == 413
        assert http.post(ROUTE, json={**body, "model": "nothing"}).status_code == 404
        many = http.post(ROUTE, json={**body, "input": ["a"] * 4})
        assert (many.status_code, many.json()["error"]["param"]) == (400, "input")
        with server.gate.place():
            assert http.post(ROUTE, json={**body, "input": ["a"] * 3}).status_code == 429
        assert http.post(ROUTE, json={**body, "input": ["a"] * 3}).status_code == 200


def test_token_ids_need_no_tokenizer_and_stored_models_are_served_first(tokenizer: Tokenizer) -> None:
    with running(NoTokenizer()) as server, server.http() as http:
        assert embedded(http, IDS) == [mean(IDS)]
        assert http.post(ROUTE, json={"model": "org/base", "input": "hi"}).json()["error"]["param"] == "input"
    with running(tokenizer, on_demand=(StoredModel("org/spare"),)) as server, server.http() as http:
        assert embedded(http, IDS, model="spare") == [mean(IDS)]


def test_a_durable_one_is_answered_once_and_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder, headers = str(tmp_path / "queue"), {"Idempotency-Key": "k"}
    body: Any = {"model": "org/base", "input": [IDS, [4, 8]]}
    with running(tokenizer, queue=folder) as server, server.http() as http:
        first = http.post(ROUTE, json=body, headers=headers)
        assert first.status_code == 200 and len(first.json()["data"]) == 2
        plain = http.post(ROUTE, json=body).json()
        assert [one["embedding"] for one in plain["data"]] == [one["embedding"] for one in first.json()["data"]]
        failing = http.post(ROUTE, json={**body, "dimensions": 3}, headers=headers)
        assert failing.status_code == 422
    with running(tokenizer, queue=folder) as server, server.http() as http:
        assert http.post(ROUTE, json=body, headers=headers).content == first.content
