"""Two models side by side over HTTP: what is identical, what was scored, how far the weights are apart."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest

from runtime.frontend.tokenizer import Tokenizer
from runtime.server.page import distances
from tests.runtime.server.harness import running
from tests.runtime.server.page.looking import HOSTILE, Element, family, seen
from tests.zoo.factory import Bytes, manifest_of
from zoo.objects.objects import ObjectStore
from zoo.packed.pack import pack
from zoo.records import Equivalence, ScoredRun
from zoo.store import Store

MARKED = {"X-Zoo-Page": "1"}


def put_floats(store: Store, name: str, tensors: Sequence[tuple[str, bytes]]) -> None:
    """Put a model of one component per tensor: (dtype, bytes)."""
    width = {"F32": 4, "BF16": 2, "F16": 2, "BOOL": 1}
    with store.ingesting():
        sources = [Bytes(data, dtype, (len(data) // width[dtype],)) for dtype, data in tensors]
        metas = [put.tensor for put in store.objects.put_many(sources)]
        header, side = store.blobs.put(name.encode()), store.blobs.put(b"{}")
        with store.catalog.writing() as writer:
            writer.put_model(manifest_of(name, metas, "full", None, header, side))


def bf16(*values: float) -> bytes:
    """Return values that have an exact form in bfloat16."""
    return b"".join(struct.pack("<f", value)[2:] for value in values)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with family(tmp_path_factory.mktemp("compare") / "store") as store:
        f32 = np.arange(1, 5, dtype="<f4")
        put_floats(store, "x/a", [("F32", f32.tobytes()), ("F32", b"\0" * 16), ("BF16", bf16(3, 4)), ("BOOL", b"\1\0")])
        put_floats(store, "x/b", [("F32", f32.tobytes()), ("F32", b"\0\0\x80?" * 4), ("F32", struct.pack("<2f", 3, 1)),
                                  ("BOOL", b"\0\1")])  # fmt: skip
        with store.catalog.writing() as writer:
            pair = ScoredRun("org/fine", 0, 2), ScoredRun("org/twin", 0, 2)
            writer.put_equivalences([Equivalence("equivalent", *pair, "e" * 64, 0.98765, 0.1234)])
            other = ScoredRun("org/fine", 0, 2), ScoredRun("org/base", 0, 2)
            writer.put_equivalences([Equivalence("equivalent", *other, "f" * 64, 0.5)])
        yield store


def measured(http: httpx.Client, a: str, b: str) -> httpx.Response:
    return http.post("/ui/compare/distances", params={"a": a, "b": b}, headers=MARKED)


def body(page: Element, label: str) -> list[list[str]]:
    (table,) = [each for each in page.all("div", class_="scroll") if each.attributes.get("aria-label") == label]
    return [[cell.text for cell in row if cell.tag in ("th", "td")] for row in table.one("tbody").all("tr")]


def test_identical_components_are_named_and_coloured(http: httpx.Client) -> None:
    page = seen(http, "/ui/compare?a=fine&b=org/twin")
    assert [row[1] for row in body(page, "Components")] == ["identical", "identical", "differs"]
    for drawing in page.all("svg", class_="strip"):
        assert [cell.attributes["class"][-1] for cell in drawing.all("rect")] == ["1", "1", "0"]
    figures = {each.one("dt").text: each.one("dd").text for each in page.all("div", class_="figure")}
    assert figures == {"identical components": "2 of 3", "differ": "1", "tensors in both": "200 B"}
    adapted = body(seen(http, "/ui/compare?a=org/fine&b=org/lora"), "Components")
    assert [row[1] for row in adapted] == ["by an adapter", "identical", "identical"]
    lone = body(seen(http, "/ui/compare?" + str(httpx.QueryParams(a="org/fine", b=HOSTILE))), "Components")
    assert [row[1] for row in lone] == ["differs", "in one only", "in one only"]


def test_what_was_scored_between_them_has_its_control(http: httpx.Client) -> None:
    for query, runs in (("a=org/fine&b=org/twin", ["A", "B"]), ("a=org/twin&b=org/fine", ["B", "A"])):
        assert body(seen(http, f"/ui/compare?{query}"), "Similarity") == [
            ["equivalent", *(f"{side} 0 to 1" for side in runs), "0.9877", "0.1234", "e" * 12]
        ]
    assert body(seen(http, "/ui/compare?a=org/fine&b=org/base"), "Similarity")[0][4] == "not measured"
    assert "Nothing was scored" in seen(http, "/ui/compare?a=org/base&b=org/twin").text


def test_the_form_offers_all_models_and_errors_are_said(http: httpx.Client) -> None:
    page = seen(http, "/ui/compare")
    assert HOSTILE in [each.attributes["value"] for each in page.one("datalist").all("option")]
    wrong = seen(http, "/ui/compare?a=org/nix&b=org/fine", 404)
    assert "no model 'org/nix'" in wrong.one("p", id="wrong").text and not wrong.all("table")
    assert [wrong.one("input", id=each).attributes["value"] for each in "ab"] == ["org/nix", "org/fine"]
    assert seen(http, f"/ui/compare?a={'x' * 256}", 400)
    assert not seen(http, "/ui/compare?a=org/fine").all("table")


def test_distances_of_weights(http: httpx.Client) -> None:
    found = measured(http, "x/a", "x/b").raise_for_status().json()
    # The same; from nothing but zeros there is no relative distance; (3, 4) to (3, 1) in two dtypes; no numbers.
    assert found == {"distances": [0.0, None, pytest.approx(3 / 5), None], "share": 1.0}
    assert measured(http, "x/b", "x/a").json()["distances"][1] == pytest.approx(1.0)
    page = seen(http, "/ui/compare?a=x/a&b=x/b")
    assert len([cell for cell in page.all("td") if "data-pair" in cell.attributes]) == len(found["distances"])
    assert page.one("button", id="measure").attributes["data-from"] == "/ui/compare/distances?a=x%2Fa&b=x%2Fb"


def test_distances_need_the_header_and_two_models(http: httpx.Client) -> None:
    refused = http.post("/ui/compare/distances", params={"a": "x/a", "b": "x/b"})
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "header_needed"
    assert measured(http, "x/a", "").status_code == 400 and measured(http, "x/a", "x/nix").status_code == 404
    assert measured(http, "x/a", "x" * 300).status_code == 400


def test_reading_stays_within_the_budget(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, count = np.random.default_rng(0), 1 << 16
    a, b = (rng.standard_normal(count).astype("<f4") for _ in range(2))
    monkeypatch.setattr(distances, "BUDGET_BYTES", 1 << 17)
    monkeypatch.setattr(distances, "_CHUNK", 1 << 13)
    read = 0
    chunks = ObjectStore.read

    def counted(store: ObjectStore, digest: str, size: int) -> Iterator[bytes]:
        nonlocal read
        for chunk in chunks(store, digest, size):
            read += len(chunk)
            yield chunk

    monkeypatch.setattr(ObjectStore, "read", counted)
    with Store.open(tmp_path / "store") as store:
        put_floats(store, "a", [("F32", a.tobytes())])
        put_floats(store, "b", [("F32", b.tobytes())])
        with running(tokenizer, store=store) as server, server.http() as http:
            found = measured(http, "a", "b").raise_for_status().json()
    part = count // 4
    expected = np.linalg.norm((a - b)[:part].astype(float)) / np.linalg.norm(a[:part].astype(float))
    assert found == {"distances": [pytest.approx(expected)], "share": 0.25}
    assert read <= (1 << 17) + 2 * (1 << 13)


def test_packed_weights_are_measured_too(tokenizer: Tokenizer, tmp_path: Path) -> None:
    a = np.linspace(1, 2, 20_000, dtype="<f4")
    b = a.copy()
    b[::50] *= 1.01
    with Store.open(tmp_path / "store") as store:
        put_floats(store, "a", [("F32", a.tobytes())])
        with store.ingesting():
            meta = store.objects.put(Bytes(b.tobytes(), "F32", (len(b),))).tensor
            header, side = store.blobs.put(b"b"), store.blobs.put(b"{}")
            with store.catalog.writing() as writer:
                writer.put_model(manifest_of("b", [meta], "full", "a", header, side))
        pack(store)
        assert not store.objects.path(meta.digest).exists()
        with running(tokenizer, store=store) as server, server.http() as http:
            (found,) = measured(http, "a", "b").raise_for_status().json()["distances"]
    assert found == pytest.approx(np.linalg.norm((a - b).astype(float)) / np.linalg.norm(a.astype(float)), rel=1e-6)
