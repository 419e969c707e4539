"""What durable requests use is counted once, with their answers, whatever fails in between."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.frontend.tokenizer import Tokenizer
from runtime.queueing import requests, usage
from runtime.queueing.database import QueueDatabase
from runtime.queueing.records import DurableRequest, StoredAnswer, decode_events, encode_events
from runtime.server.durable import runs
from runtime.server.durable.store import RequestStore
from runtime.server.keys import key_book
from runtime.types import TokenEvent
from tests.runtime.server.aliases.looking import stored
from tests.runtime.server.durable.test_keys import Gate
from tests.runtime.server.harness import Running, eventually
from tests.runtime.server.keys.test_clients import client, served
from zoo.errors import StoreFull
from zoo.keys import make_key, principal_of
from zoo.store import Store

BODY = {"model": "org/base", "prompt": [5, 6, 7], "max_tokens": 12}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_book, "PAUSE", 0.05)
    monkeypatch.setattr(runs, "RETRY_SECONDS", 0.05)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with stored(tmp_path / "store") as store:
        yield store


def counted(store: Store, name: str = "team") -> tuple[int, int, int]:
    """Return (answers, prompt tokens, generated tokens) of a key in the catalogue."""
    with store.catalog.reading() as reader:
        found = [each for each in reader.key_usage("2000-01-01") if each.name == name]
    return (
        sum(each.answers for each in found),
        sum(each.prompt_tokens for each in found),
        sum(each.generated_tokens for each in found),
    )


def keyed(http: httpx.Client, key: str, **changes: Any) -> httpx.Response:
    return http.post("/v1/completions", json={**BODY, **changes}, headers={"Idempotency-Key": key})


@pytest.mark.parametrize("place", ["append", "finish"])
def test_an_answer_that_the_store_failed_on_is_counted_once(
    tokenizer: Tokenizer, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    secret = make_key(store, "team")
    original, failures = getattr(requests, place), 0

    def full(*args: Any, **options: Any) -> Any:
        nonlocal failures
        failures += 1
        if failures <= 2:
            time.sleep(0.2)  # what was counted meanwhile is in the catalogue
            raise StoreFull("no space left for the queue")
        return original(*args, **options)

    monkeypatch.setattr(requests, place, full)
    with served(tokenizer, store, queue=str(tmp_path / "queue")) as server, client(server, secret) as http:
        keyed(http, "a")
        assert eventually(lambda: keyed(http, "a").status_code == 200)
        assert failures > 2
        with server.http() as own:
            metrics = own.get("/metrics").text
    assert counted(store) == (1, 3, 12)
    assert 'blockzoo:key_tokens_total{key="team",kind="generated"} 12.0' in metrics


class PausingGate(Gate):
    """A gate that shuts itself after so many steps, once."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._last = steps

    def __call__(self, step: int) -> None:
        if self.steps == self._last:
            self.open.clear()
        super().__call__(step)


class SlowGate(Gate):
    """An open gate that every step takes some time for."""

    def __call__(self, step: int) -> None:
        time.sleep(0.05)
        super().__call__(step)


