"""docs/cli.md and docs/http.md match the code, and name every option, route, body field and metric."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

import cli.app
from cli.docs.__main__ import PAGES, main
from cli.docs.http_page import served_routes
from cli.serving.options import ServeOptions
from cli.shared.declared import declared, flag_of, keys_of
from runtime.frontend.schemas import ChatBody, CompletionBody
from runtime.server.openai.body_words import ELSEWHERE, FIELDS, OURS, VLLM
from runtime.server.openai.route_words import ROUTES

ROOT = Path(__file__).parents[2]
CLI, HTTP = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("cli.md", "http.md"))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_is_generated_now(name: str, tmp_path: Path) -> None:
    main(tmp_path)
    assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text(), "run python -m cli.docs"


def test_every_command_and_every_option_of_serve_is_on_the_page() -> None:
    assert re.findall(r"^## zoo (\w+)$", CLI, re.MULTILINE) == list(cli.app.VERBS)
    serve = CLI.split("## zoo serve\n")[1].split("\n## ")[0]
    for each in fields(ServeOptions):
        if declared(each).table:
            head, rows = serve.split(f"**`[{each.name}]`**: {declared(each).help}")[1].split("\n|---", 1)
            keys = [one.name for one in keys_of(each, get_type_hints(ServeOptions)[each.name])]
            assert "| key |" in head and re.findall(r"^\| `(\w+)`", rows.split("\n\n")[0], re.MULTILINE) == keys
            continue
        section = serve.split(f"### {declared(each).group}\n")[1].split("\n### ")[0]
        row = next(line for line in section.splitlines() if line.startswith(f"| `{flag_of(each.name)}` |"))
        assert declared(each).help.split("|")[0] in row
        assert not isinstance(each.default, str) or f"`{each.default}`" in row


def test_every_route_of_the_server_is_on_the_page_and_no_other() -> None:
    source = "".join(path.read_text() for path in sorted((ROOT / "runtime/server").rglob("*.py")))
    routes = re.findall(r'Route\("([^"]+)".*methods=\["(\w+)"\]', source)
    assert len(routes) == source.count("        Route(") == len(served_routes())
    said = {f"{method} {path}" for path, method in routes}
    assert said == ROUTES.keys()
    assert set(re.findall(r"^### (\w+ /\S*)$", HTTP, re.MULTILINE)) == {one.replace(":path", "") for one in said}


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_every_field_of_a_body_is_on_the_page_with_its_bounds(body: type[CompletionBody] | type[ChatBody]) -> None:
    path = "/v1/completions" if body is CompletionBody else "/v1/chat/completions"
    section = HTTP.split(f"### POST {path}\n")[1].split("\n### ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE))
    assert rows.keys() == body.model_fields.keys()
    assert rows["top_p"] == "number above 0, at most 1" and rows["temperature"] == "number at least 0, at most 2"
    assert FIELDS.keys() == CompletionBody.model_fields.keys() | ChatBody.model_fields.keys()
    assert set(VLLM) | set(OURS) <= FIELDS.keys() | ELSEWHERE["EmbeddingBody"].keys()


def test_fields_of_other_bodies_are_on_the_page_and_none_is_described_for_nothing() -> None:
    bodies = {route.endpoint.body for route in served_routes() if getattr(route.endpoint, "body", None) is not None}
    named = {body.__name__: set(body.model_fields) for body in bodies}
    assert {"TokenizeBody", "EmbeddingBody", "MessageBody"} <= named.keys() and ELSEWHERE.keys() <= named.keys()
    for route in served_routes():
        body = getattr(route.endpoint, "body", None)
        if body is not None:
            section = HTTP.split(f"### POST {route.path}\n")[1].split("\n### ")[0]
            assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == named[body.__name__]
    assert all(fields.keys() <= named[body] for body, fields in ELSEWHERE.items())


def test_the_extra_fields_of_the_contract_are_said_to_be_extra() -> None:
    for name in ("slo_ms", "priority", "adaptive", "ignore_eos", "min_tokens", "top_k", "min_p", "cache_salt"):
        assert re.search(rf"^\| `{name}` \| [^|]* \| (vLLM|the zoo) \|", HTTP, re.MULTILINE), name


def test_every_metric_is_on_the_page() -> None:
    server = ("metrics.py", "durable/metrics.py", "keys/key_metrics.py")
    sources = (*(f"runtime/server/{each}" for each in server), "runtime/control/counters.py")
    named = {name for each in sources for name in re.findall(r'"((?:vllm|blockzoo):\w+)"', (ROOT / each).read_text())}
    assert {"vllm:prefix_cache_hits", "vllm:prefix_cache_queries", "blockzoo:agent_up"} <= named
    assert named == set(re.findall(r"^\| `((?:vllm|blockzoo):\w+)` \|", HTTP, re.MULTILINE))
