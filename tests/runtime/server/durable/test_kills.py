"""The server is killed wherever a request may be, and the next one goes on: nothing lost, nothing twice, nothing new.

Each life of the server has other tokens (`child`): what a client has seen stays only if it was written before it was
sent.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.queueing import requests
from runtime.queueing.database import QueueDatabase
from tests import postgres
from tests.runtime.frontend.samples import byte_level
from tests.runtime.server.durable.forks import ForkedProcess, Forks
from tests.runtime.server.harness import eventually

BODY = {"model": "org/base", "prompt": [5, 6, 7], "max_tokens": 40, "return_token_ids": True}

#: Half a second per step: a request of the first life is under way for twenty seconds.
SLOW = ("--pace", "0.5")

#: A lease that a test can wait for.
LEASE = ("--lease", "1.5")


@dataclass
class Child:
    """A server's process."""

    process: ForkedProcess
    address: str

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.address, timeout=120, trust_env=False)

    def die(self, client: Client) -> None:
        """Wait for the death at the chosen point; kill it where steps came together and the point was not reached."""
        if client.ended:
            self.kill()
        assert self.process.wait(60) == -signal.SIGKILL

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer-files")
    byte_level(folder)
    return folder


@pytest.fixture
def lives(forks: Forks, tokenizer_folder: Path, tmp_path: Path) -> Iterator[Any]:
    """Start one life of the server after the other, on one queue."""

    @contextmanager
    def life(*options: str, target: str | None = None) -> Iterator[Child]:
        process = forks.start([target or str(tmp_path / "queue"), str(tokenizer_folder), *options])
        try:
            yield Child(process, process.stdout.readline().strip())
        finally:
            process.kill()
            process.wait(60)
            process.stdout.close()

    return life


class Client:
    """A client of one keyed stream: it comes back behind the last event that it has seen until there is an end."""

    def __init__(self, key: str, **changes: Any) -> None:
        self.key = key
        self.body = {**BODY, "stream": True, **changes}
        self.events: list[tuple[int | None, str]] = []
        self.statuses: list[int] = []

    @property
    def last(self) -> int | None:
        return max((number for number, _ in self.events if number is not None), default=None)

    @property
    def ended(self) -> bool:
        return bool(self.events) and self.events[-1][1] == "[DONE]"

    def tokens(self, choice: int = 0) -> list[int]:
        chunks = [json.loads(data)["choices"] for _, data in self.events if data != "[DONE]"]
        return [token for each in chunks for one in each if one["index"] == choice for token in one["token_ids"]]

    def read(self, child: Child, most: int | None = None) -> None:
        """Read the stream until its end, `most` events more, or the server's death."""
        headers = {"Idempotency-Key": self.key} | ({} if self.last is None else {"Last-Event-ID": str(self.last)})
        try:
            with (
                child.http() as http,
                http.stream("POST", "/v1/completions", json=self.body, headers=headers) as response,
            ):
                self.statuses.append(response.status_code)
                number = None
                for line in response.iter_lines():
                    if line.startswith("id: "):
                        number = int(line[4:])
                    elif line.startswith("data: "):
                        self.events.append((number, line[6:]))
                        number = None
                        most = None if most is None else most - 1
                        if most == 0:
                            return
        except httpx.TransportError:
            self.statuses.append(0)


def whole(child: Child, key: str, **changes: Any) -> str:
    with child.http() as http:
        return http.post(
            "/v1/completions", json={**BODY, "stream": True, **changes}, headers={"Idempotency-Key": key}
        ).text


MIXED = (40, 70, 90, 100)
#: Of two such answers that run at once one gives way: pages of a `--crowded` server hold little more than one.
LONG = (97, 98, 99, 100)


def crowd(lengths: Sequence[int]) -> list[Client]:
    """Return requests for a `--crowded` server: each alone would be on time, all of them are not, so it plans."""
    return [
        Client(
            f"{name}{tokens}", model=f"org/{name}", max_tokens=tokens, prompt=[number + 1, 6, 7], slo_ms=5000 + number
        )
        for number, (tokens, name) in enumerate((each, name) for each in lengths for name in ("base", "fine"))
    ]


def read_all(child: Child, clients: Sequence[Client]) -> None:
    """Let clients read at once, each until its end or the server's."""
    threads = [threading.Thread(target=each.read, args=(child,)) for each in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)


def assert_nothing_is_left(child: Child) -> None:
    with child.http() as http:
        queue = http.get("/zoo/state").json()["queue"]
    assert (queue["waiting"], queue["running"], queue["dead"]) == (0, 0, 0)


