"""Durable requests that the store does not take, or not as they are."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from runtime.frontend.tokenizer import Tokenizer
from runtime.queueing.records import DurableRequest
from runtime.server.batches import feeding
from runtime.server.durable import runs
from runtime.server.durable.runs import DurableRuns
from runtime.server.durable.store import RequestStore
from runtime.types import TokenEvent
from tests import postgres
from tests.runtime.server.batches.asking import ended, line, results, submit
from tests.runtime.server.harness import eventually, running
from zoo.errors import StoreError

BODY = {"model": "org/base", "prompt": [1, 2], "max_tokens": 3}
KEY = {"Idempotency-Key": "a"}


def test_a_request_that_could_not_be_stored_is_tried_again_once(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store may have it all the same: where only the answer of a commit was lost."""
    put, start = RequestStore.put, DurableRuns.start
    stored: list[bool] = [False, True]
    started: list[str] = []

    async def failing(self: RequestStore, request: DurableRequest) -> bool:
        if stored and stored.pop(0):
            await put(self, request)
        raise StoreError("the disk is full")

    def counted(self: DurableRuns, request: DurableRequest, *given: Any) -> Any:
        started.append(request.id)
        return start(self, request, *given)

    monkeypatch.setattr(runs, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(RequestStore, "put", failing)
    monkeypatch.setattr(DurableRuns, "start", counted)
    with running(tokenizer, queue=str(tmp_path / "q")) as server, server.http() as http:
        assert http.post("/v1/completions", json=BODY, headers=KEY).status_code == 503
        assert eventually(lambda: len(started) == 1, 30)
        time.sleep(0.3)
        assert len(started) == 1, "what the store has not got cannot be run"
        assert http.post("/v1/completions", json=BODY, headers=KEY).status_code == 503
        assert eventually(lambda: len(started) == 2, 30)
        name = started[1]
        assert eventually(lambda: http.get(f"/zoo/requests/{name}").json().get("state") == "done", 30)
        monkeypatch.setattr(RequestStore, "put", put)
        assert http.post("/v1/completions", json=BODY, headers=KEY).json()["id"] == name


@pytest.mark.parametrize("written", [False, True])
def test_a_line_whose_events_could_not_be_written_goes_on_behind_those_that_were(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """Also if they were all the same, and only the answer of the commit was lost."""
    append, calls = RequestStore.append, list[int]()

    async def failing(self: RequestStore, request: str, ordinal: int, events: list[TokenEvent]) -> bool:
        calls.append(ordinal)
        if len(calls) == 4:
            if written:
                await append(self, request, ordinal, events)
            raise StoreError("the disk is full")
        return await append(self, request, ordinal, events)

    monkeypatch.setattr(feeding, "_RETRY", 0.02)
    monkeypatch.setattr(RequestStore, "append", failing)
    queue = str(tmp_path / "q")
    with running(tokenizer, queue=queue, pace=lambda _: time.sleep(0.01)) as server, server.client() as client:
        done = ended(client, submit(client, [line(0, max_tokens=12)]).id, limit=20)
        (found,) = results(client, done.output_file_id)
        alone = client.completions.create(**line(0, max_tokens=12)["body"])
        assert found["response"]["body"]["choices"] == [each.to_dict() for each in alone.choices]
    assert len(calls) > 4 and calls[4] == calls[3] + written and calls[3] > 0


@pytest.mark.postgres
def test_names_that_postgresql_does_not_take_are_bad_requests(tokenizer: Tokenizer, postgres_server: str) -> None:
    order = {"input_file_id": "\0", "endpoint": "/v1/completions", "completion_window": "24h"}
    with running(tokenizer, queue=postgres.new_database(postgres_server)) as server, server.http() as http:
        for path in ("files/%00", "batches/%00", "batches?after=%00", "responses/%00"):
            assert http.get(f"/v1/{path}").status_code == 400, path
        assert http.post("/v1/batches/%00/cancel").status_code == 400
        assert http.post("/v1/batches", json=order).status_code == 400
