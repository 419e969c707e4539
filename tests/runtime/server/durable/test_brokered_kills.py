"""With RabbitMQ in front of the tables, a server is killed wherever a request may be: nothing lost, nothing twice."""

from __future__ import annotations

import signal
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from runtime.queueing.broker import INTERACTIVE
from tests import rabbitmq
from tests.runtime.server.durable.forks import Forks
from tests.runtime.server.durable.test_brokered import broker
from tests.runtime.server.durable.test_kills import (
    LONG,
    MIXED,
    Client,
    assert_continued,
    assert_nothing_is_left,
    crowd,
    lives,
    read_all,
    tokenizer_folder,
    whole,
)
from tests.runtime.server.durable.test_several import data_of
from tests.runtime.server.harness import eventually

__all__ = ["broker", "lives", "tokenizer_folder"]

pytestmark = pytest.mark.rabbitmq


def states(folder: Path) -> list[tuple[str, int]]:
    """Return state and attempts of the requests in a queue's tables."""
    with closing(sqlite3.connect(folder / "queue" / "queue.sqlite")) as database:
        return database.execute("SELECT state, attempts FROM queue_requests").fetchall()


@pytest.fixture(scope="module")
def settled(
    rabbit: rabbitmq.Broker, forks: Forks, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The queues have been there for long enough for the broker to be killed."""
    queue = str(tmp_path_factory.mktemp("settled") / "queue")
    process = forks.start([queue, str(tokenizer_folder), "--broker", rabbit.url])
    process.stdout.readline()
    process.kill()
    process.wait(60)
    time.sleep(rabbitmq.SETTLED)


@pytest.mark.parametrize("point", ["offer", "offered", "claiming", "claimed"])
def test_a_death_before_anything_runs_is_made_good(
    lives: Any, broker: tuple[str, str], tmp_path: Path, point: str
) -> None:
    client = Client("key")
    with lives("--salt", "a", "--die", point, *broker) as child:
        client.read(child)
        assert client.statuses in ([0], [200, 0]) and not client.events
        assert child.process.wait(60) == -signal.SIGKILL
    # A claim outlives the server with its transaction; it is no attempt, since nothing of it has begun.
    assert states(tmp_path) == ([("running", 0)] if point == "claimed" else [])
    with lives("--salt", "b", *broker) as child:
        if point != "offer":  # what the broker has is answered though no client comes back
            assert eventually(lambda: states(tmp_path) == [("done", 1)], 60)
        client.read(child)
        assert_continued(client, [])
        assert_nothing_is_left(child)
        assert data_of(whole(child, "key")) == [data for _, data in client.events]
    assert states(tmp_path) == [("done", 1)]


@pytest.mark.parametrize("at", [1, 3])
def test_a_death_after_a_chunk_was_sent_is_made_good(lives: Any, broker: tuple[str, str], at: int) -> None:
    client = Client("key")
    with lives("--salt", "a", "--pace", "0.05", "--die", "send", "--at", str(at), *broker) as child:
        client.read(child)
        assert client.events and not client.ended
        assert child.process.wait(60) == -signal.SIGKILL
    seen = list(client.events)
    with lives("--salt", "b", *broker) as child:
        client.read(child)
        assert_continued(client, seen)
        assert_nothing_is_left(child)


@pytest.mark.parametrize(("point", "at"), [("plan", 1), ("swap-out", 1), ("swap-in", 1), ("load", 3)])
def test_a_death_while_models_or_sequences_change_places_is_made_good(
    lives: Any, broker: tuple[str, str], tmp_path: Path, point: str, at: int
) -> None:
    clients = crowd(LONG if point.startswith("swap") else MIXED)
    with lives("--crowded", "--pace", "0.015", "--salt", "a", "--die", point, "--at", str(at), *broker) as child:
        read_all(child, clients)
        assert not all(each.ended for each in clients), "the point was not reached"
        assert child.process.wait(60) == -signal.SIGKILL
    seen = [list(each.events) for each in clients]
    with lives("--crowded", "--salt", "b", *broker) as child:
        read_all(child, clients)
        assert_nothing_is_left(child)
    for client, part in zip(clients, seen, strict=True):
        assert_continued(client, part)
    assert [state for state, _ in states(tmp_path)] == ["done"] * len(clients)


@pytest.mark.parametrize(("point", "at"), [("offered", 1), ("claiming", 1), ("send", 3), ("finalise", 1), ("ack", 1)])
def test_a_death_of_the_broker_at_any_point_is_made_good(
    lives: Any, rabbit: rabbitmq.Broker, settled: None, broker: tuple[str, str], tmp_path: Path, point: str, at: int
) -> None:
    assert rabbit.process is not None
    first, client = rabbit.process, Client("key")
    options = ("--pace", "0.05", "--die", point, "--at", str(at), "--victim", str(first.pid))
    with lives(*options, *broker) as child:
        reader = threading.Thread(target=client.read, args=(child,))
        reader.start()
        try:
            first.wait(60)
        finally:
            rabbit.kill()
            rabbit.start()
        reader.join(60)
        assert client.statuses == [200], "the server lives: the client need not come back"
        assert_continued(client, [])
        assert_nothing_is_left(child)
        assert data_of(whole(child, "key")) == [data for _, data in client.events]
        assert states(tmp_path) == [("done", 1)]
        # What came again is acknowledged at last; it runs no second time.
        assert eventually(lambda: rabbit.unacknowledged(INTERACTIVE) == 0, 30)
    assert states(tmp_path) == [("done", 1)]
