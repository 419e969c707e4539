"""Responses in the background on servers with a queue: over a restart, and shared by several servers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from runtime.frontend.tokenizer import Tokenizer
from runtime.queueing import requests
from tests.runtime.server.aliases.looking import points_to, stored
from tests.runtime.server.answers.begun import (
    ASKED,
    BEGUN,
    QUEUES,
    Brake,
    Start,
    begin,
    ended,
    events_of,
    shown,
    starting,
)
from tests.runtime.server.harness import eventually
from zoo.aliases import set_alias


@pytest.fixture(params=QUEUES)
def start_queued(request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Start]:
    """Start a server with a queue, the same one each time."""
    with starting(request, tokenizer, tmp_path) as made:
        yield made


def test_a_key_makes_two_requests_one(start_queued: Start) -> None:
    key = {"Idempotency-Key": "once"}
    body = {**ASKED, "background": True}
    with Brake() as brake, start_queued(pace=brake) as server, server.http() as http:
        first, again = (http.post("/v1/responses", json=body, headers=key).json() for _ in range(2))
        assert first["id"] == again["id"] and again["status"] in BEGUN
        assert http.post("/v1/responses", json={**body, "seed": 1}, headers=key).status_code == 422
        brake.free()
        whole = ended(http, first["id"])
        assert http.post("/v1/responses", json=body, headers=key).json() == whole


def test_with_a_queue_one_outlives_its_server(start_queued: Start) -> None:
    shut = threading.Event()
    asked = {**ASKED, "background": True, "stream": True}
    with start_queued(pace=lambda _: shut.wait(1)) as server, server.http() as http:
        names = [begin(http)["id"] for _ in range(2)]
        with http.stream("POST", "/v1/responses", json=asked) as response:
            opening = events_of(next(response.iter_text()))[:2]
    streamed = opening[0]["response"]["id"]
    with start_queued() as server, server.http() as http:
        events = events_of(http.get(f"/v1/responses/{streamed}", params={"stream": "true"}).text)
        assert events[:2] == opening and events[-1]["type"] == "response.incomplete"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        expected = http.post("/v1/responses", json=ASKED).json()["output"][0]["content"]
        for name in names:
            assert ended(http, name)["output"][0]["content"] == expected


@pytest.mark.parametrize("start_queued", QUEUES[1:], indirect=True)
def test_servers_of_one_queue_say_ids_show_and_cancel_what_another_runs(start_queued: Start) -> None:
    asked = {**ASKED, "background": True, "stream": True, "max_output_tokens": 30}
    with (
        Brake() as brake,
        start_queued(pace=brake) as one,
        start_queued(pace=brake) as two,
        one.http() as http,
        two.http() as other,
        ThreadPoolExecutor(4) as pool,
        ExitStack() as streams,
    ):

        def follow(name: str) -> list[Any]:
            return events_of(other.get(f"/v1/responses/{name}", params={"stream": "true"}).text)

        names, parts = [], []
        for _ in range(4):  # a broker gives them to both servers
            response = streams.enter_context(http.stream("POST", "/v1/responses", json=asked))
            parts.append(response.iter_text())
            names.append(events_of(next(parts[-1]))[0]["response"]["id"])
        assert brake.steps <= 2, "no server has made a token"
        for name in names:
            assert shown(other, name)["status"] in BEGUN
        assert other.post(f"/v1/responses/{names[0]}/cancel").json()["status"] == "cancelled"
        followers = [pool.submit(follow, name) for name in names[1:]]
        time.sleep(0.3)
        brake.free()
        for name, found, follower in zip(names[1:], parts[1:], followers, strict=True):
            events = follower.result(30)
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert events_of("".join(found)) == events[2:] and events[-1]["type"] == "response.incomplete"
            assert shown(http, name) == shown(other, name) == events[-1]["response"]
        assert shown(http, names[0])["status"] == "cancelled"


def paced(brake: Brake) -> dict[str, Any]:
    """Options of a server that makes 50 tokens a second until the brake holds it."""

    def pace(step: int) -> None:
        time.sleep(0.02)
        brake(step)

    return {"pace": pace}


@pytest.mark.parametrize("start_queued", QUEUES[1:], indirect=True)
@pytest.mark.parametrize("steps", [5, 1000], ids=["between two tokens", "while tokens come"])
def test_a_stream_that_another_server_cancels_ends_with_an_error_everywhere(start_queued: Start, steps: int) -> None:
    asked = {**ASKED, "background": True, "stream": True, "max_output_tokens": 200}
    with (
        Brake(after=steps) as brake,
        start_queued(**paced(brake)) as one,
        start_queued(**paced(brake)) as two,
        one.http() as http,
        two.http() as other,
    ):
        with http.stream("POST", "/v1/responses", json=asked) as response:
            parts = response.iter_text()
            text = next(parts)
            while "output_text.delta" not in text:
                text += next(parts)
            name = events_of(text)[0]["response"]["id"]
            with other.stream("GET", f"/v1/responses/{name}", params={"stream": "true"}) as second:
                followed = second.iter_text()
                seen = next(followed)
                assert other.post(f"/v1/responses/{name}/cancel").json()["status"] == "cancelled"
                seen += "".join(followed)
            text += "".join(parts)
        brake.free()
        events = events_of(text)
        assert events[-1]["type"] == "error" and events[-1]["code"] == "request_aborted"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert len(events) > 4 and events_of(seen) == events
        for client in (http, other):
            assert events_of(client.get(f"/v1/responses/{name}", params={"stream": "true"}).text) == events
            assert shown(client, name)["status"] == "cancelled"


@pytest.mark.parametrize("start_queued", QUEUES[1:2], indirect=True)
@pytest.mark.parametrize("removed", [False, True])
def test_a_completion_that_another_server_aborts_ends_with_an_error(start_queued: Start, removed: bool) -> None:
    """Removed at once, so that nothing of it is left to read where it runs."""
    asked = {"model": "org/base", "prompt": [5], "max_tokens": 200, "stream": True}
    with (
        Brake(after=5) as brake,
        start_queued(**paced(brake)) as one,
        start_queued(**paced(brake)) as two,
        one.http() as http,
        two.http() as other,
        http.stream("POST", "/v1/completions", json=asked, headers={"Idempotency-Key": "k"}) as response,
    ):
        parts = response.iter_text()
        text = next(parts)
        name = json.loads(text.split("data: ", 1)[1].split("\n", 1)[0])["id"]
        assert eventually(lambda: brake.steps > 5), "it is held, and learns nothing of itself"
        assert other.delete(f"/zoo/requests/{name}").json()["state"] == "cancelled"
        if removed:
            queue = two.service.durable
            assert queue is not None
            with queue.store.database.writing() as connection:
                requests.remove(connection, name)
        began = time.monotonic()
        text += "".join(parts)
        assert time.monotonic() - began < 15, "before the brake lets go"
        brake.free()
        assert f'"code":"request_{"not_found" if removed else "aborted"}"' in text
        assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("start_queued", QUEUES[1:2], indirect=True)
def test_what_follows_an_answer_elsewhere_words_the_model_that_runs_whatever_its_alias_has_become(
    start_queued: Start, tmp_path: Path
) -> None:
    asked = {**ASKED, "model": "prod", "background": True, "stream": True}
    with Brake(after=5) as brake, stored(tmp_path / "store") as store:
        set_alias(store, "prod", "org/base")
        with (
            start_queued(store=store, **paced(brake)) as one,
            start_queued(store=store, **paced(brake)) as two,
            one.http() as http,
            two.http() as other,
            http.stream("POST", "/v1/responses", json=asked) as response,
        ):
            parts = response.iter_text()
            text = next(parts)
            name = events_of(text)[0]["response"]["id"]
            set_alias(store, "prod", "org/fine")
            assert points_to(other, ["org/fine"])
            with other.stream("GET", f"/v1/responses/{name}", params={"stream": "true"}) as second:
                followed = second.iter_text()
                seen = next(followed)
                brake.free()
                seen += "".join(followed)
            text += "".join(parts)
            assert events_of(seen) == events_of(text) and events_of(text)[-1]["response"]["model"] == "org/base"
