"""A hundred switches while requests stream: no request is lost, and every answer is wholly one version's."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from runtime.frontend.tokenizer import Tokenizer
from runtime.server.aliases import follower
from runtime.types import SamplingParams
from tests.runtime.cluster.whole import answer
from tests.runtime.server.aliases.looking import following, points_to
from tests.runtime.server.harness import BASE, FINE, Running
from zoo.aliases import set_alias

SWITCHES, CLIENTS, LENGTH = 100, 6, 30
SPECS = {spec.name: spec for spec in (BASE, FINE)}


@pytest.fixture(scope="module")
def credit() -> int:
    return 1


class Traffic:
    """Clients that stream answers of an alias until they are stopped; `answers` has the model and tokens of each."""

    def __init__(self, server: Running) -> None:
        self._server, self._stopped = server, threading.Event()
        self.answers: list[tuple[list[int], set[str], list[int], str | None]] = []

    def stop(self) -> None:
        self._stopped.set()

    def stream_on(self, number: int) -> None:
        with self._server.http() as http:
            at = 0
            while not self._stopped.is_set():
                at += 1
                prompt = [5 + number, 6, 7 + at % 50]
                self.answers.append((prompt, *_streamed(http, prompt)))


def _streamed(http: Any, prompt: Sequence[int]) -> tuple[set[str], list[int], str | None]:
    body = {"model": "prod", "prompt": prompt, "max_tokens": LENGTH, "temperature": 0}
    models: set[str] = set()
    tokens: list[int] = []
    finish = None
    with http.stream("POST", "/v1/completions", json={**body, "stream": True, "return_token_ids": True}) as got:
        assert got.status_code == 200, got.read()
        for line in got.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                models.add(chunk["model"])
                tokens += chunk["choices"][0]["token_ids"]
                finish = chunk["choices"][0]["finish_reason"]
    return models, tokens, finish


def test_a_hundred_switches_under_streams(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "PAUSE", 0.01)
    pace = lambda _: time.sleep(0.001)  # noqa: E731
    with following(tokenizer, tmp_path, "base", pace=pace) as (server, store), ThreadPoolExecutor(CLIENTS) as pool:
        traffic = Traffic(server)
        clients = [pool.submit(traffic.stream_on, number) for number in range(CLIENTS)]
        try:
            with server.http() as http:
                for at in range(SWITCHES):
                    name = ("org/fine", "org/base")[at % 2]
                    set_alias(store, "prod", name)
                    assert points_to(http, [name])
        finally:
            traffic.stop()
        for client in clients:
            client.result(30)  # nothing was refused or broken off
        changes = len(_history(store))
    assert changes == SWITCHES + 1
    versions = Counter(next(iter(models)) for _, models, _, _ in traffic.answers)
    assert set(versions) == SPECS.keys() and min(versions.values()) >= 10, versions
    for prompt, models, tokens, finish in traffic.answers:
        (model,) = models
        assert finish == "length" and tokens == answer(SPECS[model], prompt, SamplingParams(max_tokens=LENGTH))


def _history(store: Any) -> Sequence[Any]:
    with store.catalog.reading() as reader:
        return list(reader.alias_changes("prod"))
