"""Batches beside interactive requests: what is announced, what waits, and which requests do not count."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from runtime.cluster.driver.driver import ClusterDriver
from runtime.config import ServerConfig
from runtime.frontend.assemble import Receipt
from runtime.frontend.errors import RequestError
from runtime.frontend.tokenizer import Tokenizer
from runtime.server import request_runner
from runtime.server.batches import intake, results
from runtime.server.context import Service
from runtime.server.request_runner import Prepared
from tests.runtime.server.batches.asking import LIMIT, ended, line, submit
from tests.runtime.server.harness import Running, eventually, running

BODY: dict[str, Any] = line(0)["body"]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is announced, prepared and refused, as it happens."""
    found: list[str] = []
    prepare = request_runner.prepare

    def prepared(service: Service, kind: Any, raw: bytes, receipt: Receipt) -> Prepared:
        found.append(f"prepared {receipt.id}")
        return prepare(service, kind, raw, receipt)

    def expect(_: ClusterDriver, request: str, comes: bool = True) -> None:
        found.append(f"{'expected' if comes else 'refused'} {request}")

    monkeypatch.setattr(ClusterDriver, "expect_request", expect)
    monkeypatch.setattr(request_runner, "prepare", prepared)
    return found


@pytest.fixture
def server(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Running]:
    config = ServerConfig(max_num_seqs=6)
    with running(tokenizer, config=config, pages=4096, queue=str(tmp_path / "q")) as started:
        yield started


def held_until(event: threading.Event) -> Callable[[int], None]:
    """Return a pace of steps: none ends before an event."""

    def pace(_: int) -> None:
        event.wait(LIMIT)

    return pace


def open_request(server: Running, sent: bytes, length: int) -> socket.socket:
    """Send headers and the first bytes of a body."""
    host, port = server.address.removeprefix("http://").split(":")
    raw = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
    raw.sendall(head.encode() + sent)
    return raw