def assert_continued(client: Client, part: Sequence[tuple[int | None, str]]) -> None:
    """Check that a stream has ended, begins with what was seen of it before, and has each event once."""
    assert client.ended and client.events[: len(part)] == list(part)
    assert len(client.tokens()) == client.body["max_tokens"]
    numbers = [number for number, _ in client.events if number is not None]
    assert numbers == sorted(set(numbers))


def test_streams_go_on_with_what_was_sent_over_two_deaths(lives: Any) -> None:
    clients = [
        Client("one"),
        Client("two", n=2, prompt=[9, 8]),
        Client("stops", stop=["@", "k"], max_tokens=60),
        Client("usage", stream_options={"include_usage": True}),
    ]
    for salt in ("a", "b"):
        with lives("--salt", salt) as child:
            threads = [threading.Thread(target=each.read, args=(child, 6)) for each in clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
            child.kill()
    seen = [list(each.events) for each in clients]
    with lives("--salt", "c") as child:
        for client, part in zip(clients, seen, strict=True):
            client.read(child)
            assert client.ended
            assert client.events[: len(part)] == part
            numbers = [number for number, _ in client.events if number is not None]
            assert numbers == sorted(set(numbers))
            lines = [line for line in whole(child, client.key, **client.body).split("\n") if line.startswith("data: ")]
            assert [line[6:] for line in lines] == [data for _, data in client.events]
    assert [len(each.tokens()) for each in clients[:2]] == [40, 40]
    assert len(clients[1].tokens(1)) == 40


@pytest.mark.parametrize(
    ("point", "at"),
    [
        ("accept", 1),
        ("stored", 1),
        ("journal", 3),
        ("written", 3),
        ("send", 3),
        ("finalise", 1),
        ("answered", 1),
    ],
)
def test_a_death_at_any_point_is_made_good(lives: Any, point: str, at: int) -> None:
    client = Client("key")
    with lives("--salt", "a", "--die", point, "--at", str(at)) as child:
        client.read(child)
        assert not client.ended or at > 1
        child.die(client)
    seen = list(client.events)
    with lives("--salt", "b") as child:
        client.read(child)
        answer = whole(child, "key")
        with child.http() as http:
            assert http.get("/zoo/state").json()["queue"] == {"waiting": 0, "running": 0, "dead": 0}
    assert client.ended
    assert client.events[: len(seen)] == seen
    assert len(client.tokens()) == 40
    assert [line[6:] for line in answer.split("\n") if line.startswith("data: ")] == [data for _, data in client.events]


def test_a_death_while_a_request_is_fetched_again_is_made_good(lives: Any) -> None:
    client = Client("key")
    with lives("--salt", "a", *SLOW) as child:
        client.read(child, 2)
        child.kill()
    with lives("--salt", "b", "--die", "fetch") as child:
        assert child.process.wait(60) == -signal.SIGKILL
    with lives("--salt", "c") as child:
        client.read(child)
    assert client.ended
    assert len(client.tokens()) == 40


@pytest.mark.parametrize(("point", "at"), [("plan", 1), ("swap-out", 1), ("swap-in", 1), ("load", 3)])
def test_a_death_while_models_or_sequences_change_places_is_made_good(lives: Any, point: str, at: int) -> None:
    clients = crowd(LONG if point.startswith("swap") else MIXED)
    with lives("--crowded", "--pace", "0.015", "--salt", "a", "--die", point, "--at", str(at)) as child:
        read_all(child, clients)
        assert not all(each.ended for each in clients), "the point was not reached"
        assert child.process.wait(60) == -signal.SIGKILL
    seen = [list(each.events) for each in clients]
    with lives("--crowded", "--salt", "b") as child:
        read_all(child, clients)
        assert_nothing_is_left(child)
    for client, part in zip(clients, seen, strict=True):
        assert_continued(client, part)


@pytest.mark.postgres
def test_a_death_is_made_good_from_postgresql(lives: Any, postgres_server: str) -> None:
    target = postgres.new_database(postgres_server)
    client = Client("key", n=2)
    for options in (("--salt", "a", "--die", "written", "--at", "3"), ("--salt", "b", "--die", "finalise")):
        with lives(*options, *LEASE, target=target) as child:
            client.read(child)
            child.die(client)
    seen = list(client.events)
    with lives("--salt", "c", *LEASE, target=target) as child:
        client.read(child)
    assert client.ended
    assert client.events[: len(seen)] == seen
    assert (len(client.tokens(0)), len(client.tokens(1))) == (40, 40)


@pytest.mark.parametrize("journalled", [True, False])
def test_a_death_after_sending_alters_a_stream_without_the_write_ahead(lives: Any, journalled: bool) -> None:
    """The negative control: the phase `send` does fail where events are sent before they are written."""
    client = Client("key")
    options = () if journalled else ("--unjournalled",)
    with lives("--salt", "a", "--pace", "0.05", "--die", "send", "--at", "4", *options) as child:
        client.read(child)
        assert client.events and not client.ended
        assert child.process.wait(60) == -signal.SIGKILL
    seen = [data for _, data in client.events]
    with lives("--salt", "b") as child:
        answer = whole(child, "key")
    data = [line[6:] for line in answer.split("\n") if line.startswith("data: ")]
    assert (data[: len(seen)] == seen) is journalled


def test_a_client_that_never_comes_back_is_answered_all_the_same(lives: Any) -> None:
    client = Client("key", stream=False)
    with lives("--salt", "a", *SLOW) as child:
        reader = threading.Thread(target=client.read, args=(child,))
        reader.start()
        with child.http() as http:
            assert eventually(lambda: http.get("/zoo/state").json()["queue"]["running"] == 1, 60)
        child.kill()
        reader.join(60)
    with lives("--salt", "b") as child, child.http() as http:
        assert eventually(lambda: http.get("/zoo/state").json()["queue"]["running"] == 0, 60)
        answer = http.post("/v1/completions", json=client.body, headers={"Idempotency-Key": "key"}).json()
        assert len(answer["choices"][0]["token_ids"]) == 40
        shown = http.get(f"/zoo/requests/{answer['id']}").json()
        assert (shown["state"], shown["answer"]) == ("done", answer)


def test_a_term_signal_parks_and_the_next_server_goes_on(lives: Any, tmp_path: Path) -> None:
    streamed, waiting = Client("stream"), Client("whole", stream=False)
    with lives("--salt", "a", *SLOW) as child:
        streamed.read(child, 2)
        reader = threading.Thread(target=waiting.read, args=(child,))
        follower = threading.Thread(target=streamed.read, args=(child,))
        reader.start()
        follower.start()
        with child.http() as http:
            assert eventually(lambda: http.get("/zoo/state").json()["queue"]["running"] == 2, 60)
        assert eventually(lambda: len(streamed.events) > 2, 60)  # it follows again
        os.kill(child.process.pid, signal.SIGTERM)
        reader.join(60)
        follower.join(60)
        assert child.process.wait(60) == 0
    assert waiting.statuses == [503]
    assert not streamed.ended
    assert "shutting down" in streamed.events[-1][1]
    part = streamed.events = streamed.events[:-1]
    with closing(QueueDatabase(tmp_path / "queue", patience=60)) as queue, queue.reading() as connection:
        assert [(each.state, each.attempts) for each in requests.unfinished(connection)] == [("queued", 0)] * 2
    with lives("--salt", "b") as child, child.http() as http:
        streamed.read(child)
        assert streamed.ended
        assert streamed.events[: len(part)] == part
        assert len(streamed.tokens()) == 40
        answer = http.post("/v1/completions", json=waiting.body, headers={"Idempotency-Key": "whole"})
        assert len(answer.json()["choices"][0]["token_ids"]) == 40


def test_what_three_servers_die_with_is_given_up_and_what_ran_beside_it_is_not(lives: Any) -> None:
    with lives("--pace", "600") as child:  # no step ever ends
        clients = [Client("bad", stream=False), Client("good", stream=False)]
        readers = [threading.Thread(target=each.read, args=(child,)) for each in clients]
        for reader in readers:
            reader.start()
        with child.http() as http:
            assert eventually(lambda: http.get("/zoo/state").json()["queue"]["running"] == 2, 60)
        child.kill()
        for reader in readers:
            reader.join(60)
    states = []
    for _ in range(2):
        with lives("--pace", "600") as child, child.http() as http:
            alone = len(states) + 1
            assert eventually(
                lambda expected=3 - alone: http.get("/zoo/state").json()["queue"]["running"] == expected, 60
            )
            states.append(http.get("/zoo/state").json()["queue"])
            child.kill()
    assert states == [{"waiting": 0, "running": 2, "dead": 0}, {"waiting": 1, "running": 1, "dead": 0}]
    with lives() as child, child.http() as http:
        assert eventually(lambda: http.get("/zoo/state").json()["queue"]["running"] == 0, 60)
        assert http.get("/zoo/state").json()["queue"]["dead"] == 1
        answers = [
            http.post("/v1/completions", json=each.body, headers={"Idempotency-Key": each.key}) for each in clients
        ]
        assert sorted(answer.status_code for answer in answers) == [200, 500]
        assert 'blockzoo:queue_requests{state="dead"} 1.0' in http.get("/metrics").text
