"""Every limit on input holds on every route that takes a body, with and without an `Idempotency-Key`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer
from tests.runtime.server.harness import Running, running

KEY, MOST = "s3cret", 20_000
TURN = [{"role": "user", "content": "hi"}]
LONG = "ab " * 400


@dataclass(frozen=True)
class Case:
    """A route with a sound body.

    Fields:
        text: Returns the change that gives the route a text.
        generates: Whether there is an answer, which has a length, sampling parameters and tools.
        counts: Whether a text may be longer than the context, since it is only counted.
        schema: Returns the change that asks for an answer of a JSON schema.
        runs: Whether a model runs, in the order of all requests.
    """

    good: dict[str, Any]
    text: Callable[[str], dict[str, Any]]
    most: str = ""
    stop: str = ""
    counts: bool = False
    runs: bool = True
    tool: Callable[[Any], dict[str, Any]] | None = None
    schema: Callable[[Any], dict[str, Any]] | None = None

    @property
    def generates(self) -> bool:
        return bool(self.most)


def turned(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def called(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def formed(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


CASES = {
    "/v1/completions": Case(
        {"prompt": "hi", "max_tokens": 2}, lambda text: {"prompt": text}, "max_tokens", "stop", schema=formed
    ),
    "/v1/chat/completions": Case(
        {"messages": TURN, "max_tokens": 2}, turned, "max_tokens", "stop", tool=called, schema=formed
    ),
    "/v1/responses": Case(
        {"input": "hi", "max_output_tokens": 2},
        lambda text: {"input": text},
        "max_output_tokens",
        "stop",
        tool=lambda parameters: {"type": "function", "name": "f", "parameters": parameters},
        schema=lambda schema: {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}},
    ),
    "/v1/messages": Case(
        {"messages": TURN, "max_tokens": 2},
        turned,
        "max_tokens",
        "stop_sequences",
        tool=lambda parameters: {"name": "f", "input_schema": parameters},
        schema=lambda schema: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    ),
    "/v1/messages/count_tokens": Case(
        {"messages": TURN}, turned, counts=True, runs=False, tool=lambda schema: {"name": "f", "input_schema": schema}
    ),
    "/v1/embeddings": Case({"input": "hi"}, lambda text: {"input": text}),
    "/tokenize": Case({"prompt": "hi"}, lambda text: {"prompt": text}, counts=True, runs=False),
    "/detokenize": Case({"tokens": [5]}, lambda text: {"tokens": [5] * len(text)}, counts=True, runs=False),
}
ROUTES = pytest.mark.parametrize("route", CASES)


@pytest.fixture(scope="module", params=["alone", "with a queue"])
def server(
    request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    queue = None if request.param == "alone" else str(tmp_path_factory.mktemp("limits") / "queue")
    with running(tokenizer, config=ServerConfig(api_key=KEY, max_body_bytes=MOST), queue=queue) as started:
        yield started


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


class Asking:
    """Sends bodies to one route, each once plain and once with a key of its own where the server has a queue."""

    def __init__(self, http: httpx.Client, route: str, durable: bool) -> None:
        self._http, self._route, self._durable = http, route, durable
        self.case, self._count = CASES[route], 0

    def body(self, **changes: Any) -> dict[str, Any]:
        return {"model": "org/base", **self.case.good, **changes}

    def answers(self, content: bytes, headers: dict[str, str] | None = None) -> Iterator[httpx.Response]:
        sent = [{}]
        if self._durable:
            self._count += 1
            sent.append({"Idempotency-Key": f"{self._route} {id(self)} {self._count}"})
        for more in sent:
            yield self._http.post(self._route, content=content, headers={**more, **(headers or {})})

    def refused(self, status: int, **changes: Any) -> None:
        self.refused_raw(status, json.dumps(self.body(**changes)).encode())

    def refused_raw(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        for response in self.answers(content, headers):
            assert response.status_code == status, (response.text[:300], content[:200])
            check_shape(self._route, response)

    def served(self, **changes: Any) -> None:
        for response in self.answers(json.dumps(self.body(**changes)).encode()):
            assert response.status_code == 200, response.text[:300]


def check_shape(route: str, response: httpx.Response) -> None:
    error = response.json()["error"]
    keys = {"type", "message"} if route.startswith("/v1/messages") else {"message", "type", "param", "code"}
    assert set(error) == keys and error["message"] and "Traceback" not in response.text


@pytest.fixture
def ask(http: httpx.Client, server: Running, route: str) -> Asking:
    return Asking(http, route, server.service.durable is not None)


def test_every_route_with_a_body_of_a_model_is_here(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    found = set()
    for path, operations in document["paths"].items():
        body = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        name = body.get("schema", {}).get("$ref", "").rpartition("/")[2]
        if "model" in schemas.get(name, {}).get("properties", {}):
            found.add(path)
    assert found == CASES.keys()


@ROUTES
def test_sound_bodies_are_served(ask: Asking) -> None:
    ask.served()


@ROUTES
def test_lengths_of_texts_and_answers(ask: Asking) -> None:
    (ask.served if ask.case.counts else ask.refused)(*() if ask.case.counts else (400,), **ask.case.text(LONG))
    if ask.case.generates:
        for count in (0, -1, 255, 2**31, 10**30, 1.5, "2", True):
            ask.refused(400, **{ask.case.most: count})


@ROUTES
def test_fields_that_all_answers_have(ask: Asking) -> None:
    wrong: list[dict[str, Any]] = [{"priority": 2**40}, {"cache_salt": ""}, {"cache_salt": "x" * 257}, {"slo_ms": 0}]
    wrong += [{"slo_ms": 5, "ttft_slo_ms": 5}, {"adaptive": "no"}, {"early_exit": 0}, {"early_exit": 1}]
    if ask.case.generates:
        wrong += [{"temperature": 2.1}, {"top_p": 0}, {"top_k": -2}, {"min_p": 2}, {"repetition_penalty": 0}]
        wrong += [{"n": n} for n in (0, 65, 10**9, 10**40, "2", True)] + [{"min_tokens": 3}, {"logit_bias": {"320": 1}}]
        wrong += [{"logit_bias": {str(i): 1 for i in range(1025)}}, {"stop_token_ids": [2**40]}, {"seed": 2**64}]
        wrong += [{ask.case.stop: ["a"] * 17}, {ask.case.stop: ["a" * 1025]}, {ask.case.stop: 5}, {"stream": "yes"}]
        wrong += [{"guided_regex": "a" * 30_000}, {"guided_json": {"type": 5}}, {"guided_choice": []}]
    if ask.case.runs:
        for change in wrong:
            ask.refused(413 if len(json.dumps(change)) > MOST else 400, **change)


@ROUTES
def test_tools_and_schemas_are_bounded(ask: Asking) -> None:
    tool, schema = ask.case.tool, ask.case.schema
    if tool is not None:
        ask.refused(400, tools=[tool({"type": "object"})] * 129)
        ask.refused(400, tools=[tool("no schema")])
        ask.refused(400, tools=[tool({"type": "object"})])  # the template here has no tools
    if schema is not None:
        ask.refused(400, **schema(None))
        ask.refused(400, **schema({"type": "object"}))  # answers of the model here have no end


@ROUTES
def test_bodies_that_are_no_sound_json(ask: Asking) -> None:
    good = json.dumps(ask.body()).encode()
    deep = {"a": 1}
    for _ in range(800):
        deep = {"a": deep}  # type: ignore[dict-item]
    nested = json.dumps(deep).encode()
    for raw in (
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b"[" * 10_000,
        good[:-1] + b', "tools": [' + nested + b"]}",
        good[:-1] + b', "unknown": ' + nested + b"}",
        good[:-1] + b', "priority": ' + b"9" * 5000 + b"}",
        good.replace(b'"hi"', b'"\\ud800"').replace(b"[5]", b'["\\ud800"]'),
        good[:-1] + b', "temperature": NaN, "priority": NaN, "tokens": NaN, "prompt": NaN}',
    ):
        ask.refused_raw(400, raw)


@ROUTES
def test_large_bodies_are_refused_declared_and_sent(ask: Asking, server: Running) -> None:
    ask.refused_raw(413, json.dumps(ask.body(unknown="x" * MOST)).encode())

    def endless() -> Iterator[bytes]:
        yield b'{"unknown": "'
        for _ in range(100):
            yield b"x" * 1000

    with server.http() as http:
        response = http.post(ask._route, content=endless())
        assert response.status_code == 413
        check_shape(ask._route, response)


@ROUTES
@pytest.mark.parametrize("name", ["absent", "org/", "", "x" * 5000, "org/bas"])
def test_unknown_models(ask: Asking, name: str) -> None:
    ask.refused(404, model=name)


@ROUTES
def test_token_ids_outside_of_the_vocabulary(ask: Asking) -> None:
    field = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/detokenize": "tokens"}.get(ask._route)
    for ids in ([320], [-1], [2**40], [1.5], [True], ["a", 5]):
        if field is not None:
            ask.refused(400, **{field: ids})


@ROUTES
def test_wrong_keys(ask: Asking) -> None:
    good = json.dumps(ask.body()).encode()
    for wrong in ({"Authorization": ""}, {"Authorization": "Bearer x"}, {"Authorization": f"Basic {KEY}"}):
        ask.refused_raw(401, good, wrong)
        ask.refused_raw(401, good, {**wrong, "x-api-key": "x"})
        ask.refused_raw(401, good, {**wrong, "x-api-key": ""})
    for response in ask.answers(good, {"Authorization": "", "x-api-key": KEY}):
        assert response.status_code == 200


@ROUTES
def test_a_full_and_a_closing_server(tokenizer: Tokenizer, route: str) -> None:
    body = {"model": "org/base", **CASES[route].good}
    with running(tokenizer, config=ServerConfig(max_queued=1)) as server, server.http() as http:
        with server.gate.place():
            full = http.post(route, json=body)
        assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
        assert http.post(route, json=body).status_code == 200
        server.gate.closed = True
        closing = http.post(route, json=body)
        assert closing.status_code == 503
        for response in (full, closing):
            check_shape(route, response)


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["user", "assistant", "text", "function", "tool_use", "tool_result", "function_call", "auto"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "text", "name", "input", "id", "call_id", "output", "format", "schema"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_body_makes_the_server_fail(http: httpx.Client, data: st.DataObject) -> None:
    route = data.draw(st.sampled_from(sorted(CASES)))
    schemas = _fields(http)
    fields = st.sampled_from(sorted(schemas[route]))
    changes = data.draw(st.dictionaries(fields, JUNK, min_size=1, max_size=3))
    response = http.post(route, json={"model": "org/base", **CASES[route].good, **changes})
    assert response.status_code < 500, (route, changes, response.text)
    if response.status_code != 200:
        check_shape(route, response)


_KNOWN: dict[str, set[str]] = {}


def _fields(http: httpx.Client) -> dict[str, set[str]]:
    """Return the names of every field of each route's body."""
    if not _KNOWN:
        document = http.get("/openapi.json").json()
        for route in CASES:
            body = document["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            _KNOWN[route] = set(document["components"]["schemas"][body.rpartition("/")[2]]["properties"])
    return _KNOWN