def test_interactive_requests_do_not_wait_behind_a_batch(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = ServerConfig(max_num_seqs=2)
    with (
        running(tokenizer, config=config, queue=str(tmp_path / "q"), pace=lambda _: time.sleep(0.02)) as slow,
        slow.client() as client,
    ):
        batch = submit(client, [line(number, max_tokens=100) for number in range(12)]).id
        assert eventually(lambda: slow.state()["running"] > 0, 30)
        client.completions.create(**BODY | {"max_tokens": 2})
        counts = client.batches.retrieve(batch).request_counts
        assert counts is not None and counts.completed < 12, "it did not wait for the batch's end"
        client.batches.cancel(batch)
        ended(client, batch)


def test_interactive_requests_are_announced_before_they_are_prepared(
    server: Running, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.client() as client:
        for headers in {}, {"Idempotency-Key": "announced"}:
            answer = client.completions.create(**BODY, extra_headers=headers)
            assert told == [f"expected {answer.id}", f"prepared {answer.id}"]
            told.clear()
        ended(client, submit(client, [line(0)]).id)
        assert len(told) == 1 and told[0].startswith("prepared"), "lines are not announced"
        told.clear()

        def refuse(*_: object) -> None:
            raise RequestError("Too many requests.", status=429)

        monkeypatch.setattr(Service, "admit", refuse)
        for headers in {}, {"Idempotency-Key": "refused"}:
            with pytest.raises(openai.RateLimitError):
                client.completions.create(**BODY, extra_headers=headers)
        assert not told, "what a key may not ask for now would hold lines up"


@pytest.mark.parametrize("key", [None, "k"])
def test_what_was_announced_and_is_refused_does_not_come(server: Running, told: list[str], key: str | None) -> None:
    headers = {} if key is None else {"Idempotency-Key": key}
    with server.client() as client, pytest.raises(openai.BadRequestError):
        client.completions.create(**BODY | {"max_tokens": 5000}, extra_headers=headers)
    first = told[0].removeprefix("expected ")
    assert told == [f"expected {first}", f"prepared {first}", f"refused {first}"]


def test_what_finds_the_server_full_does_not_come(tokenizer: Tokenizer, tmp_path: Path, told: list[str]) -> None:
    config = ServerConfig(max_queued=2)
    with running(tokenizer, config=config, queue=str(tmp_path / "q")) as server, server.client() as client:
        with server.gate.place(), pytest.raises(openai.RateLimitError):
            client.completions.create(**BODY, n=2)
        assert [each.split()[0] for each in told] == ["expected", "prepared", "refused"]


def test_a_client_that_leaves_while_its_request_is_prepared_is_expected_no_longer(
    server: Running, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = threading.Event()

    def held(*_: Any) -> Prepared:
        left.wait(LIMIT)
        raise RequestError("It is too late.")

    monkeypatch.setattr(request_runner, "prepare", held)
    with open_request(server, b"{}", 2):
        assert eventually(lambda: len(told) == 1, 30)
    assert eventually(lambda: len(told) == 2, 30)
    left.set()
    assert [each.split()[0] for each in told] == ["expected", "refused"]


def test_a_durable_request_that_waits_in_the_store_is_expected_no_longer(
    tokenizer: Tokenizer, tmp_path: Path, told: list[str]
) -> None:
    go_on = threading.Event()
    config, queue = ServerConfig(max_queued=1), str(tmp_path / "q")
    with (
        running(tokenizer, config=config, queue=queue, pace=held_until(go_on)) as server,
        server.client() as client,
        ThreadPoolExecutor(2) as pool,
    ):

        def ask(key: str) -> str:
            return client.completions.create(**BODY, extra_headers={"Idempotency-Key": key}).id

        first = pool.submit(ask, "a")
        assert eventually(lambda: server.state()["running"] == 1, 30)
        second = pool.submit(ask, "b")
        assert eventually(lambda: len(told) == 5, 30)
        go_on.set()
        names = first.result(30), second.result(30)
    assert [each for each in told if "prepared" not in each] == [
        f"expected {names[0]}", f"expected {names[1]}", f"refused {names[1]}",
    ]  # fmt: skip


def test_nothing_is_announced_where_there_are_no_batches(tokenizer: Tokenizer, told: list[str]) -> None:
    with running(tokenizer) as server, server.client() as client:
        answer = client.completions.create(**BODY)
    assert told == [f"prepared {answer.id}"]


def test_a_request_takes_seats_from_lines_once_its_body_is_there(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config, queue = ServerConfig(max_num_seqs=8), str(tmp_path / "q")
    with (
        running(tokenizer, config=config, pages=4096, queue=queue, pace=lambda _: time.sleep(0.01)) as server,
        server.client() as client,
    ):
        with open_request(server, b"{", 1000):
            assert eventually(lambda: server.gate.places_in_use == 1, 30)
            batch = submit(client, [line(number, max_tokens=200) for number in range(12)]).id
            assert eventually(lambda: server.state()["running"] == 7, 30)
            assert server.gate.places_in_use == 1
            client.batches.cancel(batch)
            ended(client, batch)
        with server.gate.place() as place:
            place.count_request()
            batch = submit(client, [line(number, max_tokens=200) for number in range(12)]).id
            assert eventually(lambda: server.state()["running"] == 1, 30)
            assert not eventually(lambda: server.state()["running"] > 1, 0.3)
        assert eventually(lambda: server.state()["running"] == 7, 30)
        client.batches.cancel(batch)
        ended(client, batch)


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "k"}])
def test_a_file_is_checked_once_no_request_is_there(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> None:
    """At the latest after a while, which is long here."""
    monkeypatch.setattr(intake, "_PATIENCE", LIMIT)
    go_on = threading.Event()
    with (
        running(tokenizer, pages=4096, queue=str(tmp_path / "q"), pace=held_until(go_on)) as server,
        server.client() as client,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(lambda: client.completions.create(**BODY, extra_headers=headers))
        assert eventually(lambda: server.state()["running"] == 1, 30)
        batch = submit(client, [line(number) for number in range(40)]).id
        assert not eventually(lambda: client.batches.retrieve(batch).status != "validating", 0.3)
        go_on.set()
        answer.result(30)
        assert ended(client, batch).status == "completed"


def test_results_are_written_once_no_request_is_there(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def patient(_: threading.Event, busy: Callable[[], bool]) -> None:
        assert eventually(lambda: not busy(), LIMIT)

    monkeypatch.setattr(results, "_PAGE", 8)
    monkeypatch.setattr(results, "pause", patient)
    with server.client() as client:
        with server.gate.place() as place:
            place.count_request()
            batch = submit(client, [line(number, max_tokens=1) for number in range(40)]).id
            assert eventually(lambda: client.batches.retrieve(batch).status == "finalizing", 30)
            assert not eventually(lambda: client.batches.retrieve(batch).status != "finalizing", 0.3)
        assert ended(client, batch).status == "completed"
