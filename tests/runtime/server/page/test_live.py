"""The live view: the state as HTML and as a stream, its bounds, and its cost."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer
from runtime.server.page.views import live
from tests.runtime.server.harness import Running, eventually, running
from tests.runtime.server.page.looking import HOSTILE, Element, parsed, seen
from zoo.store import Store


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "INTERVAL", 0.05)
        yield


def events(http: httpx.Client) -> Generator[Element, None, None]:
    """Yield the states of a stream, as a browser joins their lines. Fails if it lasts for more than 60 s."""
    end = time.monotonic() + 60
    with http.stream("GET", "/ui/live/events") as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines: list[str] = []
        for line in response.iter_lines():
            assert time.monotonic() < end
            if line.startswith("data: "):
                lines.append(line.removeprefix("data: "))
            elif lines and not line:
                yield parsed("\n".join(lines))
                lines = []


def figures(page: Element) -> dict[str, str]:
    return {each.one("dt").text: each.one("dd").text for each in page.all("div", class_="figure")}


def test_a_server_with_durable_requests_is_shown(tokenizer: Tokenizer, stored: Store, tmp_path: Path) -> None:
    with running(tokenizer, store=stored, queue=str(tmp_path / "queue")) as server, server.http() as http:
        assert "0 waiting; durable: 0 running, 0 given up." in seen(http, "/ui/live").text


def test_the_state_is_there_without_a_script(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"model": "org/base", "prompt": "hi", "max_tokens": 3}).raise_for_status()
    assert eventually(lambda: int(figures(seen(http, "/ui/live"))["tokens in all"]) >= 3)
    shown = seen(http, "/ui/live").one("div", id="live")
    assert shown.attributes["data-events"] == "/ui/live/events"
    assert figures(shown)["running"] == "0"
    tables = {each.attributes["aria-label"]: each.one("tbody") for each in shown.all("div", class_="scroll")}
    (device,) = tables["Devices"].all("tr")
    cells = [cell.text for cell in device.all("td")]
    assert cells[:2] == ["up", "both"] and cells[3] == "0 / 512"
    assert {each.text for each in tables["Blocks and queues"].all("th")} == {"shared", "own-base", "own-fine"}
    assert [each.text for each in tables["Models"].all("th")] == ["org/base", "org/fine"]


def test_a_stream_follows_what_runs(tokenizer: Tokenizer, stored: Store) -> None:
    slow = running(tokenizer, store=stored, pace=lambda _: time.sleep(0.02))
    with slow as server, server.http() as http, server.client() as client:
        states = events(http)
        assert figures(next(states))["running"] == "0"
        stream = client.completions.create(model="org/base", prompt="hi", max_tokens=200, stream=True)
        assert any(figures(state)["running"] == "1" for state in states)
        rates = [figures(state)["tokens/s"] for state, _ in zip(states, range(5), strict=False)]
        assert any(float(rate.replace(",", "")) > 1 for rate in rates if rate != "–")
        stream.close()
        assert any(figures(state)["running"] == "0" for state in states)


def test_streams_are_bounded_and_end_with_their_browsers(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_STREAMS", 2)
    with server.http() as http:
        with ExitStack() as stack:
            for _ in range(2):
                states = events(stack.enter_context(server.http()))
                stack.callback(states.close)
                next(states)
            with http.stream("GET", "/ui/live/events") as refused:
                assert refused.status_code == 503 and b'"unavailable"' in refused.read()
            assert http.get("/ui/live").status_code == 200
        assert eventually(lambda: _opens(server))


def test_a_stream_ends_when_the_server_stops(tokenizer: Tokenizer, stored: Store) -> None:
    with running(tokenizer, store=stored) as server, server.http() as http:
        states = events(http)
        next(states)
        server.gate.closed = True
        assert len(list(states)) <= 1


def test_many_browsers_cost_as_much_as_one(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "INTERVAL", 60.0)
    taken: list[float] = []
    state_document = live.state_document

    def counted(service: Any) -> dict[str, Any]:
        taken.append(time.monotonic())
        return state_document(service)

    monkeypatch.setattr(live, "state_document", counted)

    def look(_: int) -> int:
        with server.http() as http:
            return http.get("/ui/live").status_code

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(look, range(16))) == {200}
    assert len(taken) <= 1


def test_a_stream_needs_the_key(tokenizer: Tokenizer, stored: Store) -> None:
    with running(tokenizer, store=stored, config=ServerConfig(api_key="k")) as server:
        with httpx.Client(base_url=server.address, trust_env=False) as http:
            assert http.get("/ui/live/events").status_code == 303
        with server.http() as http:
            assert figures(next(events(http)))


def test_a_clusters_loans_moves_and_plans_are_shown_as_text(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name in the state may hold markup: devices, blocks, models, sequences."""
    state_document = live.state_document

    def busy(service: Any) -> dict[str, Any]:
        state = state_document(service)
        agent = {**state["agents"][0], "id": HOSTILE, "alive": False}
        agent["instances"] = [{"block": HOSTILE, "queue": 3, "batch": 2, "batch_limit": 8}]
        agent["pages"] = {"capacity": 100, "free": 40, "local": 30, "lent": 20, "reserved": 10, "in_flight": 0}
        device = {
            "device": HOSTILE, "lent": {HOSTILE: 20}, "loading": [], "weights": 5, "weights_limit": 9, "sequences": 1,
            "queued": 1, "tokens": 7,
        }  # fmt: skip
        move = {"seq": HOSTILE, "source": HOSTILE, "target": "b", "tokens": 1234, "stage": 2, "held": True}
        group = {"model": HOSTILE, "priority": 1, "waiting": 4, "due": 1.0, "first_end": 2.0, "last_end": 3.0}
        return {
            **state,
            "agents": [agent],
            "models": [{"name": HOSTILE, "running": 1, "waiting": 0}],
            "cluster": {
                "devices": [device], "migrations": [move], "starved": 2,
                "migration_totals": {"committed": 5, "aborted": 1, "copied": 9, "recomputed": 0},
            },
            "queue": {"plan": HOSTILE, "waiting": 4, "groups": [group], "planned": None},
        }  # fmt: skip

    monkeypatch.setattr(live, "state_document", busy)
    with server.http() as http:
        assert eventually(lambda: "Loans" in seen(http, "/ui/live").text)
        shown = seen(http, "/ui/live").one("div", id="live")
    assert not shown.all("script") and not shown.all("b")
    tables = {each.attributes["aria-label"]: each for each in shown.all("div", class_="scroll")}
    assert [cell.text for cell in tables["Loans"].one("tbody").all("td")] == [HOSTILE, "20"]
    assert [cell.text for cell in tables["Moves"].one("tbody").all("td")] == [HOSTILE, "b", "1,234", "2 (held)"]
    assert [cell.text for cell in tables["Plan"].one("tbody").all("td")] == ["1", "4", "1.0", "2.0", "3.0"]
    assert len(tables["Plan"].all("td", class_="error")) == 1
    assert [cell.text for cell in tables["Blocks and queues"].one("tbody").all("td")] == [HOSTILE, "3", "2", "8"]
    widths = {
        each.attributes["class"]: float(each.attributes["width"])
        for each in tables["Devices"].one("svg", class_="bar").all("rect")
    }
    assert widths == {"free": 160, "pages-local": 48, "pages-lent": 32, "pages-reserved": 16}


def _opens(server: Running) -> bool:
    with server.http() as http, http.stream("GET", "/ui/live/events") as response:
        return response.status_code == 200