def journalled(server: Running, request: str) -> int:
    """Return the number of events that the queue has of a request."""
    assert server.service.durable is not None
    with server.service.durable.store.database.reading() as connection:
        return len(decode_events(request, requests.events(connection, request)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_an_aborted_request_is_charged_what_the_journal_has_of_it(
    tokenizer: Tokenizer, store: Store, tmp_path: Path, begun: bool, stream: bool
) -> None:
    secret, gate = make_key(store, "team"), PausingGate(5 if begun else 0)
    with (
        served(tokenizer, store, queue=str(tmp_path / "queue"), pace=gate) as server,
        client(server, secret) as http,
        client(server, secret) as other,
        ThreadPoolExecutor() as pool,
    ):
        asked = pool.submit(keyed, http, "a", max_tokens=100, stream=stream)
        assert eventually(lambda: gate.steps == (6 if begun else 1))
        (request,) = server.unfinished()
        assert eventually(lambda: journalled(server, request) == (5 if begun else 0))
        assert other.delete(f"/zoo/requests/{request}").json()["state"] == "cancelled"
        gate.open.set()
        asked.result(60)
    assert counted(store) == ((1, 3, 5) if begun else (0, 0, 0))


@pytest.mark.parametrize("begun", [0, 5])
def test_an_aborted_request_is_charged_what_another_server_writes_of_it_meanwhile(
    tokenizer: Tokenizer, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: int
) -> None:
    secret, gate, abort, tries = make_key(store, "team"), PausingGate(begun), RequestStore.abort, list[int]()

    async def late(self: RequestStore, request: str, answer: StoredAnswer, events: int, *used: Any) -> bool:
        tries.append(events)
        if len(tries) < 3:
            with self.database.writing() as connection:
                more = encode_events([TokenEvent(f"{request}/0", request, events, 9)])
                requests.append(connection, [(request, events, more)])
        return await abort(self, request, answer, events, *used)

    monkeypatch.setattr(RequestStore, "abort", late)
    with (
        served(tokenizer, store, queue=str(tmp_path / "queue"), pace=gate) as server,
        client(server, secret) as http,
        client(server, secret) as other,
        ThreadPoolExecutor() as pool,
    ):
        asked = pool.submit(keyed, http, "a", max_tokens=100)
        assert eventually(lambda: gate.steps == begun + 1)
        (request,) = server.unfinished()
        assert eventually(lambda: journalled(server, request) == begun)
        assert other.delete(f"/zoo/requests/{request}").json()["state"] == "cancelled"
        gate.open.set()
        asked.result(60)
    assert (counted(store), tries) == ((1, 3, begun + 2), [begun, begun + 1, begun + 2])


def test_a_failed_request_is_charged_as_far_as_it_came(tokenizer: Tokenizer, store: Store, tmp_path: Path) -> None:
    secret = make_key(store, "team")
    with (
        served(tokenizer, store, queue=str(tmp_path / "queue"), fail_at=[4]) as server,
        client(server, secret) as http,
    ):
        assert [keyed(http, "a").status_code for _ in range(2)] == [500] * 2
        assert keyed(http, "b", model="org/none").status_code == 404
    assert counted(store) == (1, 3, 3)


@pytest.mark.parametrize("model", ["org/base", "org/none"])
def test_a_request_that_cannot_go_on_is_charged_what_its_journal_has(
    tokenizer: Tokenizer, store: Store, tmp_path: Path, model: str
) -> None:
    owner, name = principal_of(make_key(store, "team")), "cmpl-1"
    request = DurableRequest(
        id=name, kind="completion", digest=b"", seed=1, created=time.time_ns(), principal=owner,
        body=json.dumps({**BODY, "model": model}).encode(), model=model, version="old", state="running", attempts=1,
    )  # fmt: skip
    events = [TokenEvent(f"{name}/0", name, at, token) for at, token in enumerate((5, 6, 7))]
    with closing(QueueDatabase(tmp_path / "queue")) as queue, queue.writing() as connection:
        requests.put(connection, [request])
        requests.append(connection, [(name, 0, encode_events(events))])
    with served(tokenizer, store, queue=str(tmp_path / "queue")) as server:
        assert eventually(lambda: not server.unfinished())
        assert eventually(lambda: counted(store) == (1, 0, 3))
    assert counted(store) == (1, 0, 3)


def test_the_servers_own_requests_keep_no_usage(tokenizer: Tokenizer, store: Store, tmp_path: Path) -> None:
    make_key(store, "team")
    with served(tokenizer, store, queue=str(tmp_path / "queue")) as server, server.http() as own:
        assert keyed(own, "a").status_code == 200
        assert server.service.durable is not None
        with server.service.durable.store.database.reading() as connection:
            assert usage.principals(connection) == []
            assert usage.count(connection) == 0
    assert counted(store) == (0, 0, 0)


def test_what_is_not_counted_yet_is_a_metric(
    tokenizer: Tokenizer, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = make_key(store, "team")
    with served(tokenizer, store, queue=str(tmp_path / "queue")) as server, client(server, secret) as http:
        with server.http() as own, monkeypatch.context() as patch:
            patch.setattr(usage, "drop", lambda *_: None)
            assert keyed(http, "a").status_code == keyed(http, "b").status_code == 200
            assert "blockzoo:queue_uncounted 2.0" in own.get("/metrics").text
        with server.http() as own:
            assert eventually(lambda: "blockzoo:queue_uncounted 0.0" in own.get("/metrics").text)
    assert counted(store)[0] == 2


def submit(http: httpx.Client, lengths: Sequence[int], window: str = "24h") -> str:
    """Begin a batch with a line for each length of an answer; return its id."""
    lines = [
        {"custom_id": str(at), "method": "POST", "url": "/v1/completions", "body": {**BODY, "max_tokens": tokens}}
        for at, tokens in enumerate(lengths)
    ]
    text = "\n".join(map(json.dumps, lines))
    file = http.post("/v1/files", files={"file": ("a.jsonl", text)}, data={"purpose": "batch"}).json()["id"]
    order = {"endpoint": "/v1/completions", "completion_window": window, "input_file_id": file}
    return str(http.post("/v1/batches", json=order).json()["id"])


def status_of(http: httpx.Client, batch: str) -> str:
    return str(http.get(f"/v1/batches/{batch}").json()["status"])


class AbortSpy:
    """Notes of how many events the end of each request is made; it fails behind the first `most` requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 1 << 20) -> None:
        self.events: dict[str, int] = {}
        abort = RequestStore.abort

        async def spied(store: RequestStore, request: str, answer: StoredAnswer, events: int, *used: Any) -> bool:
            self.events[request] = events
            if len(self.events) > most:
                raise StoreFull("no space left for the queue")
            return await abort(store, request, answer, events, *used)

        monkeypatch.setattr(RequestStore, "abort", spied)


@contextmanager
def opened_at_last(gate: Gate) -> Iterator[None]:
    """Open a gate at the end, whatever happens: the server could not stop."""
    try:
        yield
    finally:
        gate.open.set()


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_a_line_that_its_batchs_end_has_stopped_is_charged_what_the_journal_has_of_it(
    tokenizer: Tokenizer, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    secret, gate, spy = make_key(store, "team"), PausingGate(5), AbortSpy(monkeypatch)
    with (
        served(tokenizer, store, queue=str(tmp_path / "queue"), pace=gate) as server,
        client(server, secret) as http,
        opened_at_last(gate),
    ):
        batch = submit(http, [1, 50], "24h" if how == "cancelled" else "6s")
        assert eventually(lambda: [journalled(server, each) > 0 for each in server.unfinished()] == [True])
        if how == "cancelled":
            assert http.post(f"/v1/batches/{batch}/cancel").status_code == 200
        assert eventually(lambda: status_of(http, batch) == how)
        error = http.get(f"/v1/batches/{batch}").json()["error_file_id"]
        (left,) = map(json.loads, http.get(f"/v1/files/{error}/content").text.splitlines())
    assert left["error"]["code"] == f"batch_{how}" and left["response"] is None
    (generated,) = spy.events.values()
    assert 0 < generated <= 5
    assert counted(store) == (2, 6, 1 + generated)


def test_lines_that_a_batchs_end_has_stopped_are_charged_once_whatever_fails(
    tokenizer: Tokenizer, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store fails behind the first line, and the server stops; the next one goes on with the batch's end."""
    secret, gate = make_key(store, "team"), SlowGate()
    with monkeypatch.context() as patch:
        spy = AbortSpy(patch, most=1)
        with (
            served(tokenizer, store, queue=str(tmp_path / "queue"), pace=gate) as server,
            client(server, secret) as http,
            opened_at_last(gate),
        ):
            batch = submit(http, [50, 50, 50])
            assert eventually(lambda: [journalled(server, each) > 0 for each in server.unfinished()] == [True] * 3)
            gate.open.clear()
            assert http.post(f"/v1/batches/{batch}/cancel").status_code == 200
            assert eventually(lambda: len(spy.events) == 2)
            assert status_of(http, batch) == "cancelling"
            first, begun = next(iter(spy.events)), {each: journalled(server, each) for each in server.unfinished()}
    assert len(begun) == 2 and first not in begun
    assert counted(store) == (1, 3, spy.events[first])
    with served(tokenizer, store, queue=str(tmp_path / "queue")) as server, client(server, secret) as http:
        assert eventually(lambda: status_of(http, batch) == "cancelled")
    assert counted(store) == (3, 9, spy.events[first] + sum(begun.values()))
