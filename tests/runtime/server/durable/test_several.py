"""Several servers on one PostgreSQL queue: clients may come to any; what a dead one had goes on elsewhere, once."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

import pytest

from tests import postgres
from tests.runtime.server.durable.test_kills import LEASE, SLOW, Client, lives, tokenizer_folder, whole
from tests.runtime.server.harness import eventually

__all__ = ["lives", "tokenizer_folder"]

pytestmark = pytest.mark.postgres


@pytest.fixture
def shared(postgres_server: str) -> str:
    return postgres.new_database(postgres_server)


def data_of(text: str) -> list[str]:
    return [each[6:] for each in text.split("\n") if each.startswith("data: ")]


def test_a_client_of_one_server_is_answered_by_another_while_it_runs(lives: Any, shared: str) -> None:
    streamed, plain = Client("key"), Client("plain", stream=False)
    pace = ("--pace", "0.1")
    with lives("--salt", "a", *pace, target=shared) as first, lives("--salt", "b", target=shared) as second:
        streamed.read(first, 3)
        streamed.read(second)  # what the first one runs, from its journal
        assert streamed.ended and streamed.statuses == [200, 200]
        numbers = [number for number, _ in streamed.events if number is not None]
        assert numbers == sorted(set(numbers)) and len(streamed.tokens()) == 40
        assert data_of(whole(first, "key")) == data_of(whole(second, "key")) == [data for _, data in streamed.events]
        with second.http() as http:
            reused = http.post("/v1/completions", json=plain.body | {"seed": 5}, headers={"Idempotency-Key": "key"})
            assert reused.status_code == 422


def test_what_a_dead_server_had_goes_on_after_its_lease(lives: Any, shared: str) -> None:
    client, waiting = Client("key"), Client("other", stream=False)
    with lives("--salt", "a", *SLOW, *LEASE, target=shared) as first, lives(*LEASE, target=shared) as second:
        client.read(first, 3)
        with first.http() as http:
            reader = threading.Thread(target=waiting.read, args=(first,))
            reader.start()
            assert eventually(lambda: http.get("/zoo/state").json()["queue"]["running"] == 2, 60)
        first.kill()
        reader.join(60)
        seen = list(client.events)
        began = time.monotonic()
        client.read(second)
        assert time.monotonic() - began > 0.3, "before its lease was over"
        assert client.ended and client.events[: len(seen)] == seen and len(client.tokens()) == 40
        # no client asked for the other one: it is answered all the same
        with second.http() as http:
            assert eventually(lambda: http.get("/zoo/state").json()["queue"]["running"] == 0, 60)
            answer = http.post("/v1/completions", json=waiting.body, headers={"Idempotency-Key": "other"}).json()
            assert len(answer["choices"][0]["token_ids"]) == 40


def test_a_server_that_was_stopped_past_its_lease_alters_nothing(lives: Any, shared: str) -> None:
    """Its tokens differ from the second one's: one that it wrote late would show."""
    client = Client("key")
    with (
        lives("--salt", "a", *SLOW, *LEASE, target=shared) as first,
        lives("--salt", "b", *LEASE, target=shared) as other,
    ):
        client.read(first, 3)
        os.kill(first.process.pid, signal.SIGSTOP)
        try:
            client.read(other)
        finally:
            os.kill(first.process.pid, signal.SIGCONT)
        assert client.ended and len(client.tokens()) == 40
        with first.http() as http:  # it begins anew, and takes durable requests again
            assert eventually(lambda: _accepted(http), 60)
        assert data_of(whole(first, "key")) == data_of(whole(other, "key")) == [data for _, data in client.events]


def test_a_living_server_loses_nothing(lives: Any, shared: str) -> None:
    """The first one is slow: its request lasts for several leases beside a server that looks for dead ones."""
    client = Client("key")
    with lives("--salt", "a", "--pace", "0.1", *LEASE, target=shared) as first, lives(*LEASE, target=shared):
        client.read(first)
        assert client.ended and client.statuses == [200] and len(client.tokens()) == 40


def test_a_server_that_was_stopped_past_its_lease_with_no_other_there_goes_on(lives: Any, shared: str) -> None:
    client = Client("key")
    with lives("--pace", "0.2", *LEASE, target=shared) as server:
        client.read(server, 3)
        for _ in range(2):
            os.kill(server.process.pid, signal.SIGSTOP)
            time.sleep(2.5)
            os.kill(server.process.pid, signal.SIGCONT)
            client.read(server, 3)
        client.read(server)
        assert client.ended and set(client.statuses) == {200} and len(client.tokens()) == 40


def test_a_parked_request_is_taken_over_at_once(lives: Any, shared: str) -> None:
    client = Client("key")
    with lives("--salt", "a", *SLOW, target=shared) as first, lives("--salt", "b", *LEASE, target=shared) as second:
        client.read(first, 3)
        os.kill(first.process.pid, signal.SIGTERM)
        assert first.process.wait(60) == 0
        with second.http() as http:
            assert eventually(lambda: http.get("/zoo/state").json()["queue"]["waiting"] == 0, 60)
        client.read(second)
        assert client.ended and len(client.tokens()) == 40


def test_a_request_is_aborted_on_any_server(lives: Any, shared: str) -> None:
    client = Client("key")
    with lives("--salt", "a", *SLOW, *LEASE, target=shared) as first, lives(*LEASE, target=shared) as second:
        client.read(first, 2)
        name = json.loads(client.events[0][1])["id"]
        with second.http() as http:
            assert http.delete(f"/zoo/requests/{name}").json()["state"] == "cancelled"
        with first.http() as http:
            assert eventually(lambda: http.get("/zoo/state").json()["running"] == 0, 60)


def _accepted(http: Any) -> bool:
    body = {"model": "org/base", "prompt": [5], "max_tokens": 1}
    return bool(http.post("/v1/completions", json=body, headers={"Idempotency-Key": "later"}).status_code == 200)
