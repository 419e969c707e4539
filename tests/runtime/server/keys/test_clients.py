"""Clients with keys of their own: what each may ask for, see and use, through HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer
from runtime.server.keys import key_book
from tests.runtime.server.aliases.looking import stored
from tests.runtime.server.harness import Running, eventually, running
from zoo.aliases import set_alias
from zoo.keys import make_key
from zoo.store import Store

OWN = "the-server's-own"
CONFIG = ServerConfig(api_key=OWN, client_keys=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_book, "PAUSE", 0.05)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with stored(tmp_path / "store") as store:
        yield store


@contextmanager
def served(tokenizer: Tokenizer, store: Store, **options: Any) -> Iterator[Running]:
    with running(tokenizer, store=store, config=CONFIG, **options) as server:
        yield server


def client(server: Running, secret: str, header: str = "authorization") -> httpx.Client:
    given = f"Bearer {secret}" if header == "authorization" else secret
    return httpx.Client(base_url=server.address, headers={header: given}, timeout=60, trust_env=False)


def ask(http: httpx.Client, **changes: Any) -> httpx.Response:
    body = {"model": "org/base", "prompt": "one two", "max_tokens": 4, **changes}
    return http.post("/v1/completions", json=body)


def usage(store: Store, name: str) -> tuple[int, int, int]:
    with store.catalog.reading() as reader:
        found = [each for each in reader.key_usage("2000-01-01") if each.name == name]
    return (
        sum(each.requests for each in found),
        sum(each.prompt_tokens for each in found),
        sum(each.generated_tokens for each in found),
    )


def test_a_key_is_known_soon_after_it_is_made_and_refused_soon_after_it_is_revoked(
    tokenizer: Tokenizer, store: Store
) -> None:
    with served(tokenizer, store) as server:
        secret = make_key(store, "team")
        for header in ("authorization", "x-api-key"):
            with client(server, secret, header) as http:
                assert eventually(lambda http=http: ask(http).status_code == 200)
        for wrong in (secret[:-1], secret + "x", "-", OWN + "x", secret.upper()):
            with client(server, wrong) as http:
                assert ask(http).status_code == 401
        with store.catalog.writing() as writer:
            writer.revoke_key("team")
        with client(server, secret) as http:
            assert eventually(lambda: ask(http).status_code == 401)
        again = make_key(store, "team")
        with client(server, again) as http:
            assert eventually(lambda: ask(http).status_code == 200)


def test_without_the_option_keys_of_clients_are_not_taken(tokenizer: Tokenizer, store: Store) -> None:
    secret = make_key(store, "team")
    with running(tokenizer, store=store, config=ServerConfig(api_key=OWN)) as server, client(server, secret) as http:
        time.sleep(0.2)
        assert ask(http).status_code == 401


def test_a_client_reaches_what_answers_it_and_nothing_else(tokenizer: Tokenizer, store: Store, tmp_path: Path) -> None:
    secret = make_key(store, "team")
    with served(tokenizer, store, queue=str(tmp_path / "queue")) as server, client(server, secret) as http:
        routes = {
            (path, verb.upper()) for path, item in http.get("/openapi.json").json()["paths"].items() for verb in item
        }
        closed = set()
        for path, verb in routes:
            answer = http.request(verb, path.replace("{id}", "x").replace("{name}", "x"), follow_redirects=False)
            assert answer.status_code != 401 or path == "/ui/login", path
            if answer.status_code == 403:
                assert answer.json()["error"]["code"] == "server_key_needed"
                closed.add(path)
        assert {
            "/metrics",
            "/zoo/state",
            "/zoo/models",
            "/zoo/models/{name}/load",
            "/zoo/requests/{id}/pause",
        } <= closed
        assert not [path for path in closed if path.startswith("/v1/") or path in ("/health", "/live", "/tokenize")]
        assert all(path in closed for path, _ in routes if path.startswith("/zoo/") and path != "/zoo/requests/{id}")
        for path in ("/", "/ui/models/org/base", "/v1/../zoo/state", "//zoo/state", "/zoo/requests/a/b", "/nothing"):
            assert http.get(path, follow_redirects=False).status_code in (303, 403, 404), path
        assert http.get("/", follow_redirects=False).status_code in (303, 403)
        with server.http() as own:
            assert own.get("/zoo/state").status_code == own.get("/metrics").status_code == 200


def test_a_key_names_its_models_and_aliases_alone(tokenizer: Tokenizer, store: Store) -> None:
    set_alias(store, "prod", "org/base")
    set_alias(store, "mixed", "org/base:50,org/fine:50")
    one, alias = make_key(store, "one", ["org/base"]), make_key(store, "alias", ["prod"])
    both = make_key(store, "both", ["org/base", "org/fine"])
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    message = {**chat, "max_tokens": 2}
    with served(tokenizer, store) as server:
        with client(server, one) as http:
            assert eventually(lambda: ask(http, model="prod").status_code == 200)  # it stands for org/base alone
            assert ask(http).status_code == ask(http, model="base").status_code == 200
            refused = [ask(http, model=name) for name in ("org/fine", "fine", "mixed", "org/none")]
            refused += [
                http.post("/v1/chat/completions", json={"model": "org/fine", **chat}),
                http.post("/v1/messages", json={"model": "org/fine", **message}),
                http.post("/v1/responses", json={"model": "org/fine", "input": "hi"}),
                http.post("/v1/embeddings", json={"model": "org/fine", "input": "hi"}),
                http.post("/tokenize", json={"model": "org/fine", "prompt": "hi"}),
                http.post("/detokenize", json={"model": "org/fine", "tokens": [5]}),
                http.post("/v1/messages/count_tokens", json={"model": "org/fine", **message}),
                http.get("/v1/models/org/fine"),
                http.get("/v1/models/mixed"),
            ]
            assert [answer.status_code for answer in refused] == [404] * len(refused)
            texts = {
                answer.json()["error"]["message"].replace("org/none", "X").replace("org/fine", "X")
                for answer in refused
            }
            assert len([text for text in texts if "`X`" in text]) == 1, "which models there are must not show"
            assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["org/base"]
        with client(server, alias) as http:
            assert ask(http, model="prod").status_code == 200 and ask(http).status_code == 404
            assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["prod"]
        with client(server, both) as http:
            assert ask(http, model="mixed").status_code == 200
        with server.http() as http:
            assert ask(http, model="org/fine").status_code == 200


def test_a_rate_bounds_requests_on_every_generating_route(tokenizer: Tokenizer, store: Store) -> None:
    secret = make_key(store, "slow", requests_per_minute=3)
    chat = {"model": "org/base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with served(tokenizer, store) as server, client(server, secret) as http:
        assert ask(http).status_code == 200
        assert http.post("/v1/chat/completions", json=chat).status_code == 200
        assert http.post("/v1/messages", json=chat).status_code == 200
        late = [
            ask(http),
            http.post("/v1/chat/completions", json=chat),
            http.post("/v1/messages", json=chat),
            http.post("/v1/embeddings", json={"model": "org/base", "input": "x"}),
            http.post("/v1/responses", json={"model": "org/base", "input": "x"}),
        ]
        assert [answer.status_code for answer in late] == [429] * 5
        assert 1 <= int(late[0].headers["retry-after"]) <= 20
        with server.http() as own:
            assert ask(own).status_code == 200
            text = own.get("/metrics").text
        assert 'blockzoo:key_requests_total{key="slow"} 3.0' in text
        assert 'blockzoo:key_refused_total{key="slow"} 5.0' in text


def test_a_rate_bounds_durable_requests_and_batches_but_not_their_clients_return(
    tokenizer: Tokenizer, store: Store, tmp_path: Path
) -> None:
    secret = make_key(store, "slow", requests_per_minute=2)
    body = {"model": "org/base", "prompt": "x", "max_tokens": 3}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    with served(tokenizer, store, queue=str(tmp_path / "queue")) as server, client(server, secret) as http:
        file = http.post("/v1/files", files={"file": ("a.jsonl", json.dumps(line))}, data={"purpose": "batch"}).json()
        order = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        assert http.post("/v1/batches", json=order).status_code == 200

        def keyed(key: str) -> httpx.Response:
            return http.post("/v1/completions", json=body, headers={"Idempotency-Key": key})

        assert [keyed("one").status_code for _ in range(4)] == [200] * 4
        assert keyed("two").status_code == http.post("/v1/batches", json=order).status_code == 429
        assert http.post("/v1/responses", json={"model": "org/base", "input": "x"}).status_code == 429


def test_tokens_of_a_day_bound_a_key_over_restarts(tokenizer: Tokenizer, store: Store) -> None:
    secret = make_key(store, "small", tokens_per_day=20)
    with served(tokenizer, store) as server, client(server, secret) as http:
        used = [ask(http).json()["usage"] for _ in range(2)]
        prompt, generated = (sum(each[name] for each in used) for name in ("prompt_tokens", "completion_tokens"))
        assert eventually(lambda: usage(store, "small") == (2, prompt, generated))
        while prompt + generated < 20:
            one = ask(http).json()["usage"]
            prompt, generated = prompt + one["prompt_tokens"], generated + one["completion_tokens"]
        refused = ask(http)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "insufficient_quota"
    assert usage(store, "small")[1:] == (prompt, generated)  # what was not recorded yet is at the end
    with served(tokenizer, store) as server, client(server, secret) as http:
        assert ask(http).status_code == 429
        with server.http() as own:
            assert ask(own).status_code == 200


def test_streams_and_left_requests_are_counted(tokenizer: Tokenizer, store: Store) -> None:
    secret = make_key(store, "team")
    with served(tokenizer, store, pace=lambda _: time.sleep(0.02)) as server, client(server, secret) as http:
        body = {"model": "org/base", "prompt": [5, 6, 7], "max_tokens": 200, "stream": True, "n": 2}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            while "text" not in next(lines):
                pass
        assert eventually(lambda: usage(store, "team")[0] == 1 and usage(store, "team")[2] > 0)
        _, prompt, generated = usage(store, "team")
        assert prompt == 3 and 0 < generated < 400


def test_priority_and_prefixes_are_the_keys_own(tokenizer: Tokenizer, store: Store) -> None:
    late, soon = make_key(store, "late", priority=7), make_key(store, "soon")
    seen: list[tuple[int, str]] = []
    with served(tokenizer, store) as server:
        opened = server.driver.open_stream

        def watched(sequences: Any) -> Any:
            seen.extend((each.priority, each.tenant) for each in sequences)
            return opened(sequences)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.driver, "open_stream", watched)
            for secret in (late, soon, OWN):
                with client(server, secret) as http:
                    for asked in ({}, {"priority": -5}, {"priority": 9}, {"cache_salt": "x"}):
                        assert ask(http, **asked).status_code == 200
    priorities, tenants = [each for each, _ in seen], [each for _, each in seen]
    assert priorities == [7, 7, 9, 7, 0, 0, 9, 0, 0, -5, 9, 0]
    own = [tenants[0], tenants[3], tenants[4], tenants[7], tenants[8], tenants[11]]
    assert tenants[8] == "" and len(set(own)) == 6


def test_what_is_kept_belongs_to_its_key(tokenizer: Tokenizer, store: Store, tmp_path: Path) -> None:
    one, two = make_key(store, "one"), make_key(store, "two", ["org/base"])
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "org/base", "prompt": "x"}}
    ]
    text = "\n".join(map(json.dumps, lines)).encode()
    with served(tokenizer, store, queue=str(tmp_path / "queue")) as server:
        with client(server, one) as first, client(server, two) as second, server.http() as own:
            kept = first.post("/v1/responses", json={"model": "org/base", "input": "x", "max_output_tokens": 3}).json()[
                "id"
            ]
            keyed = first.post(
                "/v1/completions",
                json={"model": "org/base", "prompt": "x", "max_tokens": 3},
                headers={"Idempotency-Key": "k"},
            ).json()["id"]
            file = first.post("/v1/files", files={"file": ("a.jsonl", text)}, data={"purpose": "batch"}).json()["id"]
            order = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
            assert second.post("/v1/batches", json=order).status_code == 404
            batch = first.post("/v1/batches", json=order).json()["id"]
            paths = [f"/v1/responses/{kept}", f"/zoo/requests/{keyed}", f"/v1/files/{file}", f"/v1/batches/{batch}"]
            assert [first.get(path).status_code for path in paths] == [200] * 4
            for http in (second, own):
                assert [http.get(path).status_code for path in paths] == [404] * 4
                assert http.get("/v1/files").json()["data"] == http.get("/v1/batches").json()["data"] == []
                following = {"model": "org/base", "input": "y", "previous_response_id": kept}
                assert http.post("/v1/responses", json=following).status_code in (400, 404)
            again = {"model": "org/base", "prompt": "x", "max_tokens": 3}
            other = second.post("/v1/completions", json=again, headers={"Idempotency-Key": "k"})
            assert other.status_code == 200 and other.json()["id"] != keyed
            assert eventually(lambda: first.get(f"/v1/batches/{batch}").json()["status"] == "completed")
        assert eventually(lambda: usage(store, "one")[2] >= 3 + 3 + 1 and usage(store, "two")[2] == 3)
