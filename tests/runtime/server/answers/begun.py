"""Servers with responses in the background: in memory, with a queue in a folder or in PostgreSQL, and with a broker."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer
from tests import postgres
from tests.runtime.server.harness import Running, eventually, running

ASKED: Any = {"model": "org/base", "input": "say hé", "instructions": "short", "max_output_tokens": 12}
BEGUN = ("queued", "in_progress")
Start = Callable[..., AbstractContextManager[Running]]


QUEUES = [
    "folder",
    pytest.param("postgres", marks=pytest.mark.postgres),
    pytest.param("broker", marks=[pytest.mark.postgres, pytest.mark.rabbitmq]),
]


@contextmanager
def starting(request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Start]:
    """What starts servers of the kind that a fixture's parameter says."""
    queue: dict[str, Any] = {"queue": str(tmp_path / "queue")} if request.param == "folder" else {}
    if request.param in ("postgres", "broker"):
        queue = {"queue": postgres.new_database(request.getfixturevalue("postgres_server"))}
    rabbit = request.getfixturevalue("rabbit") if request.param == "broker" else None

    def begun(**options: Any) -> AbstractContextManager[Running]:
        config = replace(options.pop("config", ServerConfig()), broker=None if rabbit is None else rabbit.url)
        return running(tokenizer, **{"pace": lambda _: time.sleep(0.001), "config": config, **queue, **options})

    if rabbit is not None:  # nothing of another test is in the queues
        rabbit.purge()
    yield begun
    if rabbit is not None:
        rabbit.purge()


class Brake:
    """Holds the steps of a server from one on until it is released. `steps`: those so far."""

    def __init__(self, after: int = 0) -> None:
        self.steps, self._after, self._gate = 0, after, threading.Event()

    def __call__(self, _: int) -> None:
        self.steps += 1
        if self.steps > self._after:
            self._gate.wait(20)

    def __enter__(self) -> Brake:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def free(self) -> None:
        self._gate.set()


def begin(http: httpx.Client, **more: Any) -> dict[str, Any]:
    answer = http.post("/v1/responses", json={**ASKED, "background": True, **more})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def shown(http: httpx.Client, name: str, **query: Any) -> dict[str, Any]:
    return dict(http.get(f"/v1/responses/{name}", params=query).raise_for_status().json())


def ended(http: httpx.Client, name: str) -> dict[str, Any]:
    assert eventually(lambda: shown(http, name)["status"] not in BEGUN, 20)
    return shown(http, name)


def events_of(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
