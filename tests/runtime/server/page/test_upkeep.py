"""Verify and collect from the page: who may, one at a time, and what is said of the result."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer
from runtime.server.page import upkeep_job
from tests.runtime.server.harness import eventually, running
from tests.runtime.server.page.looking import family, parsed, seen
from tests.zoo.factory import flip_byte, some_bytes
from zoo.store import Store
from zoo.upkeep.audit import audit

MARKED = {"X-Zoo-Page": "1"}
KEYED = ServerConfig(api_key="k")


def ended(http: httpx.Client) -> str:
    """Wait for the end of the work, and return what is said of it."""

    def state() -> Any:
        return parsed(http.get("/ui/upkeep/state").raise_for_status().text)

    assert eventually(lambda: not [each for each in state() if "data-running" in each.attributes], 20)
    return str(state().text)


def test_a_server_without_a_key_refuses(http: httpx.Client, stored: Store) -> None:
    page = seen(http, "/ui/upkeep")
    assert not page.all("button") and "has no key" in page.text
    for path in ("/ui/upkeep/verify", "/ui/upkeep/gc", "/ui/upkeep/gc?dry_run=1"):
        assert http.post(path, headers=MARKED).json()["error"]["code"] == "key_needed"


def test_each_needs_the_header(tokenizer: Tokenizer, stored: Store) -> None:
    with running(tokenizer, store=stored, config=KEYED) as server, server.http() as http:
        for path in ("/ui/upkeep/verify", "/ui/upkeep/gc"):
            assert http.post(path).json()["error"]["code"] == "header_needed"
            assert http.get(path, headers=MARKED).status_code == 405
        assert ended(http) == ""


def test_the_store_is_verified(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with (
        family(tmp_path / "store") as store,
        running(tokenizer, store=store, config=KEYED) as server,
        server.http() as http,
    ):
        assert http.post("/ui/upkeep/verify", headers=MARKED).status_code == 202
        assert ended(http).endswith("all sound.")
        with store.catalog.reading() as reader:
            tensors = {name: reader.model(name).tensors for name in reader.names()}
        damaged = tensors["org/twin"][2].digest
        flip_byte(store.objects.path(damaged), -1)
        http.post("/ui/upkeep/verify", headers=MARKED).raise_for_status()
        assert "1 damaged" in ended(http) and damaged in ended(http) and "org/twin" in ended(http)
        assert damaged in seen(http, "/ui/upkeep").text


def test_what_no_model_uses_is_counted_then_removed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with family(tmp_path / "store") as store, running(tokenizer, store=store, config=KEYED) as server:
        with store.ingesting():
            left = store.objects.put(some_bytes(1234, 500)).tensor.digest
        with server.http() as http:
            http.post("/ui/upkeep/gc?dry_run=1", headers=MARKED).raise_for_status()
            assert ended(http).startswith("Could be removed: 1 objects") and store.objects.has(left)
            http.post("/ui/upkeep/gc", headers=MARKED).raise_for_status()
            assert ended(http).startswith("Removed: 1 objects") and not store.objects.has(left)
            assert audit(store).damaged == ()


def test_a_busy_store_is_said(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep_job, "_COLLECT_SECONDS", 0.1)
    with (
        family(tmp_path / "store") as store,
        running(tokenizer, store=store, config=KEYED) as server,
        server.http() as http,
        store.keeping(),
    ):
        http.post("/ui/upkeep/gc", headers=MARKED).raise_for_status()
        assert ended(http).startswith("Collecting ended:")


def test_one_at_a_time_and_the_server_ends_all_the_same(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, went_on = threading.Event(), threading.Event()
    checked: list[int] = []

    def slow(store: Store, progress: Any) -> Any:
        def step(done: int, total: int) -> None:
            checked.append(done)
            progress(done, total)
            went_on.set()
            assert held.wait(20)

        return audit(store, step)

    monkeypatch.setattr(upkeep_job, "audit", slow)
    with family(tmp_path / "store") as store:
        with running(tokenizer, store=store, config=KEYED) as server, server.http() as http:
            http.post("/ui/upkeep/verify", headers=MARKED).raise_for_status()
            assert went_on.wait(10) and "1 of" in seen(http, "/ui/upkeep").text
            for path in ("/ui/upkeep/verify", "/ui/upkeep/gc"):
                answer = http.post(path, headers=MARKED)
                assert answer.status_code == 409 and answer.json()["error"]["code"] == "in_use"
            assert http.get("/health").status_code == 200
        held.set()  # the server has ended: the audit ends at its next file, not at its last
        assert eventually(lambda: not any(each.name == "zoo-page-upkeep" for each in threading.enumerate()))
        assert checked == [1, 2]


def test_patterns_show_every_piece(http: httpx.Client) -> None:
    page = seen(http, "/ui/patterns")
    assert page.all("svg", class_="strip") and page.all("svg", class_="tree") and page.all("svg", class_="bar")
    assert {"foundation", "lora", "stitch"} <= {tag.text for tag in page.all("span", class_="tag")}
    assert page.all("progress") and page.all("meter") and page.all("p", class_="error")


def test_the_playground_offers_what_is_served(http: httpx.Client) -> None:
    options = seen(http, "/ui/playground?model=org/fine").one("select", id="models").all("option")
    assert [option.text for option in options] == ["org/base", "org/fine"]
    assert ["selected" in option.attributes for option in options] == [False, True]
    script = http.get(seen(http, "/ui/playground").one("script").attributes["src"])
    assert script.status_code == 200 and script.headers["content-type"].startswith("text/javascript")
