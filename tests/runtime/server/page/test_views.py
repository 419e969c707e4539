"""The views of the catalogue, as HTML from a running server."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from runtime.frontend.tokenizer import Tokenizer
from runtime.server.page import reading
from runtime.server.page.app import build_page_app
from tests.runtime.server.harness import Running, eventually, running
from tests.runtime.server.page.looking import HOSTILE, Element, family, made, seen
from zoo.catalog import ModelSummary, Reader
from zoo.manifest import ChainBlock, block_digest
from zoo.store import Store


def rows(page: Element) -> dict[str, list[str]]:
    """Return name -> the texts of the other cells, of the table of models."""
    table = page.one("table", class_="models")
    return {row.one("th").one("a").text: [cell.text for cell in row.all("td")] for row in table.one("tbody").all("tr")}


def test_the_list_has_every_model_with_what_it_shares(http: httpx.Client) -> None:
    page = seen(http, "/")
    found = rows(page)
    assert list(found) == sorted(["org/base", "org/fine", "org/twin", "org/lora", HOSTILE])
    #                         kind, base, family, params, blocks, size, own
    assert found["org/base"][:7] == ["foundation", "", "llama", "300", "1", "300 B", "100 B"]
    assert found["org/fine"][:7] == ["full", "org/base", "llama", "300", "1", "300 B", "0 B"]
    assert found["org/twin"][6] == "100 B"
    assert found["org/lora"][:7] == ["lora", "org/fine", "llama", "310", "1", "310 B", "10 B"]
    figures = {each.one("dt").text: each.one("dd").text for each in page.all("div", class_="figure")}
    # Distinct: 300 of the base, 100 each of two fine-tunes, 10 of the adapter, 100 of the last one.
    assert figures == {
        "models": "5",
        "as separate files": "1.3 kB",
        "distinct tensors": "610 B",
        "saved by sharing": "53%",
    }
    served = {row.one("th").one("a").text for row in page.one("tbody").all("tr") if row.all("span", class_="served")}
    assert served == {"org/base", "org/fine"}


def test_the_list_is_filtered_and_sorted(http: httpx.Client) -> None:
    assert list(rows(seen(http, "/?q=ORG/&sort=own"))) == ["org/base", "org/twin", "org/lora", "org/fine"]
    assert list(rows(seen(http, "/?q=lora"))) == ["org/lora"]
    beyond = seen(http, "/?page=2")
    assert not beyond.all("table") and "There is no page 2." in beyond.one("main").text
    nothing = seen(http, "/?q=not-like-it")
    assert not nothing.all("table") and "No model has this in its name." in nothing.one("main").text
    assert [each.attributes["href"] for each in nothing.one("main").all("a")] == ["/"]
    for query in ("sort=x", "page=0", "page=-1", "page=1e3", "page=9999999", "page=²", f"q={'x' * 201}"):
        assert seen(http, f"/?{query}", 400).all("p", class_="error")
    assert seen(http, "/?q=x%22%3E%3Cscript").one("input", id="q").attributes["value"] == 'x"><script'


def test_many_models_are_cut_into_pages(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.server.page.listing.ROWS", 2)
    with family(tmp_path / "store") as store, running(tokenizer, store=store) as server, server.http() as http:
        names = [*rows(seen(http, "/")), *rows(seen(http, "/?page=2")), *rows(seen(http, "/?page=3"))]
        assert names == sorted(names) and len(names) == 5
        assert seen(http, "/").one("a", rel="next").attributes["href"] == "/?q=&sort=name&page=2"


def test_sizes_are_read_before_the_first_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a page without a server; its first request reads none."""
    reads, models = list[int](), Reader.models

    def counted(reader: Reader) -> list[ModelSummary]:
        reads.append(1)
        return models(reader)

    monkeypatch.setattr(Reader, "models", counted)
    with (
        family(tmp_path / "store") as store,
        TestClient(build_page_app(store, None, alone=True), base_url="http://localhost") as http,
    ):
        eventually(lambda: bool(reads))
        assert "org/base" in http.get("/").text
        assert reads == [1]


def test_every_link_leads_to_a_view(http: httpx.Client) -> None:
    waiting, visited = ["/"], set[str]()
    while waiting:
        path = waiting.pop()
        visited.add(path)
        page = seen(http, path)
        ids = {each.attributes["id"] for each in page if "id" in each.attributes}
        for link in page.all("a"):
            target = link.attributes["href"]
            if target.startswith("#"):
                assert target[1:] in ids
            elif target == "/openapi.json":  # a document, to which the page of the interface leads
                assert http.get(target).json()["openapi"].startswith("3.1")
            elif target not in visited and "sort=" not in target:
                waiting.append(target)
    assert len([path for path in visited if path.startswith("/ui/models/")]) == 5


