"""The document of the interface: all routes, with the bodies that they parse."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from runtime.config import ServerConfig
from runtime.frontend.schemas import ChatBody, CompletionBody
from runtime.frontend.tokenizer import Tokenizer
from runtime.server.openai.answer_schemas import keys_of_shape
from tests.runtime.server.harness import Running, running


@pytest.fixture
def document(server: Running) -> dict[str, Any]:
    with server.http() as http:
        found: dict[str, Any] = http.get("/openapi.json").raise_for_status().json()
    return found


def refs(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set[str]()
        return own.union(*map(refs, value.values()))
    return set[str]().union(*map(refs, value)) if isinstance(value, list) else set()


def test_each_documented_operation_is_a_route(document: dict[str, Any], server: Running) -> None:
    """No path is unknown, and no method is refused; what the bodies and names lack is another matter."""
    with server.http() as http:
        for path, operations in document["paths"].items():
            for method in operations:
                answer = http.request(method, path.replace("{name}", "nothing").replace("{id}", "nothing"))
                assert answer.status_code != 405, (method, path)
                if answer.status_code == 404:
                    assert answer.json()["error"]["message"] != "There is no such route.", (method, path)
    assert {"/v1/completions", "/v1/models/{name}", "/zoo/requests/{id}/pause", "/openapi.json"} <= set(
        document["paths"]
    )


def test_bodies_are_those_that_the_routes_parse(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for path, body in (("/v1/completions", CompletionBody), ("/v1/chat/completions", ChatBody)):
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert content["schema"] == {"$ref": f"#/components/schemas/{body.__name__}"}
        assert set(schemas[body.__name__]["properties"]) == set(body.model_fields)
    assert schemas["CompletionBody"]["properties"]["temperature"]["anyOf"][0]["maximum"] == 2.0
    assert schemas["BatchOrder"]["required"] == ["input_file_id", "endpoint", "completion_window"]
    roles = document["paths"]["/zoo/roles"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert sorted(roles["additionalProperties"]["enum"]) == ["both", "decode", "prefill"]


def test_the_document_is_whole(document: dict[str, Any]) -> None:
    """Each reference leads somewhere, operations have names of their own, and each path's parameters are there."""
    schemas = document["components"]["schemas"]
    assert refs(document) == {f"#/components/schemas/{name}" for name in schemas}
    operations = [(path, each) for path, some in document["paths"].items() for each in some.values()]
    assert len({each["operationId"] for _, each in operations}) == len(operations)
    for path, each in operations:
        assert [one["name"] for one in each.get("parameters", ()) if one["in"] == "path"] == [
            part[1:-1] for part in path.split("/") if part.startswith("{")
        ]
        assert each["summary"]


def test_what_an_answer_has_is_read_from_its_words(document: dict[str, Any]) -> None:
    shape = '{"id", "object": "a, b" | "c", "data": [{"x": {"y"}}, "z"], …, "usage": {"n"}}; `more` is "never" there'
    assert list(keys_of_shape(shape)) == ["id", "object", "data", "usage"]
    answer = document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert answer["application/json"]["schema"]["required"] == ["id", "object", "created", "model", "choices", "usage"]
    assert answer.keys() == {"application/json", "text/event-stream"}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            good = {status: each for status, each in operation["responses"].items() if status == "200"}
            assert all(each["content"] for each in good.values()), (method, path)


def test_routes_that_need_the_key_say_so(document: dict[str, Any], tokenizer: Tokenizer, credit: int) -> None:
    with running(tokenizer, config=ServerConfig(api_key="secret"), credit=credit) as server:
        assert httpx.get(f"{server.address}/openapi.json", trust_env=False).status_code == 401
    assert document["paths"]["/live"]["get"]["security"] == []
    assert {"key": []} in document["paths"]["/v1/models"]["get"]["security"]
