"""Schemas of answers for the OpenAPI document, from the words that describe them (`route_words`). Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_TEXT = {"schema": {"type": "string"}}
#: Media types of answers that are no JSON, by how their words begin.
_KINDS = (
    ("HTML", "text/html"),
    ("a piece of HTML", "text/html"),
    ("server-sent events", "text/event-stream"),
    ("CSS", "text/css"),
    ("JavaScript", "text/javascript"),
    ("SVG", "image/svg+xml"),
    ("Prometheus", "text/plain"),
    ("JSON lines", "application/jsonl"),
    ("the file's bytes", "application/octet-stream"),
)
_KEY = re.compile(r'"([\w ]+)"')


def answer_content(words: str, streams: bool) -> dict[str, Any]:
    """Return the media types of an answer with their schemas; `streams`: it also comes as server-sent events."""
    if words.startswith("{"):
        made = {"application/json": {"schema": {"type": "object", "required": list(keys_of_shape(words))}}}
        return {**made, "text/event-stream": _TEXT} if streams else made
    if words == "the document":
        return {"application/json": {"schema": {"type": "object"}}}
    return {kind: _TEXT for start, kind in _KINDS if words.startswith(start)}


def keys_of_shape(shape: str) -> Iterator[str]:
    """Yield the keys of an object as its words have them: `{"id", "object": "model", "data": [{"x"}]}`.

    Only those of the object itself, not of what is in it.
    """
    depth, expected = 0, False
    for part in re.finditer(r'"[^"]*"|[{}\[\],]', shape):
        sign = part.group()
        if sign in "{[":
            depth += 1
            expected = sign == "{" and depth == 1
        elif sign in "}]":
            depth -= 1
            if depth == 0:
                return
        elif sign == ",":
            expected = depth == 1
        elif expected and depth == 1:
            expected = False
            if (key := _KEY.fullmatch(sign)) is not None:
                yield key[1]


def html_too(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of an error that browsers get as a page."""
    return {**content, "text/html": _TEXT}