def test_what_a_name_holds_is_text(http: httpx.Client) -> None:
    """Names come from folders and hubs: markup, quotes, braces of templates in them are shown, never meant."""
    for path in ("/", "/ui/lineage"):
        page = seen(http, path)
        (link,) = [each for each in page.one("main").all("a") if each.text.startswith("x")]
        assert "{{ 7*7 }}" in link.text and not page.all("b") and not link.all("script")
        view = seen(http, link.attributes["href"])
        assert view.one("h1").text.startswith(HOSTILE) and not view.one("main").all("script")
        assert view.one("head").one("title").text == f"{HOSTILE} · Block Zoo"


def test_the_lineage_is_a_tree(http: httpx.Client) -> None:
    drawing = seen(http, "/ui/lineage").one("svg", class_="tree")
    nodes = drawing.all("a")
    assert [node.one("text").text.split(" · ")[0] for node in nodes][:4] == [
        "org/base",
        "org/fine",
        "org/lora",
        "org/twin",
    ]
    across = [float(node.one("circle").attributes["cx"]) for node in nodes]
    assert across[0] < across[1] < across[2] and across[3] == across[1] and across[4] == across[0]
    assert len(drawing.all("path", class_="branch")) == 3
    assert nodes[1].attributes["href"] == "/ui/models/org/fine"


def test_a_chain_is_coloured_by_the_models_that_share_it(http: httpx.Client) -> None:
    page = seen(http, "/ui/models/org/fine")
    cells = page.one("svg", class_="strip").all("rect")
    # The first is adapted in the LoRA, so three models have it as it is; the second is in all four; the third in two.
    assert [cell.attributes["class"] for cell in cells] == ["part share-1", "part share-2", "part share-3"]
    legend = [item.text for item in page.one("ul", class_="legend").all("li")]
    assert legend[1] == "in 3 models: org/base, org/fine, org/twin"
    assert "in 4 models" in legend[2] and "in 2 models" in legend[3]
    table = {row.attributes["id"]: row for row in page.all("tr") if row.attributes.get("id", "").startswith("part-")}
    assert list(table) == ["part-0", "part-1", "part-2"]
    digest = table["part-2"].one("code").attributes["title"]
    assert len(digest) == 64 and digest in cells[2].one("title").text
    assert table["part-2"].text.endswith("2 models: org/fine, org/lora")
    twin = seen(http, "/ui/models/org/twin").one("svg", class_="strip").all("rect")
    assert twin[2].attributes["class"] == "part share-0"
    lora = seen(http, "/ui/models/org/lora")
    assert len(lora.one("svg", class_="strip").all("circle", class_="adapter")) == 1


def test_a_model_is_found_by_the_end_of_its_name(http: httpx.Client) -> None:
    assert seen(http, "/ui/models/twin").one("h1").text.startswith("org/twin")
    assert "did you mean" in seen(http, "/ui/models/org/bass", 404).one("p", class_="error").text
    assert seen(http, "/ui/models/" + "x" * 3000, 404)


def test_the_list_follows_the_store(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with family(tmp_path / "store") as store, running(tokenizer, store=store) as server, server.http() as http:
        assert rows(seen(http, "/"))["org/twin"][6] == "100 B"
        made(store, "org/heir", [1, 2, 5], "full", "org/twin")
        after = rows(seen(http, "/"))
        assert len(after) == 6 and after["org/twin"][6] == "0 B"
        with store.catalog.writing() as writer:
            parts = writer.component_digests(["org/heir"])["org/heir"]
            writer.set_chain(
                "org/heir", [ChainBlock(block_digest(parts[:2]), 0, 2), ChainBlock(block_digest(parts[2:]), 2, 3)]
            )
        assert rows(seen(http, "/"))["org/heir"][4] == "2"


def test_reads_wait_apart_from_the_event_loop_and_are_bounded(
    tokenizer: Tokenizer, stored: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While every thread of the page is held up, the server answers all else; what would wait too long is refused."""
    monkeypatch.setattr(reading, "MOST_READS", 3)
    held, entries = threading.Event(), Reader.entries

    def slow(reader: Reader) -> object:
        assert held.wait(20)
        return entries(reader)

    monkeypatch.setattr(Reader, "entries", slow)
    with running(tokenizer, store=stored) as server, server.http() as http, ThreadPoolExecutor(5) as threads:
        asked = [threads.submit(lambda: _status(server, "/ui/lineage")) for _ in range(5)]
        assert eventually(lambda: sum(each.done() for each in asked) == 2)
        assert http.get("/ui/lineage").headers["retry-after"] == "1"
        assert http.get("/health").status_code == 200
        answer = http.post("/v1/completions", json={"model": "org/base", "prompt": "hi", "max_tokens": 2})
        assert answer.status_code == 200
        held.set()
        assert sorted(each.result() for each in asked) == [200, 200, 200, 503, 503]
        assert http.get("/ui/lineage").status_code == 200


def _status(server: Running, path: str) -> int:
    with server.http() as http:
        return http.get(path).status_code
