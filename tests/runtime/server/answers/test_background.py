"""Responses in the background: begun, shown, followed, cancelled, bounded. In memory, with a queue in a folder or in
PostgreSQL, and with a broker before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer
from runtime.server.answers import background
from runtime.server.keys import key_book
from tests.runtime.server.aliases.looking import stored
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
from tests.runtime.server.harness import eventually, running
from zoo.keys import make_key


@pytest.fixture(params=["memory", *QUEUES])
def start(request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Start]:
    """Start a server, with a queue or without one."""
    with starting(request, tokenizer, tmp_path) as made:
        yield made


def test_the_client_begins_one_and_asks_until_it_is_done(start: Start) -> None:
    with start() as server, server.client() as client:
        expected = client.responses.create(**ASKED)
        with_metadata: Any = {**ASKED, "metadata": {"a": "b"}}
        begun = client.responses.create(**with_metadata, background=True)
        assert begun.status in BEGUN and (begun.output, begun.background, begun.store) == ([], True, True)
        while begun.status in BEGUN:
            time.sleep(0.01)
            begun = client.responses.retrieve(begun.id)
        assert (begun.status, begun.output_text, begun.usage) == ("incomplete", expected.output_text, expected.usage)
        assert (begun.metadata, begun.background) == ({"a": "b"}, True)
        assert [item.type for item in client.responses.input_items.list(begun.id)] == ["message"]
        client.responses.delete(begun.id)
        with pytest.raises(openai.APIStatusError):
            client.responses.retrieve(begun.id)


def test_the_answer_does_not_wait_for_the_model_and_outlives_its_client(start: Start) -> None:
    with Brake() as brake, start(pace=brake) as server, server.http() as http:
        with server.http() as client:
            began = time.monotonic()
            name = begin(client)["id"]
            assert time.monotonic() - began < 10  # the model waits for longer
        assert shown(http, name)["status"] in BEGUN
        brake.free()
        assert ended(http, name)["status"] == "incomplete"


def test_one_that_runs_is_cancelled_and_stays_so(start: Start) -> None:
    with Brake(after=3) as brake, start(pace=brake) as server, server.http() as http:
        name = begin(http, max_output_tokens=100)["id"]
        assert eventually(lambda: brake.steps > 3)
        stop = http.post(f"/v1/responses/{name}/cancel").raise_for_status().json()
        assert (stop["id"], stop["status"], stop["error"], stop["output"]) == (name, "cancelled", None, [])
        brake.free()
        assert eventually(lambda: server.state()["running"] == 0 and server.gate.places_in_use == 0)
        time.sleep(0.05)
        assert shown(http, name) == stop == http.post(f"/v1/responses/{name}/cancel").json()
        assert brake.steps < 60, "its sequence went on"
        done = begin(http)["id"]
        whole = ended(http, done)
        assert whole["status"] == "incomplete" and http.post(f"/v1/responses/{done}/cancel").json() == whole
        with server.client() as client:
            assert client.responses.cancel(done).status == "incomplete"


def test_what_was_not_begun_there_is_not_cancelled(start: Start) -> None:
    with start() as server, server.http() as http:
        made = http.post("/v1/responses", json=ASKED).json()["id"]
        assert http.post(f"/v1/responses/{made}/cancel").status_code in (400, 501)
        assert http.post("/v1/responses/resp_none/cancel").status_code in (404, 501)
        refused = http.post("/v1/responses", json={**ASKED, "background": True, "store": False})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")
        absent = http.post("/v1/responses", json={**ASKED, "background": True, "model": "org/none"})
        assert absent.status_code == 404 and absent.json()["error"]["code"] == "model_not_found"


def test_a_stream_that_was_left_is_taken_up_behind_any_event(start: Start) -> None:
    asked = {**ASKED, "background": True, "stream": True}
    with Brake(after=4) as brake, start(pace=brake) as server, server.http() as http:
        with http.stream("POST", "/v1/responses", json=asked) as response:
            first = next(response.iter_bytes()).decode()
        name = events_of(first)[0]["response"]["id"]
        assert events_of(first)[0]["response"]["background"] is True
        followed: dict[int, str] = {}

        def follow(after: int) -> None:
            query = {"stream": "true", "starting_after": str(after)}
            followed[after] = http.get(f"/v1/responses/{name}", params=query).text

        readers = [threading.Thread(target=follow, args=(after,)) for after in (1, 8)]
        for reader in readers:  # while it runs; event 8 has not come yet
            reader.start()
        time.sleep(0.2)
        brake.free()
        for reader in readers:
            reader.join(20)
        whole = http.get(f"/v1/responses/{name}", params={"stream": "true"})
        assert whole.headers["content-type"].startswith("text/event-stream") and whole.text.startswith(first)
        events = events_of(whole.text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.incomplete" and events[-1]["response"] == shown(http, name)
        assert events_of(followed[1]) == events[2:] and events_of(followed[8]) == events[9:] != []
        for after in (0, 4, len(events) - 2, len(events) - 1, 10**6):
            rest = http.get(f"/v1/responses/{name}", params={"stream": "true", "starting_after": after})
            assert events_of(rest.text) == events[after + 1 :]
        with server.client() as client:
            read = list(client.responses.retrieve(name, stream=True, starting_after=2))
            assert [event.sequence_number for event in read] == list(range(3, len(events)))
        plain = begin(http)["id"]
        for path, query, param in [
            (plain, {"stream": "true"}, "stream"),
            (name, {"stream": "yes"}, "stream"),
            (name, {"starting_after": "1"}, "starting_after"),
            (name, {"stream": "true", "starting_after": "-1"}, "starting_after"),
            (name, {"stream": "true", "starting_after": "1" * 10}, "starting_after"),
        ]:
            refused = http.get(f"/v1/responses/{path}", params=query)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


@pytest.mark.parametrize("way", ["to the end", "cancelled"])
def test_a_stream_says_its_id_before_there_is_a_token(start: Start, way: str) -> None:
    asked = {**ASKED, "background": True, "stream": True}
    with Brake() as brake, start(pace=brake) as server, server.http() as http, server.http() as other:
        began = time.monotonic()
        with http.stream("POST", "/v1/responses", json=asked) as response:
            parts = response.iter_text()
            text = next(parts)
            assert time.monotonic() - began < 10  # the model waits for longer
            opening = events_of(text)
            assert [event["type"] for event in opening] == ["response.created", "response.in_progress"]
            name = opening[0]["response"]["id"]
            assert shown(other, name)["status"] in BEGUN
            with other.stream("GET", f"/v1/responses/{name}", params={"stream": "true"}) as second:
                assert events_of(next(second.iter_text())) == opening
            if way == "cancelled":
                assert other.post(f"/v1/responses/{name}/cancel").json()["status"] == "cancelled"
            brake.free()
            text += "".join(parts)
        events = events_of(text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == ("error" if way == "cancelled" else "response.incomplete")
        whole = http.get(f"/v1/responses/{name}", params={"stream": "true"})
        assert whole.text == text
        rest = http.get(f"/v1/responses/{name}", params={"stream": "true", "starting_after": 1})
        assert events_of(rest.text) == events[2:]


def test_a_cancelled_stream_ends_with_an_error(start: Start) -> None:
    asked = {**ASKED, "background": True, "stream": True, "max_output_tokens": 100}
    with Brake(after=4) as brake, start(pace=brake) as server, server.http() as http, server.http() as other:
        with http.stream("POST", "/v1/responses", json=asked) as response:
            parts = response.iter_text()
            text = next(parts)
            name = events_of(text)[0]["response"]["id"]
            assert other.post(f"/v1/responses/{name}/cancel").json()["status"] == "cancelled"
            text += "".join(parts)
        brake.free()
        events = events_of(text)
        assert events[-1]["type"] == "error" and events[-1]["code"] == "request_aborted"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events_of(http.get(f"/v1/responses/{name}", params={"stream": "true"}).text) == events


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_is_shown(start: Start, stream: bool) -> None:
    with start(fail_at=(8,), pace=lambda _: time.sleep(0.02)) as server, server.http() as http:
        if stream:
            asked = {**ASKED, "background": True, "stream": True, "max_output_tokens": 40}
            with http.stream("POST", "/v1/responses", json=asked) as response:
                name = events_of(next(response.iter_text()))[0]["response"]["id"]
        else:
            name = begin(http, max_output_tokens=40)["id"]
        found = ended(http, name)
    assert found["status"] == "failed" and found["error"]["message"] and found["error"]["code"], found


def test_so_many_run_at_once(start: Start) -> None:
    with (
        Brake() as brake,
        start(pace=brake, config=ServerConfig(max_queued=3)) as server,
        server.http() as http,
    ):
        names = [begin(http)["id"] for _ in range(3)]
        refused = http.post("/v1/responses", json={**ASKED, "background": True})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        brake.free()
        for name in names:
            assert ended(http, name)["status"] == "incomplete"
        assert eventually(lambda: http.post("/v1/responses", json={**ASKED, "background": True}).status_code == 200)


def test_one_belongs_to_the_key_that_it_came_with(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_book, "PAUSE", 0.05)
    config = ServerConfig(api_key="own", client_keys=True)
    with stored(tmp_path / "store") as store:
        secrets = [make_key(store, name) for name in ("one", "other")]
        with Brake(after=3) as brake, start(store=store, config=config, pace=brake) as server:
            one, other = (
                httpx.Client(base_url=server.address, headers={"x-api-key": secret}, timeout=20, trust_env=False)
                for secret in secrets
            )
            with one, other, server.http() as own:
                name = begin(one, max_output_tokens=50)["id"]
                for client in (other, own):
                    found = [client.get(f"/v1/responses/{name}"), client.post(f"/v1/responses/{name}/cancel"),
                             client.delete(f"/v1/responses/{name}"), client.get(f"/v1/responses/{name}?stream=true"),
                             client.get(f"/v1/responses/{name}/input_items")]  # fmt: skip
                    assert {answer.status_code for answer in found} <= {404, 501}
                assert shown(one, name)["status"] in BEGUN
                assert one.post(f"/v1/responses/{name}/cancel").json()["status"] == "cancelled"
                brake.free()


def test_memory_is_bounded_and_the_oldest_go_first(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MOST_KEPT", 3)
    with Brake(after=10**6) as brake, running(tokenizer, pace=brake) as server, server.http() as http:

        def present(names: list[str]) -> list[bool]:
            return [http.get(f"/v1/responses/{name}").status_code == 200 for name in names]

        names = []
        for _ in range(5):
            names.append(begin(http)["id"])
            ended(http, names[-1])
        assert present(names) == [False, False, True, True, True]
        size = len(http.get(f"/v1/responses/{names[-1]}").content)
        monkeypatch.setattr(background, "MOST_BYTES", 2 * size + size // 2)
        assert present(names) == [False, False, False, True, True]
        brake._after = brake.steps  # from here on they run until they are released
        running_ones = [begin(http)["id"] for _ in range(3)]
        assert present(names) == [False] * 5 and present(running_ones) == [True] * 3
        refused = http.post("/v1/responses", json={**ASKED, "background": True})
        assert refused.status_code == 429 and server.gate.places_in_use == 3
        brake.free()


def test_in_memory_one_goes_after_a_while(tokenizer: Tokenizer) -> None:
    config = ServerConfig(retention_hours=1 / 3600)
    with running(tokenizer, config=config) as server, server.http() as http:
        name = begin(http)["id"]
        ended(http, name)
        assert eventually(lambda: http.get(f"/v1/responses/{name}").status_code == 501, 5)


def test_a_server_that_stops_stops_them(tokenizer: Tokenizer) -> None:
    began = time.monotonic()
    with Brake(after=3) as brake, running(tokenizer, pace=brake) as server, server.http() as http:
        begin(http, max_output_tokens=200)
        assert eventually(lambda: brake.steps > 3)
    assert time.monotonic() - began < 60
