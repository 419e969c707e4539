"""What a server finds in its queue at its start, and what it does where store, engine or model fail it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from runtime.cluster.driver.driver import ClusterDriver
from runtime.config import ServerConfig
from runtime.frontend.served_models import StoredModel
from runtime.frontend.tokenizer import Tokenizer
from runtime.queueing import requests
from runtime.queueing.database import QueueDatabase
from runtime.queueing.records import DurableRequest, StoredAnswer, encode_events
from runtime.queueing.schema import RequestRow
from runtime.server.durable.store import RequestStore
from runtime.types import SamplingParams, SequenceRequest, TokenEvent
from tests.runtime.cluster.whole import answer
from tests.runtime.server.harness import BASE, SPARE, eventually, running
from zoo.errors import StoreFull

BODY = {"model": "org/base", "prompt": [5, 6, 7], "max_tokens": 12, "return_token_ids": True}


def tokens(spec: Any = BASE, count: int = 12) -> list[int]:
    return answer(spec, [5, 6, 7], SamplingParams(max_tokens=count))


def leave(folder: Path, begun: int = 0, version: str = "org/base", name: str = "cmpl-1", **changes: Any) -> None:
    """Leave a request in a queue, running, with the first tokens of its answer."""
    model = str(changes.get("model", "org/base"))
    request = DurableRequest(
        id=name,
        kind="completion",
        digest=b"",
        seed=1,
        created=time.time_ns(),
        body=json.dumps({**BODY, "model": model, **changes}).encode(),
        model=model,
        version=version,
        state="running",
        attempts=1,
    )
    events = [TokenEvent(f"{name}/0", name, at, token) for at, token in enumerate(tokens()[:begun])]
    with closing(QueueDatabase(folder)) as queue, queue.writing() as connection:
        requests.put(connection, [request])
        if events:
            requests.append(connection, [(name, 0, encode_events(events))])


def ended(http: Any, name: str = "cmpl-1") -> dict[str, Any]:
    """Return the request once it has ended."""
    shown: dict[str, Any] = {}

    def look() -> bool:
        shown.update(http.get(f"/zoo/requests/{name}").json())
        return shown["state"] not in ("queued", "running")

    assert eventually(look, 60)
    return shown


@pytest.mark.parametrize("begun", [0, 5, 11])
def test_an_answer_goes_on_behind_its_journal(tokenizer: Tokenizer, tmp_path: Path, begun: int) -> None:
    leave(tmp_path / "queue", begun)
    computed: list[int] = []
    with running(tokenizer, queue=str(tmp_path / "queue"), pace=computed.append) as server, server.http() as http:
        shown = ended(http)
    assert shown["state"] == "done"
    assert shown["answer"]["choices"][0]["token_ids"] == tokens()
    assert len(computed) <= 12 - begun + 1


def test_streams_that_had_begun_are_opened_first_however_long_their_journals_take(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, opened = tmp_path / "queue", list[str]()
    for number, (begun, version) in enumerate([(0, "org/base"), (5, "org/base"), (4, "an older one"), (3, "org/base")]):
        leave(folder, begun, version, f"cmpl-{number}")
    read, open_stream = RequestStore.events, ClusterDriver.open_stream

    async def events(store: RequestStore, request: str) -> list[TokenEvent]:
        found = await read(store, request)
        await asyncio.sleep(0.1 * len(found))  # the first ones are ready last
        return found

    def opens(driver: ClusterDriver, sequences: Sequence[SequenceRequest]) -> Any:
        opened.append(sequences[0].request)
        return open_stream(driver, sequences)

    monkeypatch.setattr(RequestStore, "events", events)
    monkeypatch.setattr(ClusterDriver, "open_stream", opens)
    with running(tokenizer, queue=str(folder)) as server, server.http() as http:
        assert [ended(http, f"cmpl-{number}")["state"] for number in range(4)] == ["done", "done", "failed", "done"]
    assert opened == ["cmpl-1", "cmpl-3", "cmpl-0"]


def test_a_stream_waits_for_those_before_it_for_a_while_only(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, slow, read = tmp_path / "queue", asyncio.Event(), RequestStore.events
    leave(folder, 5)
    leave(folder, 0, name="cmpl-2")

    async def events(store: RequestStore, request: str) -> list[TokenEvent]:
        if request == "cmpl-1":
            await slow.wait()
        return await read(store, request)

    monkeypatch.setattr(RequestStore, "events", events)
    monkeypatch.setattr("runtime.server.durable.turns._MOST_SECONDS", 0.1)
    with running(tokenizer, queue=str(folder)) as server, server.http() as http:
        assert ended(http, "cmpl-2")["state"] == "done"
        assert http.get("/zoo/requests/cmpl-1").json()["state"] == "running"
        slow.set()
        assert ended(http)["state"] == "done"


def test_a_model_is_loaded_for_a_request_of_the_queue(tokenizer: Tokenizer, tmp_path: Path) -> None:
    leave(tmp_path / "queue", model="org/spare", version="")
    spare = StoredModel("org/spare", "org/base", 1)
    with running(tokenizer, queue=str(tmp_path / "queue"), on_demand=(spare,)) as server, server.http() as http:
        assert ended(http)["answer"]["choices"][0]["token_ids"] == tokens(SPARE)


def test_another_version_of_the_model_does_not_continue_an_answer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    leave(tmp_path / "begun", 3, version="old")
    with running(tokenizer, queue=str(tmp_path / "begun")) as server, server.http() as http:
        shown = ended(http)
        assert (shown["state"], shown["status"]) == ("failed", 409)
        assert shown["answer"]["error"]["code"] == "model_changed"
    leave(tmp_path / "fresh", 0, version="old")
    with running(tokenizer, queue=str(tmp_path / "fresh")) as server, server.http() as http:
        assert ended(http)["answer"]["choices"][0]["token_ids"] == tokens()


def test_a_model_that_is_gone_is_an_answer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    leave(tmp_path / "queue", model="org/none")
    with running(tokenizer, queue=str(tmp_path / "queue")) as server, server.http() as http:
        shown = ended(http)
        assert (shown["state"], shown["status"]) == ("failed", 404)


def test_a_failed_step_is_an_answer_and_a_dead_engine_is_none(tokenizer: Tokenizer, tmp_path: Path) -> None:
    header = {"Idempotency-Key": "k"}
    with running(tokenizer, queue=str(tmp_path / "failed"), fail_at=[3]) as server, server.http() as http:
        first = http.post("/v1/completions", json=BODY, headers=header)
        assert first.status_code == 500
        assert http.post("/v1/completions", json=BODY, headers=header).content == first.content
    lost = {"queue": str(tmp_path / "lost")}
    with running(tokenizer, fail_at=range(3, 20), **lost) as server, server.http() as http:
        server.driver.shutdown(30)
        assert http.post("/v1/completions", json=BODY, headers=header).status_code == 503
        assert server.state()["queue"]["running"] == 1
    with running(tokenizer, **lost) as server, server.http() as http:
        again = http.post("/v1/completions", json=BODY, headers=header)
        assert again.json()["choices"][0]["token_ids"] == tokens()


def test_a_full_disk_is_an_error_of_the_request_and_the_server_goes_on(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> Any:
        raise StoreFull("no space left for the queue")

    with running(tokenizer, queue=str(tmp_path / "queue")) as server, server.http() as http:
        for place in ("put", "append", "finish"):
            header = {"Idempotency-Key": place}
            with monkeypatch.context() as patch:
                patch.setattr(requests, place, full)
                refused = http.post("/v1/completions", json=BODY, headers=header)
            assert refused.status_code == 503
            assert "no space left" in refused.json()["error"]["message"]
            assert http.post("/v1/completions", json=BODY).status_code == 200
            again = http.post("/v1/completions", json=BODY, headers=header)
            assert again.json()["choices"][0]["token_ids"] == tokens(), place


def test_old_answers_expire(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "queue"
    leave(folder)
    hour = 3600 * 10**9
    with closing(QueueDatabase(folder)) as queue, queue.writing() as connection:
        ended_at = time.time_ns() - 5 * hour
        requests.finish(connection, "cmpl-1", "done", StoredAnswer(200, b"{}"), ended_at)
    for hours, kept in ((6.0, True), (4.0, False)):
        config = ServerConfig(retention_hours=hours)
        with running(tokenizer, queue=str(folder), config=config) as server:
            assert server.service.durable is not None
            store = server.service.durable.store

            def found(store: Any = store) -> bool:
                with store.database.reading() as connection:
                    return connection.execute(select(RequestRow.id)).first() is not None

            if kept:
                time.sleep(0.2)
            assert eventually(lambda kept=kept, found=found: found() == kept, 60)  # type: ignore[misc]


def test_bodies_stay_in_the_store_while_requests_wait(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A thousand waiting requests are a thousand ids in memory: each body is read when its turn comes."""
    claimed: list[DurableRequest] = []

    def spied(original: Callable[..., list[DurableRequest]], *args: Any, **options: Any) -> list[DurableRequest]:
        found = original(*args, **options)
        claimed.extend(found)
        return found

    with closing(QueueDatabase(tmp_path / "queue")) as queue, queue.writing() as connection:
        one = DurableRequest("x", "completion", b"", 1, time.time_ns(), body=json.dumps(BODY).encode())
        requests.put(connection, [replace(one, id=f"cmpl-{number}") for number in range(1, 40)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "claim", partial(spied, requests.claim))
        config = ServerConfig(max_queued=3)
        with running(tokenizer, queue=str(tmp_path / "queue"), config=config) as server, server.http() as http:
            assert eventually(lambda: http.get("/zoo/state").json()["queue"]["waiting"] == 0, 60)
            assert ended(http)["answer"]["choices"][0]["token_ids"] == tokens()
    assert len(claimed) == 39
    assert all(each.body for each in claimed)
