"""Aliases set and rolled back over HTTP: as the commands do, with the server's own key, while requests run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.app import main
from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer
from runtime.server.keys import key_book
from runtime.server.openai.route_words import EXAMPLES
from tests.runtime.server.aliases.looking import following, points_to, shown, stored
from tests.runtime.server.harness import Running, eventually, running
from zoo.aliases import set_alias
from zoo.keys import make_key
from zoo.store import Store

CONFIG = ServerConfig(api_key="own", client_keys=True)


@pytest.fixture
def credit() -> int:
    return 1


@pytest.fixture
def served(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Running, Store, httpx.Client]]:
    monkeypatch.setattr(key_book, "PAUSE", 0.05)
    with following(tokenizer, tmp_path / "store", config=CONFIG) as (server, store), server.http() as http:
        yield server, store, http


@pytest.fixture(scope="module")
def unchanged(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, Store, httpx.Client]]:
    """A server whose one alias stays as it is."""
    root = tmp_path_factory.mktemp("unchanged") / "store"
    with following(tokenizer, root, config=CONFIG) as (server, store), server.http() as http:
        set_alias(store, "live", "org/base")
        yield server, store, http


def command(capsys: pytest.CaptureFixture[str], store: Path, *arguments: str) -> Any:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--store", str(store), "--json"])
    assert not ended.value.code
    return json.loads(capsys.readouterr().out)


def models(row: dict[str, Any]) -> list[tuple[str, int]]:
    return [(target["model"], target["share"]) for target in row["targets"]]


def test_an_alias_is_set_and_rolled_back(
    served: tuple[Running, Store, httpx.Client], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, http = served
    first = http.post("/zoo/aliases", json={"name": "prod", "target": "base"}).raise_for_status().json()
    assert (first["alias"], first["act"], models(first), first["before"]) == ("prod", "set", [("org/base", 100)], None)
    assert points_to(http, ["org/base"])
    mixed = http.post("/zoo/aliases", json={"name": "prod", "target": "org/base:90,fine:10"}).json()
    assert models(mixed) == [("org/base", 90), ("org/fine", 10)] and points_to(http, ["org/base", "org/fine"])
    asked = {"model": "prod", "prompt": [5, 6], "max_tokens": 2}
    assert http.post("/v1/completions", json=asked).json()["model"] in ("org/base", "org/fine")
    back = http.post("/zoo/aliases/rollback", json={"name": "prod"}).raise_for_status().json()
    assert (back["act"], models(back)) == ("rollback", [("org/base", 100)]) and points_to(http, ["org/base"])
    assert http.post("/v1/completions", json=asked).json()["model"] == "org/base"
    # The commands, which share the catalogue, see and say the same.
    assert command(capsys, tmp_path / "store", "alias", "prod") == back
    changes = command(capsys, tmp_path / "store", "alias", "prod", "--history")["changes"]
    assert [(each["act"], models(each)) for each in changes] == [
        ("rollback", [("org/base", 100)]), ("set", models(mixed)), ("set", [("org/base", 100)])
    ]  # fmt: skip
    page = http.get("/ui/models/org/fine")
    assert "prod" in page.text


def test_the_examples_are_taken(served: tuple[Running, Store, httpx.Client]) -> None:
    _, store, http = served
    set_alias(store, "prod", "org/base")
    example = EXAMPLES["POST /zoo/aliases"]
    assert http.post("/zoo/aliases", json={**example, "target": "org/fine"}).json()["before"][0]["model"] == "org/base"
    back = http.post("/zoo/aliases/rollback", json=EXAMPLES["POST /zoo/aliases/rollback"])
    assert models(back.raise_for_status().json()) == [("org/base", 100)]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("", {"name": "prod", "target": "org/none"}, 404),
        ("", {"name": "prod", "target": "org/"}, 404),
        ("", {"name": "prod", "target": "org/base:90,org/fine:9"}, 400),
        ("", {"name": "prod", "target": "org/base:50,org/base:50"}, 400),
        ("", {"name": "prod", "target": ",".join(["org/base:1"] * 100)}, 400),
        ("", {"name": "prod", "target": "live"}, 400),
        ("", {"name": "org/base", "target": "org/fine"}, 409),
        ("", {"name": "", "target": "org/fine"}, 400),
        ("", {"name": "a\nb", "target": "org/fine"}, 400),
        ("", {"name": "x" * 257, "target": "org/fine"}, 400),
        ("", {"name": "prod", "target": "x" * 8193}, 400),
        ("", {"name": "prod", "target": "x" * 20000}, 413),
        ("", {"name": "prod"}, 400),
        ("", {"name": "prod", "target": ["org/fine"]}, 400),
        ("", {"name": "prod", "target": "org/fine", "expected": -1}, 400),
        ("", {"name": "prod", "target": "org/fine", "expected": 10**30}, 400),
        ("", [], 400),
        ("/rollback", {"name": "none"}, 404),
        ("/rollback", {"name": "live"}, 400),
        ("/rollback", {"name": 5}, 400),
        ("/rollback", {}, 400),
    ],
)
def test_what_the_commands_refuse_is_refused(
    unchanged: tuple[Running, Store, httpx.Client], path: str, body: Any, status: int
) -> None:
    _, store, http = unchanged
    refused = http.post(f"/zoo/aliases{path}", json=body)
    assert refused.status_code == status and refused.json()["error"]["message"], refused.text
    with store.catalog.reading() as reader:
        assert [(alias.name, alias.targets[0].model) for alias in reader.aliases()] == [("live", "org/base")]


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[" * 10_000])
def test_bodies_that_are_no_sound_json(unchanged: tuple[Running, Store, httpx.Client], raw: bytes) -> None:
    for path in ("/zoo/aliases", "/zoo/aliases/rollback"):
        assert unchanged[2].post(path, content=raw).status_code == 400


def test_a_change_that_was_decided_on_another_state_is_refused(served: tuple[Running, Store, httpx.Client]) -> None:
    _, _, http = served
    asked = {"name": "prod", "target": "org/base", "expected": 0}
    first = http.post("/zoo/aliases", json=asked).raise_for_status().json()
    late = http.post("/zoo/aliases", json={**asked, "target": "org/fine"})
    assert (late.status_code, late.json()["error"]["code"]) == (409, "in_use")
    assert points_to(http, ["org/base"]) and shown(http)["change"] == first["change"]
    done = http.post("/zoo/aliases", json={"name": "prod", "target": "org/fine", "expected": first["change"]})
    assert done.status_code == 200 and points_to(http, ["org/fine"])


def test_only_the_servers_own_key_changes_aliases(
    served: tuple[Running, Store, httpx.Client], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    server, store, _ = served
    secret = make_key(store, "team")

    def refused(headers: dict[str, str], address: str = server.address) -> set[int]:
        with httpx.Client(base_url=address, headers=headers, timeout=20, trust_env=False) as http:
            bodies = {"": {"name": "prod", "target": "org/base"}, "/rollback": {"name": "prod"}}
            return {http.post(f"/zoo/aliases{path}", json=body).status_code for path, body in bodies.items()}

    assert refused({}) == refused({"Authorization": "Bearer wrong"}) == {401}
    assert eventually(lambda: refused({"Authorization": f"Bearer {secret}"}) == {403})
    with stored(tmp_path / "other") as open_store, running(tokenizer, store=open_store) as without_a_key:
        assert refused({}, without_a_key.address) == {403}
    with running(tokenizer, config=ServerConfig(api_key="own")) as without_a_store:
        assert refused({"Authorization": "Bearer own"}, without_a_store.address) == {403}
    with store.catalog.reading() as reader:
        assert reader.aliases() == []
