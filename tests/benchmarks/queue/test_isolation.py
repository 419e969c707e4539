"""Phases of the benchmark of isolation: no prompt comes twice, and each tenth is counted apart."""

import argparse
import asyncio
import json
from functools import partial
from typing import Any

import httpx
import pytest

from benchmarks.queue import isolation
from benchmarks.queue.isolation import Watched


class FakeServer:
    """Answers at once; a batch is over after `polls` looks at it."""

    address = "http://server"

    def __init__(self, polls: int) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.polls = polls

    def resident(self) -> int:
        return 100_000_000

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/completions":
            self.prompts.append(tuple(json.loads(request.content)["prompt"]))
        self.polls -= request.url.path == "/v1/batches/b"
        status = "in_progress" if self.polls > 0 else "completed"
        counts = {"total": 3, "completed": 3 - max(0, self.polls), "failed": 0}
        return httpx.Response(200, json={"id": "b", "status": status, "request_counts": counts})


def measured(monkeypatch: pytest.MonkeyPatch, server: FakeServer) -> dict[str, Any]:
    client = partial(httpx.AsyncClient, transport=httpx.MockTransport(server.answer))
    monkeypatch.setattr(isolation.httpx, "AsyncClient", client)
    monkeypatch.setattr(isolation, "_WARM", 0.1)
    monkeypatch.setattr(isolation, "_SETTLE", 0.0)
    args = argparse.Namespace(rate=100, alone=0.2, most=10, tokens=2, lines=3, batch_tokens=1, model="model")
    return asyncio.run(isolation.measure(server, args))  # type: ignore[arg-type]


def test_no_phase_asks_what_an_earlier_one_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer(polls=3)
    measured(monkeypatch, server)
    assert len(server.prompts) > 50
    assert len(set(server.prompts)) == len(server.prompts)


def test_three_phases_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, FakeServer(polls=3))
    assert found["batch"]["status"] == "completed"
    assert found["alone"]["requests"] >= 10 <= found["after"]["requests"]
    assert len(found["beside"]["tenths"]) == 10
    assert found["beside"]["tenths"][-1]["lines"] == 3


def test_each_tenth_has_its_own_quantiles() -> None:
    seen = Watched(begin=100.0)
    # One request a second for 100 s; those of the last tenth take ten times as long.
    seen.asked = [(100.0 + due, 0.01, 0.1 if due < 90 else 1.0) for due in range(101)]
    tenths = seen.tenths([(100.0 + at, 2 * at) for at in range(101)])
    assert [each["whole_ms"]["p95"] for each in tenths] == [100.0] * 9 + [1000.0]
    assert [each["lines"] for each in tenths] == [20 * part for part in range(1, 11)]
    assert [each["until_s"] for each in tenths] == [10.0 * part for part in range(1, 11)]
