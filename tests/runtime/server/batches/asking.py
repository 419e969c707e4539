"""Helpers for tests of batches: files of lines, and waiting for a batch's end."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing
from typing import Any

import openai

#: Seconds until a test gives up.
LIMIT = 60.0


def line(number: int, **body: Any) -> dict[str, Any]:
    """Return a line of a batch for the harness's base model."""
    asked = {"model": "org/base", "prompt": [1 + number % 50, 2, 3], "max_tokens": 3 + number % 5, "temperature": 0}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": asked | body}


def content_of(lines: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def submit(
    client: openai.OpenAI, lines: Iterable[dict[str, Any]], window: Any = "24h", **order: Any
) -> openai.types.Batch:
    file = client.files.create(file=("in.jsonl", content_of(lines)), purpose="batch")
    order.setdefault("endpoint", "/v1/completions")
    return client.batches.create(input_file_id=file.id, completion_window=window, **order)


def ended(client: openai.OpenAI, batch: str, limit: float = LIMIT) -> openai.types.Batch:
    """Wait for a batch's end and return it."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        found = client.batches.retrieve(batch)
        if found.status in ("completed", "failed", "expired", "cancelled"):
            return found
        time.sleep(0.02)
    raise AssertionError(f"{client.batches.retrieve(batch)} after {limit} s")


def lines_of(queue: str, batch: str) -> list[tuple[int, str]]:
    """Return number and state of a batch's lines in the database of a queue's folder."""
    with closing(sqlite3.connect(f"{queue}/queue.sqlite")) as database:
        query = "SELECT line, state FROM queue_requests WHERE batch = ? ORDER BY line"
        return list(database.execute(query, (batch,)))


def results(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    """Return the lines of a file of results; none for no file."""
    return [] if file is None else [json.loads(each) for each in client.files.content(file).text.splitlines()]
