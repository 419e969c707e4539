"""Describe the server's routes and bodies as an OpenAPI 3.1 document, from the routes themselves.

Bodies are those that the routes parse, so that the document cannot differ from what is accepted.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.role_config import RoleName
from runtime.server.aliases.routes import AliasOrder, RollbackOrder
from runtime.server.answers.message_errors import has_message_errors
from runtime.server.auth import OPEN_ROUTES
from runtime.server.batches.batch_service import BatchOrder
from runtime.server.openai.answer_schemas import answer_content, html_too
from runtime.server.openai.body_words import ELSEWHERE, FIELDS
from runtime.server.openai.responses import reply
from runtime.server.openai.route_words import EXAMPLES, ROUTES
from runtime.server.page.links import is_page

#: Parameters in a path, with Starlette's converters.
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_REDIRECT = "a redirect"
#: Parameters of a query in the words of a route, and links to other pages.
_QUERY = re.compile(r"`(\w+)[`=]")
_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
_SCHEMAS = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

#: The same in Anthropic's shape.
_MESSAGE_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
#: A file's form: the route reads it by parts, and streams the file to its place.
_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"type": "string", "const": "batch"},
    },
}
#: The form of the page's login.
_LOGIN = {
    "type": "object",
    "required": ["key"],
    "properties": {"key": {"type": "string"}, "next": {"type": "string"}},
}


def describe(routes: Iterable[Route]) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint that answers the document of some routes, among which it may be itself."""

    async def openapi(request: Request) -> Response:
        """This interface as an OpenAPI 3.1 document."""
        return reply(openapi_document(routes))

    return openapi


def openapi_document(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the document of some routes.

    Where an endpoint has a pydantic model as its `body`, that is the body's schema.
    """
    paths: dict[str, dict[str, Any]] = {}
    bodies, schemas = _other_bodies()
    schemas |= {"Error": _ERROR, "MessageError": _MESSAGE_ERROR}
    for route in routes:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            body = bodies.get(f"{method} {route.path}")
            model: type[BaseModel] | None = getattr(route.endpoint, "body", None)
            if model is not None:
                body = {"$ref": _SCHEMAS.format(model=model.__name__)}
                found = model.model_json_schema(ref_template=_SCHEMAS)
                schemas |= found.pop("$defs", {})
                schemas[model.__name__] = found
            path = paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {})
            path[method.lower()] = _operation(route, method, body)
    for name, schema in schemas.items():
        _say_fields(name, schema)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Block Zoo", "version": _version()},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _other_bodies() -> tuple[dict[str, Mapping[str, Any]], dict[str, Any]]:
    """Return the schemas of bodies that are no pydantic models by method and path, and those that they refer to."""
    template = _SCHEMAS.format(model="{name}")
    kinds = (BatchOrder, dict[str, RoleName], AliasOrder, RollbackOrder)
    (order, roles, alias, rollback), schemas = msgspec.json.schema_components(kinds, ref_template=template)
    return {
        "POST /v1/files": _FORM,
        "POST /ui/login": _LOGIN,
        "POST /v1/batches": order,
        "POST /zoo/roles": roles,
        "POST /zoo/aliases": alias,
        "POST /zoo/aliases/rollback": rollback,
    }, dict(schemas)


def _version() -> str:
    try:
        return version("blockzoo")
    except PackageNotFoundError:  # run from its sources
        return "0"


def _operation(route: Route, method: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    words = _PARAMETER.sub(r"\1", route.path)
    error = "MessageError" if has_message_errors(route.path) else "Error"
    name = f"{method} {route.path}"
    said = ROUTES[name]
    fields = getattr(getattr(route.endpoint, "body", None), "model_fields", {})
    refusal = {"application/json": {"schema": {"$ref": _SCHEMAS.format(model=error)}}}
    if is_page(route.path):
        refusal = html_too(refusal)
    operation: dict[str, Any] = {
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", words)]),
        "summary": summary_of(route).replace("\n", " "),
        "responses": {
            **_answers(said.response, "stream" in fields),
            **{str(status): {"description": why, "content": refusal} for status, why in sorted(said.errors.items())},
            "default": {"description": "An error.", "content": refusal},
        },
        "security": [] if route.path in OPEN_ROUTES else [{}, {"key": []}, {"x_api_key": []}],
    }
    text = {"schema": {"type": "string"}}
    parameters = [{"name": each, "in": "path", "required": True} | text for each in _PARAMETER.findall(route.path)]
    parameters += [
        {"name": each, "in": "query", "description": _plain(said.query)} | text for each in _QUERY.findall(said.query)
    ]
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        kind = "application/json"
        if body is _FORM:
            kind = "multipart/form-data"
        elif body is _LOGIN:
            kind = "application/x-www-form-urlencoded"
        example = {"example": EXAMPLES[name]} if name in EXAMPLES else {}
        operation["requestBody"] = {"required": True, "content": {kind: {"schema": body, **example}}}
    return operation


def _answers(words: str, streams: bool) -> dict[str, Any]:
    """Return what a route answers if all is well, by status."""
    if words.startswith(_REDIRECT):
        return {"303": {"description": _plain(words)}}
    made = {"200": {"description": _plain(words), "content": answer_content(words, streams)}}
    return made | ({"303": {"description": "A redirect."}} if _REDIRECT in words else {})


def _say_fields(name: str, schema: Mapping[str, Any]) -> None:
    """Put into a body's schema what its fields mean, where there are words for them."""
    words = {**FIELDS, **ELSEWHERE.get(name, {})} if name.endswith("Body") else {}
    for field, of in schema.get("properties", {}).items():
        if field in words:
            of["description"] = _plain(words[field])


def _plain(text: str) -> str:
    """Return a text of docs/http.md without its signs: links as the pages' names, code as it is."""
    return _LINK.sub(r"docs/\1", text).replace("`", "")


def summary_of(route: Route) -> str:
    """Return what a route's endpoint says of itself: its `summary`, else the first paragraph of its docstring."""
    said = getattr(route.endpoint, "summary", None)
    return str(said) if said else (inspect.getdoc(route.endpoint) or "").split("\n\n")[0]
