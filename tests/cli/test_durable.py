"""`zoo serve --queue` is killed while it answers; the next one gives the answers of a server that was not killed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import cli.app
from tests.cli.test_serve import Served, serving

_COMPLETION = {"model": "org/base", "prompt": "def hello", "max_tokens": 150, "ignore_eos": True}
_CHAT = {"model": "org/lora", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 120, "ignore_eos": True}
#: Route and body of requests that are answered equally each time.
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("completions", {**_COMPLETION, "temperature": 0, "stream": True}),
    "seeded": ("completions", {**_COMPLETION, "temperature": 1.0, "seed": 7, "n": 2, "stream": True}),
    "stops": ("completions", {**_COMPLETION, "temperature": 1.0, "seed": 3, "stop": ["zq", "%%"], "max_tokens": 200}),
    "logprobs": ("completions", {**_COMPLETION, "temperature": 0.7, "seed": 5, "logprobs": 2, "max_tokens": 90}),
    "chat": ("chat/completions", {**_CHAT, "temperature": 1.0, "seed": 11, "stream": True}),
    "penalties": ("chat/completions", {**_CHAT, "temperature": 0, "frequency_penalty": 0.5}),
}


@contextlib.contextmanager
def client_of(served: Served) -> Iterator[httpx.Client]:
    headers = {"Authorization": "Bearer k3y"}
    with httpx.Client(base_url=served.address, headers=headers, trust_env=False, timeout=120) as http:
        yield http


def events_of(text: str) -> list[Any]:
    """Return the documents of a stream of server-sent events."""
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def answer_of(http: httpx.Client, name: str, key: str | None) -> Any:
    """Return what a request generated: (text, reason of the end, log-probabilities) of each choice."""
    route, body = REQUESTS[name]
    headers = {} if key is None else {"Idempotency-Key": key}
    response = http.post(f"/v1/{route}", json=body, headers=headers)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        choices = response.json()["choices"]
        return [[_text(each), each["finish_reason"], each["logprobs"]] for each in choices]
    assert response.text.endswith("data: [DONE]\n\n")
    found = [["", None, None] for _ in range(body.get("n", 1))]
    for document in events_of(response.text):
        for each in document["choices"]:
            found[each["index"]][0] += _text(each)
            found[each["index"]][1] = each["finish_reason"] or found[each["index"]][1]
    return found


def _text(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice.get("message", choice.get("delta"))["content"] or ""


def begin(http: httpx.Client, name: str) -> str:
    """Begin a request and leave it once it runs, paused; return what its stream gave."""
    route, body = REQUESTS[name]
    headers = {"Idempotency-Key": name}
    if body.get("stream"):
        with http.stream("POST", f"/v1/{route}", json=body, headers=headers) as response:
            seen = ""
            for piece in response.iter_text():
                seen += piece
                if seen.count("\n\n") >= 3:
                    break
        seen = seen[: seen.rindex("\n\n") + 2]
        http.post(f"/zoo/requests/{events_of(seen)[0]['id']}/pause")
        return seen
    with contextlib.suppress(httpx.TimeoutException):
        http.post(f"/v1/{route}", json=body, headers=headers, timeout=0.5)
    return ""


@pytest.mark.parametrize("options", [(), ("--agents", "2", "--backend", "processes")], ids=["inline", "agents"])
def test_answers_after_a_kill_are_those_without_one(store: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    queue = ("--queue", str(tmp_path / "queue"), *options, "org/base", "org/lora")
    with serving(store, tmp_path / "log-1", *queue) as served, client_of(served) as http:
        expected = {name: answer_of(http, name, None) for name in REQUESTS}
        with ThreadPoolExecutor(len(REQUESTS)) as pool:
            seen = dict(zip(REQUESTS, pool.map(lambda name: begin(http, name), REQUESTS), strict=True))
        served.process.kill()
        served.process.wait(60)
    with serving(store, tmp_path / "log-2", *queue) as served, client_of(served) as http:
        for name, (route, body) in REQUESTS.items():
            assert answer_of(http, name, name) == expected[name], name
            if seen[name]:
                whole = http.post(f"/v1/{route}", json=body, headers={"Idempotency-Key": name}).text
                assert whole.startswith(seen[name])
        assert http.get("/zoo/state").json()["queue"] == {"waiting": 0, "running": 0, "dead": 0}


def test_a_queue_has_one_server(store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")
    for arguments, said in (
        (("--queue", str(tmp_path / "other")), "something else"),
        (("--queue", "mysql://x/y"), "postgresql"),
        (("--durable", "all"), "no effect without a queue"),
        (("--queue", str(tmp_path / "queue"), "--retention-hours", "0"), "positive"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.app.main(["serve", "--store", str(store), "--port", "0", *arguments])
        assert ended.value.code == 2
        assert said in capfd.readouterr().err
