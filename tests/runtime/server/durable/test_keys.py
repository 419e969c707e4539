"""Requests with an `Idempotency-Key`: one answer per key and principal, whichever connections come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer
from tests.runtime.server.harness import Running, eventually, running

PROMPT = "def hello"


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "org/base", "prompt": PROMPT, "max_tokens": 20, **changes}


class Gate:
    """Steps of the engine wait while it is shut."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.steps = 0

    def __call__(self, _: int) -> None:
        self.steps += 1
        time.sleep(0.001)
        self.open.wait(60)


@contextmanager
def queued(tokenizer: Tokenizer, folder: Path, **options: Any) -> Iterator[Running]:
    """Serve with a queue in a folder."""
    with running(tokenizer, queue=str(folder), **options) as started:
        yield started


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate()


@pytest.fixture(scope="module")
def durable(tokenizer: Tokenizer, gate: Gate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("durable") / "queue"
    with queued(tokenizer, folder, pace=gate, credit=4) as started:
        yield started


@pytest.fixture
def http(durable: Running) -> Iterator[httpx.Client]:
    with durable.http() as client:
        yield client


def post(http: httpx.Client, key: str | None, last: int | None = None, route: str = "completions", **given: Any) -> Any:
    headers = ({} if key is None else {"Idempotency-Key": key}) | ({} if last is None else {"Last-Event-ID": str(last)})
    sent = body(**given) if route == "completions" else {"model": "org/base", **given}
    return http.post(f"/v1/{route}", json=sent, headers=headers, timeout=60)


def wait_for(condition: Callable[[], bool]) -> None:
    assert eventually(condition, 60)


def test_the_same_key_and_body_give_the_same_bytes_without_a_second_run(http: httpx.Client, gate: Gate) -> None:
    first = post(http, "a", temperature=1.0)
    steps = gate.steps
    second = post(http, "a", temperature=1.0)
    assert first.status_code == second.status_code == 200
    assert first.content == second.content
    assert gate.steps == steps
    assert first.json()["id"].startswith("cmpl-")
    assert post(http, "b", temperature=1.0).json()["id"] != first.json()["id"]


def test_a_keyed_answer_is_that_of_a_request_without_a_key(http: httpx.Client) -> None:
    def plain(document: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in document.items() if name not in ("id", "created")}

    for number, given in enumerate(
        (
            body(n=2, seed=5, temperature=0.8),
            body(logprobs=2, echo=True),
            body(prompt=["one", "two"], stop=["a", "e"], max_tokens=40),
        )
    ):
        assert plain(post(http, f"like-{number}", **given).json()) == plain(post(http, None, **given).json())
    messages = [{"role": "user", "content": "hi"}]
    answers = [post(http, key, route="chat/completions", messages=messages, max_tokens=9) for key in ("chat", None)]
    assert plain(answers[0].json()) == plain(answers[1].json())
    assert answers[0].json()["id"].startswith("chatcmpl-")


def test_another_body_or_route_under_the_same_key_is_refused(http: httpx.Client) -> None:
    assert post(http, "c").status_code == 200
    for refused in (
        post(http, "c", max_tokens=21),
        post(http, "c", route="chat/completions", messages=[{"role": "user", "content": "x"}]),
    ):
        assert refused.status_code == 422
        assert refused.json()["error"]["code"] == "idempotency_key_reused"


def test_a_running_duplicate_attaches(http: httpx.Client, durable: Running, gate: Gate) -> None:
    gate.open.clear()
    with ThreadPoolExecutor() as pool, durable.http() as other:
        first = pool.submit(post, http, "d", temperature=1.0)
        wait_for(lambda: durable.state()["queue"]["running"] == 1)
        second = pool.submit(post, other, "d", temperature=1.0)
        refused = post(other, "d", temperature=0.5)
        gate.open.set()
        assert first.result(60).content == second.result(60).content
    assert refused.status_code == 422
    assert durable.state()["queue"] == {"waiting": 0, "running": 0, "dead": 0}


def test_many_at_once_with_one_key_run_once(http: httpx.Client, durable: Running, gate: Gate) -> None:
    before = gate.steps
    with ThreadPoolExecutor(8) as pool:
        answers = [each.content for each in pool.map(lambda _: post(http, "many", temperature=1.0), range(8))]
    assert len(set(answers)) == 1
    assert gate.steps - before <= 25


def test_a_refused_body_is_not_kept(http: httpx.Client) -> None:
    assert post(http, "e", n=0).status_code == 400
    assert post(http, "e", model="none").status_code == 404
    assert post(http, "e").status_code == 200


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb"])
def test_a_bad_key_is_refused(http: httpx.Client, key: str) -> None:
    refused = post(http, key)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "Idempotency-Key"


def events_of(text: str) -> list[tuple[int | None, str]]:
    """Return (id, data) of each server-sent event."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = block.split("\n")
        number = int(lines.pop(0)[4:]) if lines[0].startswith("id: ") else None
        assert len(lines) == 1 and lines[0].startswith("data: ")
        found.append((number, lines[0][6:]))
    return found


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("s1", {"max_tokens": 30, "stream_options": {"include_usage": True}}),
        ("s2", {"n": 2, "seed": 3, "temperature": 1.0}),
        ("s3", {"logprobs": 1, "stop": ["e"], "max_tokens": 40, "seed": 1, "temperature": 1.0}),
    ],
)
def test_a_stream_goes_on_behind_any_event(http: httpx.Client, key: str, given: dict[str, Any]) -> None:
    whole = post(http, key, stream=True, **given).text
    events = events_of(whole)
    assert events[-1] == (None, "[DONE]")
    numbers = [number for number, _ in events if number is not None]
    assert numbers == sorted(set(numbers))
    assert len(numbers) > 5
    for last in (numbers[0], numbers[3], numbers[-1]):
        rest = post(http, key, last, stream=True, **given).text
        position = [number for number, _ in events].index(last)
        assert events_of(rest) == events[position + 1 :]
    assert post(http, key, stream=True, **given).text == whole
    request = events[0][1].split('"id":"')[1].split('"')[0]
    assert http.get(f"/zoo/requests/{request}/events").text == whole
    assert http.get(f"/zoo/requests/{request}").json()["state"] == "done"


def test_a_chat_stream_opens_once(http: httpx.Client) -> None:
    given = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 12}
    whole = events_of(post(http, "s4", route="chat/completions", **given).text)
    assert '"role":"assistant"' in whole[0][1]
    assert whole[0][0] is None
    again = events_of(post(http, "s4", whole[2][0], route="chat/completions", **given).text)
    assert again == whole[3:]


def test_a_running_stream_is_followed_from_any_event_after_its_client_has_left(
    http: httpx.Client, durable: Running, gate: Gate
) -> None:
    given = body(stream=True, max_tokens=40, ignore_eos=True)
    headers = {"Idempotency-Key": "leaves"}
    with durable.http() as other, other.stream("POST", "/v1/completions", json=given, headers=headers) as first:
        seen = ""
        for piece in first.iter_text():
            seen += piece
            if seen.count("\n\n") >= 3:
                gate.open.clear()
                break
    seen = seen[: seen.rindex("\n\n") + 2]
    last = events_of(seen)[-1][0]
    with ThreadPoolExecutor() as pool:
        rest = pool.submit(post, http, "leaves", last, **given)
        gate.open.set()
        joined = seen + rest.result(60).text
    assert joined == post(http, "leaves", **given).text
    assert events_of(joined)[-1] == (None, "[DONE]")


@pytest.mark.parametrize("last", ["x", "-1", "1.5", "9" * 19])
def test_a_bad_last_event_id_is_refused(http: httpx.Client, last: str) -> None:
    headers = {"Idempotency-Key": "bad-last", "Last-Event-ID": last}
    refused = http.post("/v1/completions", json=body(stream=True), headers=headers)
    assert refused.status_code == 400


def test_delete_aborts(http: httpx.Client, durable: Running, gate: Gate) -> None:
    gate.open.clear()
    with ThreadPoolExecutor() as pool, durable.http() as other:
        waiting = pool.submit(post, http, "gone", max_tokens=50)
        wait_for(lambda: durable.state()["queue"]["running"] == 1)
        wait_for(lambda: durable.driver.state().running + durable.driver.state().waiting == 1)
        request = durable.unfinished()[0]
        assert other.get(f"/zoo/requests/{request}").json()["state"] == "running"
        aborted = other.delete(f"/zoo/requests/{request}")
        gate.open.set()
        assert aborted.json()["state"] == "cancelled"
        assert waiting.result(60).status_code == 409
    assert post(http, "gone", max_tokens=50).json() == aborted.json()["answer"]
    assert http.delete(f"/zoo/requests/{request}").json() == aborted.json()
    wait_for(lambda: durable.driver.state().running == 0)


def test_unknown_requests_are_not_found(http: httpx.Client) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/events")):
        refused = http.request(method, f"/zoo/requests/cmpl-none{path}")
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "request_not_found"


def test_durable_requests_do_not_count_against_the_limit(
    tokenizer: Tokenizer, tmp_path: Path, gate: Gate, http: httpx.Client
) -> None:
    with (
        queued(tokenizer, tmp_path / "q", pace=gate, config=ServerConfig(max_queued=2)) as server,
        server.http() as client,
        ThreadPoolExecutor(8) as pool,
    ):
        answers = list(pool.map(lambda number: post(client, f"k{number}", max_tokens=5 + number), range(8)))
        assert [each.status_code for each in answers] == [200] * 8
        assert [each.json()["usage"]["completion_tokens"] for each in answers] == list(range(5, 13))
        assert server.gate.places_in_use == 0


def test_keys_of_another_principal_are_other_keys(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids = []
    for api_key in ("first", "second", None):
        config = ServerConfig(api_key=api_key)
        with queued(tokenizer, tmp_path / "q", config=config) as server, server.http() as client:
            answer = post(client, "shared", max_tokens=10 + len(ids))
            assert answer.status_code == 200
            for request in ids:
                assert client.get(f"/zoo/requests/{request}").status_code == 404
                assert client.get(f"/zoo/requests/{request}/events").status_code == 404
                assert client.delete(f"/zoo/requests/{request}").status_code == 404
            ids.append(answer.json()["id"])
            assert client.get(f"/zoo/requests/{ids[-1]}").json()["answer"] == answer.json()
    assert len(set(ids)) == 3


def test_all_requests_are_durable_where_that_was_asked_for(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = ServerConfig(durable="all")
    with queued(tokenizer, tmp_path / "q", config=config) as server, server.http() as client:
        answer = post(client, None)
        request = answer.json()["id"]
        assert request == f"cmpl-{answer.headers['x-request-id']}"
        assert client.get(f"/zoo/requests/{request}").json()["answer"] == answer.json()
        streamed = post(client, None, stream=True)
        assert "id: 0\n" in streamed.text
        with server.client() as official:
            text = official.completions.create(model="org/base", prompt=PROMPT, max_tokens=20).choices[0].text
            assert text == answer.json()["choices"][0]["text"]


def test_without_a_queue_there_is_nothing_of_it(tokenizer: Tokenizer) -> None:
    with running(tokenizer) as server, server.http() as client:
        first, second = post(client, "k", temperature=1.0), post(client, "k", temperature=1.0)
        assert first.json()["id"] != second.json()["id"]
        assert "queue" not in server.state()
        assert client.get("/zoo/requests/x").json()["error"]["code"] == "not_found"
        assert "blockzoo:queue" not in client.get("/metrics").text


def test_state_and_metrics_count_what_waits_runs_and_was_given_up(http: httpx.Client, durable: Running) -> None:
    post(http, "counted")
    text = http.get("/metrics").text
    assert 'blockzoo:queue_requests{state="running"} 0.0' in text
    assert 'blockzoo:queue_requests{state="dead"} 0.0' in text
    values = {
        line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line.startswith("blockzoo:queue_")
    }
    assert values["blockzoo:queue_commits_total"] > 2
    assert values["blockzoo:queue_appends_total"] >= 1
    assert 0 < values["blockzoo:queue_commit_seconds_total"] < 60
