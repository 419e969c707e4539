"""Requests of servers wait in RabbitMQ: any of them runs what comes to one, and a death at any point counts nothing
twice.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from tests import postgres, rabbitmq
from tests.runtime.server.batches.asking import ended, line, results, submit
from tests.runtime.server.durable.test_kills import LEASE, SLOW, Client, lives, tokenizer_folder, whole
from tests.runtime.server.durable.test_several import data_of
from tests.runtime.server.harness import eventually

__all__ = ["lives", "tokenizer_folder"]

pytestmark = pytest.mark.rabbitmq


@pytest.fixture
def broker(rabbit: rabbitmq.Broker) -> Iterator[tuple[str, str]]:
    """The option of a server; nothing of another test is in the queues."""
    rabbit.purge()
    yield ("--broker", rabbit.url)
    rabbit.purge()


def client_of(child: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{child.address}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize(("point", "at"), [("fetch", 1), ("journal", 3), ("finalise", 1), ("ack", 1)])
def test_a_death_at_any_point_is_made_good(
    lives: Any, broker: tuple[str, str], tmp_path: Path, point: str, at: int
) -> None:
    client = Client("key")
    with lives("--salt", "a", "--die", point, "--at", str(at), *broker) as child:
        client.read(child)
        child.die(client)
    seen = list(client.events)
    with lives("--salt", "b", *broker) as child, child.http() as http:
        if not client.ended:
            client.read(child)
        answer = whole(child, "key")
        assert http.get("/zoo/state").json()["queue"] == {"waiting": 0, "running": 0, "dead": 0}
    assert client.ended and client.events[: len(seen)] == seen and len(client.tokens()) == 40
    assert data_of(answer) == [data for _, data in client.events]
    with closing(sqlite3.connect(tmp_path / "queue" / "queue.sqlite")) as database:
        assert database.execute("SELECT state FROM queue_requests").fetchall() == [("done",)]


def test_a_request_that_takes_longer_than_its_consumer_may_is_answered_once(
    lives: Any, broker: tuple[str, str]
) -> None:
    client, seconds = Client("key"), 2 * rabbitmq.CONSUMER_TIMEOUT_MS / 1000
    with lives("--salt", "a", "--pace", str(seconds / 40), *broker) as child:
        client.read(child)
        assert client.ended and client.statuses == [200] and len(client.tokens()) == 40
        assert data_of(whole(child, "key")) == [data for _, data in client.events]


def test_a_lost_broker_refuses_new_requests_and_loses_none(
    lives: Any, rabbit: rabbitmq.Broker, broker: tuple[str, str]
) -> None:
    client = Client("key")
    with lives("--salt", "a", "--pace", "0.1", *broker) as child, child.http() as http:
        client.read(child, 3)
        rabbit.kill()
        refused = http.post("/v1/completions", json=Client("new").body, headers={"Idempotency-Key": "new"})
        assert refused.status_code == 503 and "retry-after" in refused.headers
        client.read(child)  # what runs goes on without it
        assert client.ended and len(client.tokens()) == 40
        rabbit.start()
        assert eventually(lambda: whole(child, "new").endswith("data: [DONE]\n\n"), 30)


@pytest.mark.postgres
def test_a_batch_is_shared_by_servers_and_outlives_one(
    lives: Any, broker: tuple[str, str], postgres_server: str
) -> None:
    shared = postgres.new_database(postgres_server)
    with lives(*LEASE, *broker, target=shared) as second:
        with lives("--pace", "0.02", *LEASE, *broker, target=shared) as first:
            batch = submit(client_of(first), [line(number) for number in range(60)]).id
            assert eventually(lambda: _completed(second, batch) > 5, 60)
            first.kill()
        done = ended(client_of(second), batch)
        assert done.request_counts is not None
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 60, 0)
        found = results(client_of(second), done.output_file_id)
        assert [each["custom_id"] for each in found] == [f"line-{number}" for number in range(60)]


def _completed(child: Any, batch: str) -> int:
    counts = client_of(child).batches.retrieve(batch).request_counts
    return 0 if counts is None else counts.completed


def test_what_ran_on_a_dead_server_comes_to_the_next(lives: Any, broker: tuple[str, str]) -> None:
    clients = [Client(f"key-{number}") for number in range(4)]
    with lives("--salt", "a", *SLOW, *broker) as first:
        for client in clients:
            client.read(first, 1)
        first.kill()
    with lives("--salt", "b", *broker) as second:
        for client in clients:
            client.read(second)
            assert client.ended and len(client.tokens()) == 40
