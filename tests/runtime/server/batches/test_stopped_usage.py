"""Lines that the end of their batch stops are charged once, though servers are killed meanwhile, and with a broker."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Connection, create_engine

from runtime.queueing import requests, usage
from runtime.queueing.broker import LINES
from runtime.queueing.database import QueueDatabase
from runtime.queueing.records import decode_events
from tests import postgres, rabbitmq
from tests.runtime.server.aliases.looking import stored
from tests.runtime.server.durable.conftest import forks
from tests.runtime.server.durable.test_brokered import broker
from tests.runtime.server.durable.test_kills import LEASE, lives, tokenizer_folder
from tests.runtime.server.durable.test_usage import counted, status_of, submit
from tests.runtime.server.durable.test_usage_kills import NEVER, OWN, client, end
from tests.runtime.server.harness import eventually
from zoo.keys import make_key
from zoo.store import Store

__all__ = ["broker", "forks", "lives", "tokenizer_folder"]

#: A line that ends at once, and lines that last for twenty seconds.
LENGTHS = [1, 100, 100, 100]
PACE = ("--pace", "0.2")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with stored(tmp_path / "store") as store:
        yield store


@contextmanager
def reading(queue: str | Path) -> Iterator[Connection]:
    """Read a queue that a server may have: a folder, or an address of PostgreSQL."""
    if isinstance(queue, Path):
        engine = create_engine(f"sqlite:///{queue / 'queue.sqlite'}")
        with engine.connect() as connection:
            yield connection
        engine.dispose()
    else:
        with closing(QueueDatabase(queue)) as database, database.reading() as connection:
            yield connection


def journalled(queue: str | Path) -> list[int]:
    """Return how many tokens the queue has of each line that has not ended."""
    with reading(queue) as connection:
        lines = requests.unfinished(connection, batches=True)
        found = [decode_events(each.id, requests.events(connection, each.id)) for each in lines]
    return [sum(event.token is not None for event in events) for events in found]


def kept(queue: Path) -> list[int]:
    """Return the generated tokens of each line of which the queue keeps usage."""
    with reading(queue) as connection:
        return [each.generated_tokens for each in usage.kept(connection, usage.principals(connection), 100)]


def under_way(queue: str | Path) -> bool:
    """Return whether the short line has ended, and the others have tokens."""
    found = journalled(queue)
    return len(found) == len(LENGTHS) - 1 and all(count > 1 for count in found)


@pytest.mark.parametrize("how", ["cancelled", "expired"])
@pytest.mark.parametrize(
    ("point", "at", "stopped"),
    [("finalise", 2, 0), ("aborted", 1, 1), ("finalise", 4, 2), ("aborted", 3, 3)],
    ids=["in the first one's end", "behind it", "in the last one's end", "behind it all"],
)
def test_a_death_while_lines_are_stopped_charges_each_once(
    lives: Any, store: Store, tmp_path: Path, how: str, point: str, at: int, stopped: int
) -> None:
    secret, folder, queue = make_key(store, "team"), ("--store", str(store.root)), tmp_path / "queue"
    with lives(*folder, *PACE, *NEVER, "--die", point, "--at", str(at)) as child, client(child, secret) as http:
        batch = submit(http, LENGTHS, "24h" if how == "cancelled" else "6s")
        assert eventually(lambda: under_way(queue))
        if how == "cancelled":
            with pytest.raises(httpx.TransportError):  # the answer, or a later look
                http.post(f"/v1/batches/{batch}/cancel")
                eventually(lambda: status_of(http, batch) == how)
        assert child.process.wait(60) == -signal.SIGKILL
    ended, left = kept(queue), journalled(queue)
    assert len(ended) == 1 + stopped and len(left) == 3 - stopped and all([*ended, *left])
    with lives(*folder, *PACE) as child, client(child, secret) as http:
        assert eventually(lambda: status_of(http, batch) == how)
        end(child)
    assert counted(store) == (4, 12, sum(ended) + sum(left))


def test_lines_that_began_on_a_dead_server_are_charged_by_the_next_past_the_deadline(
    lives: Any, store: Store, tmp_path: Path
) -> None:
    secret, folder, queue = make_key(store, "team"), ("--store", str(store.root)), tmp_path / "queue"
    with lives(*folder, *PACE) as child, client(child, secret) as http:
        batch = submit(http, LENGTHS, "24h")
        assert eventually(lambda: under_way(queue))
        child.kill()
    left = journalled(queue)
    with closing(QueueDatabase(queue)) as database, database.writing() as connection:
        connection.exec_driver_sql("UPDATE queue_batches SET deadline = 1")
    with lives(*folder, *PACE) as child, client(child, secret) as http:
        assert eventually(lambda: status_of(http, batch) == "expired")
        end(child)
    answers, prompts, generated = counted(store)
    assert (answers, prompts) == (4, 12) and generated >= 1 + sum(left)


@pytest.mark.rabbitmq
@pytest.mark.parametrize(("point", "at"), [("aborted", 1), ("finalise", 4)])
def test_what_the_broker_gives_again_is_not_charged_again(
    lives: Any, store: Store, tmp_path: Path, rabbit: rabbitmq.Broker, broker: tuple[str, str], point: str, at: int
) -> None:
    secret, folder, queue = make_key(store, "team"), ("--store", str(store.root)), tmp_path / "queue"
    death = ("--die", point, "--at", str(at))
    with lives(*folder, *PACE, *broker, *NEVER, *death) as child, client(child, secret) as http:
        batch = submit(http, LENGTHS)
        assert eventually(lambda: under_way(queue))
        with pytest.raises(httpx.TransportError):
            http.post(f"/v1/batches/{batch}/cancel")
            eventually(lambda: status_of(http, batch) == "cancelled")
        assert child.process.wait(60) == -signal.SIGKILL
    used = sum(kept(queue)) + sum(journalled(queue))
    with lives(*folder, *PACE, *broker) as child, client(child, secret) as http:
        assert eventually(lambda: status_of(http, batch) == "cancelled")
        assert eventually(lambda: rabbit.unacknowledged(LINES) == 0, 30)
        end(child)
    assert counted(store) == (4, 12, used)
    with lives(*folder, *PACE, *broker) as child:
        end(child)
    assert counted(store) == (4, 12, used) and journalled(queue) == []


@pytest.mark.rabbitmq
@pytest.mark.postgres
@pytest.mark.parametrize("killed", [False, True])
def test_lines_that_run_on_another_server_are_charged_once(
    lives: Any, store: Store, broker: tuple[str, str], postgres_server: str, killed: bool
) -> None:
    """Both run lines of the batch; one is asked to cancel it, and the other one is killed before, or is not."""
    secret, queue = make_key(store, "team"), postgres.new_database(postgres_server)
    folder = ("--store", str(store.root), *PACE, *LEASE, *broker)
    with lives(*folder, target=queue) as other, lives(*folder, target=queue) as first, client(first, secret) as http:
        batch = submit(http, [1, *[100] * 31])
        assert eventually(lambda: len(found := journalled(queue)) == 31 and all(count > 1 for count in found))
        with httpx.Client(base_url=other.address, headers=OWN, trust_env=False) as its:
            assert its.get("/zoo/state").json()["queue"]["running"] > 0
        if killed:
            other.kill()
        assert http.post(f"/v1/batches/{batch}/cancel").status_code == 200
        assert eventually(lambda: status_of(http, batch) == "cancelled")
        end(first)
        if not killed:
            end(other)
    answers, prompts, generated = counted(store)
    assert (answers, prompts) == (32, 96) and generated > 62
