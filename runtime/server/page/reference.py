"""The HTTP interface as the page shows it: made from the OpenAPI document alone. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.server.openai.type_words import type_words

_REF = "#/components/schemas/"
#: Headings of the page with the beginnings of the paths below them; what is left over is for the page itself.
_AREAS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Generating and reading", ("/v1/", "/tokenize", "/detokenize")),
    ("The server", ("/health", "/live", "/metrics", "/openapi.json", "/docs")),
    ("The zoo", ("/zoo/",)),
    ("The page", ("/",)),
)


@dataclass(frozen=True, slots=True)
class BodyField:
    """A field of a body.

    Fields:
        kind: Its type and bounds, in words.
    """

    name: str
    kind: str
    required: bool
    meaning: str


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path.

    Fields:
        anchor: Its name within the page.
        query: Names of the query's parameters, and what they are for.
        body: Media type of the body; "" without one.
        example: A body, as JSON; "" without one.
        errors: What each status means.
        open: Whether it needs no key.
    """

    method: str
    path: str
    anchor: str
    summary: str
    query: tuple[tuple[str, ...], str]
    body: str
    fields: tuple[BodyField, ...]
    example: str
    response: str
    errors: Mapping[str, str]
    open: bool


def areas_of(document: Mapping[str, Any]) -> list[tuple[str, list[Operation]]]:
    """Return the operations of a document by area, in the document's order."""
    made: list[tuple[str, list[Operation]]] = [(name, []) for name, _ in _AREAS]
    for path, methods in document["paths"].items():
        place = next(at for at, (_, starts) in enumerate(_AREAS) if path.startswith(starts))
        for method, operation in methods.items():
            made[place][1].append(_operation(path, method, operation, document["components"]["schemas"]))
    return [area for area in made if area[1]]


def _operation(path: str, method: str, said: Mapping[str, Any], schemas: Mapping[str, Any]) -> Operation:
    asked = [each for each in said.get("parameters", ()) if each["in"] == "query"]
    body, content = next(iter(said.get("requestBody", {"content": {"": {}}})["content"].items()))
    errors = {status: each["description"] for status, each in said["responses"].items() if status >= "4"}
    errors.pop("default")
    answer = next(each["description"] for status, each in said["responses"].items() if status < "4")
    return Operation(
        method.upper(),
        path,
        said["operationId"],
        said["summary"],
        (tuple(each["name"] for each in asked), asked[0]["description"] if asked else ""),
        body,
        tuple(_fields(content.get("schema", {}), schemas)),
        json.dumps(content["example"], indent=1, ensure_ascii=False) if "example" in content else "",
        answer,
        errors,
        not said["security"],
    )


def _fields(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[BodyField]:
    if "$ref" in schema:
        schema = schemas[schema["$ref"].removeprefix(_REF)]
    for name, of in schema.get("properties", {}).items():
        yield BodyField(name, type_words(of, schemas), name in schema.get("required", ()), of.get("description", ""))
