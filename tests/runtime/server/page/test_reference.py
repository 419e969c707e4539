"""`/docs` and the words of `/openapi.json`: every route with fields, bounds and errors, and examples that are taken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer
from runtime.server.openai.route_words import EXAMPLES
from tests.runtime.server.harness import running
from tests.runtime.server.page.looking import Element, seen
from zoo.store import Store


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> dict[str, Any]:
    return dict(http.get("/openapi.json").json())


@pytest.fixture(scope="module")
def page(http: httpx.Client) -> Element:
    return seen(http, "/docs")


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def section(page: Element, operation: dict[str, Any]) -> Element:
    return page.one("section", id=operation["operationId"])


def test_every_operation_is_there_with_what_the_document_says(document: dict[str, Any], page: Element) -> None:
    said = list(operations(document))
    assert len(page.all("section")) == len(said) > 50
    links = {link.attributes["href"] for link in page.one("nav", class_="contents").all("a")}
    assert links == {f"#{operation['operationId']}" for _, _, operation in said}
    for path, method, operation in said:
        text = section(page, operation).text
        assert text.startswith(f"{method.upper()} {path}") and operation["summary"].split("\n")[0] in text
        for status, answer in operation["responses"].items():
            if status not in ("303", "default"):
                assert answer["description"] in text and (status < "4" or status in text), (path, status)
        assert all(one["name"] in text for one in operation.get("parameters", ()))


def test_fields_have_their_bounds_and_meanings(document: dict[str, Any], page: Element) -> None:
    fields = section(page, document["paths"]["/v1/chat/completions"]["post"]).one("tbody")
    rows = {
        row.one("code").text: [row.one("th").text, *(cell.text for cell in row.all("td"))] for row in fields.all("tr")
    }
    assert rows.keys() == document["components"]["schemas"]["ChatBody"]["properties"].keys()
    assert rows["model"][:2] == ["model required", "string"] and rows["model"][2].startswith("Name of a served model")
    assert rows["temperature"] == ["temperature", "number at least 0, at most 2", "0: greedy."]
    assert "docs/structured.md" in rows["response_format"][2]
    for name, schema in document["components"]["schemas"].items():
        if name in ("ChatBody", "CompletionBody", "ResponseBody", "MessageBody", "TokenizeBody", "EmbeddingBody"):
            assert all(field["description"] for field in schema["properties"].values()), name


#: They need a queue, agents, or a key of the server; the last two are tested with the routes (`aliases.test_changing`).
ELSEWHERE = ("POST /v1/batches", "POST /zoo/roles", "POST /zoo/aliases", "POST /zoo/aliases/rollback")


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in ELSEWHERE])
def test_examples_are_taken_as_they_stand(
    http: httpx.Client, document: dict[str, Any], page: Element, name: str
) -> None:
    method, path = name.split()
    operation = document["paths"][path][method.lower()]
    shown = json.loads(section(page, operation).one("pre").text)
    assert shown == operation["requestBody"]["content"]["application/json"]["example"] == EXAMPLES[name]
    answer = http.post(path, json={**shown, "model": "org/base"})
    assert answer.status_code == 200, answer.text


def test_every_body_of_json_that_is_needed_has_an_example(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        if "application/json" in operation.get("requestBody", {}).get("content", ()):
            assert f"{method.upper()} {path}" in EXAMPLES


def test_it_is_a_view_of_the_page(http: httpx.Client, tokenizer: Tokenizer, stored: Store) -> None:
    answer = http.get("/docs")
    assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
    assert "http" not in answer.text.replace("http://127.0.0.1:8000/v1/completions", "").replace("HTTP", "")
    assert seen(http, "/").one("nav").text.endswith("API")
    with running(tokenizer, store=stored, config=ServerConfig(api_key="k")) as keyed:
        plain = httpx.get(f"{keyed.address}/docs", trust_env=False)
        assert plain.status_code == 303 and plain.headers["location"] == "/ui/login?next=%2Fdocs"
        form = {"key": "k", "next": "/docs"}
        assert httpx.post(f"{keyed.address}/ui/login", data=form, trust_env=False).headers["location"] == "/docs"
