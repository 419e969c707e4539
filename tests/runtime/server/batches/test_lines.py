"""Checks of a batch's lines: all or nothing, with the numbers of the wrong lines, in bounded memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.frontend.errors import unknown_model
from runtime.frontend.schemas import ServedBody
from runtime.server.batches.lines import MOST_ERRORS, LineCheck, custom_id_of, split_lines

URL = "/v1/completions"


def line(custom_id: str = "a", **changes: Any) -> bytes:
    body = changes.pop("body", {})
    body = body if body is None else {"model": "m", "prompt": "Hello"} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": body} | changes).encode()


def checked(content: bytes, cut: int = 1 << 20, limit: int = 4096, most: int = 50_000) -> LineCheck:
    def served(body: ServedBody) -> None:
        if body.model != "m":
            raise unknown_model(f"The model `{body.model}` does not exist or is not served here.")

    check = LineCheck(URL, limit, most, served)
    pieces = (content[at : at + cut] for at in range(0, len(content), cut))
    for found in split_lines(pieces, limit):
        check.add(*found)
    return check


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([b"a", b"\n", b"\r\n", b" ", b"bcd", b"\xff" * 9]), max_size=25), st.integers(1, 30))
def test_lines_are_where_they_are_however_the_file_is_cut(pieces: list[bytes], cut: int) -> None:
    content = b"".join(pieces)
    found = list(split_lines((content[at : at + cut] for at in range(0, len(content), cut)), 6))
    whole = content.split(b"\n")
    assert [number for number, _, _ in found] == [at + 1 for at, text in enumerate(whole) if text[:7].strip()]
    for number, offset, text in found:
        assert text == whole[number - 1][:7] == content[offset : offset + len(text)]


@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
def test_tasks_point_to_the_bodies(cut: int) -> None:
    odd = b'{"x": {"model": "m", "prompt": "q"}, "url": "/v1/completions", "custom_id": "odd", "method": "POST",'
    odd += b' "body":   {"model": "m", "prompt": "q"} }'
    content = b"\n".join([line("a"), b"", odd, line("c", body={"priority": -3, "prompt": "\u00e9"}), b"  "])
    check = checked(content, cut)
    assert check.result() == []
    tasks = list(check.tasks())
    assert [(task.line, task.priority) for task in tasks] == [(1, 0), (3, 0), (4, -3)]
    bodies = [json.loads(content[task.offset : task.offset + task.length]) for task in tasks]
    assert [body["prompt"] for body in bodies] == ["Hello", "q", "\u00e9"]
    assert [custom_id_of(text) for _, _, text in split_lines([content], 4096)] == ["a", "odd", "c"]


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_request", None),
        (b'{"custom_id": "\xed\xa0\x80"}', "invalid_json_line", None),
        (b'{"custom_id": "\\ud800"}', "invalid_json_line", None),
        (line(body=None).replace(b"null", b"[" * 1900 + b"]" * 1900), "invalid_json_line", None),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions"}', "invalid_request", None),
        (line(""), "invalid_request", "custom_id"),
        (line("x" * 513), "invalid_request", "custom_id"),
        (line("first"), "duplicate_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/chat/completions"), "mismatched_url", "url"),
        (line(body={"stream": True}), "unsupported_parameter", "body.stream"),
        (line(body={"temperature": "hot"}), "invalid_request", "temperature"),
        (line(body={"model": "other"}), "model_not_found", "model"),
        (line(body={"prompt": "x" * 5000}), "line_too_long", None),
    ],
)
def test_a_wrong_line_refuses_the_file(wrong: bytes, code: str, param: str | None) -> None:
    (error,) = checked(line("first") + b"\n\n" + wrong + b"\n" + line("last")).result()
    assert (error.line, error.code, error.param) == (3, code, param)
    assert error.message


def test_limits_of_a_file() -> None:
    (empty,) = checked(b" \n\n").result()
    assert (empty.code, empty.line) == ("empty_file", None)
    assert len(checked(b"x\n" * 300).result()) == MOST_ERRORS


def test_a_line_takes_little_memory() -> None:
    count = 10_000

    def content() -> Iterator[bytes]:
        for number in range(count):
            yield line(f"request-{number}", body={"prompt": "x" * 500}) + b"\n"

    check = LineCheck(URL, 4096, 1 << 20, lambda body: None)
    tracemalloc.start()
    for found in split_lines(content(), 4096):
        check.add(*found)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert check.result() == [] and len(check) == count
    assert peak < 300 * count, f"{peak // count} bytes a line"


def test_a_line_too_many() -> None:
    assert checked(b"\n".join(line(f"{number}") for number in range(3)), most=3).result() == []
    (error,) = checked(b"\n".join(line(f"{number}") for number in range(4)), most=3).result()
    assert (error.line, error.code) == (4, "too_many_lines")
