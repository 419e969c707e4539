"""Keys with money to spend: what is counted by which model, at which price, and what is refused once it is spent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from runtime.chains import Rewriting
from runtime.frontend.tokenizer import Tokenizer
from runtime.server.keys import key_book
from tests.runtime.server.aliases.looking import points_to, stored
from tests.runtime.server.harness import eventually
from tests.runtime.server.keys.test_clients import ask, client, served
from zoo.aliases import set_alias
from zoo.keys import make_key, set_price
from zoo.money import amount_of, cost_text, price_of
from zoo.store import Store

CHAT = {"model": "org/base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_book, "PAUSE", 0.05)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with stored(tmp_path / "store") as store:
        yield store


def spent(store: Store, name: str) -> dict[str, tuple[int, int, str]]:
    """Return model -> (answers, tokens, cost) of a key."""
    with store.catalog.reading() as reader:
        found = [each for each in reader.key_usage("2000-01-01") if each.name == name and each.model]
    return {each.model: (each.answers, each.tokens, cost_text(each.cost)) for each in found}


def test_money_of_a_day_bounds_every_generating_route(tokenizer: Tokenizer, store: Store, tmp_path: Path) -> None:
    set_price(store, "org/base", price_of("0.5"), price_of("100"))
    secret = make_key(store, "team", money_per_day=amount_of("0.0004"))
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "org/base", "prompt": "x"}}
    with served(tokenizer, store, queue=str(tmp_path / "queue")) as server, client(server, secret) as http:
        file = http.post("/v1/files", files={"file": ("a.jsonl", json.dumps(line))}, data={"purpose": "batch"}).json()
        used = ask(http).json()["usage"]
        cost = f"0.0004{used['prompt_tokens'] * 5:03}"
        assert used["completion_tokens"] == 4
        assert eventually(lambda: spent(store, "team") == {"org/base": (1, used["total_tokens"], cost.rstrip("0"))})
        order = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        refused = [
            ask(http),
            ask(http, stream=True),
            ask(http, model="org/fine"),  # another model, which is free
            http.post("/v1/completions", json={"model": "org/base", "prompt": "x"}, headers={"Idempotency-Key": "k"}),
            http.post("/v1/chat/completions", json=CHAT),
            http.post("/v1/messages", json=CHAT),
            http.post("/v1/embeddings", json={"model": "org/base", "input": "x"}),
            http.post("/v1/responses", json={"model": "org/base", "input": "x"}),
            http.post("/v1/responses", json={"model": "org/base", "input": "x", "background": True}),
            http.post("/v1/batches", json=order),
        ]
        assert [answer.status_code for answer in refused] == [429] * len(refused)
        error = refused[0].json()["error"]
        assert error["code"] == "insufficient_quota" and "money (0.0004)" in error["message"]
        with server.http() as own:
            assert ask(own).status_code == 200
            metrics = own.get("/metrics").text
    assert f'blockzoo:key_cost_total{{key="team"}} {float(cost)}' in metrics
    assert f'blockzoo:key_refused_total{{key="team"}} {len(refused)}.0' in metrics


def test_what_a_cache_had_is_cheaper_and_is_shown(tokenizer: Tokenizer, store: Store) -> None:
    set_price(store, "org/base", price_of("100"), price_of("0"), price_of("10"))
    secret = make_key(store, "team", money_per_month=amount_of("1"))
    body = {"prompt": list(range(5, 40)), "max_tokens": 2}
    with (
        served(tokenizer, store, sharing="cached") as server,
        client(server, secret) as http,
        server.http() as own,
    ):
        used = [ask(http, **body).json()["usage"] for _ in range(2)]
        assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in used] == [0, 32]
        whole = (2, 74, cost_text(38 * price_of("100") + 32 * price_of("10")))
        assert eventually(lambda: spent(store, "team") == {"org/base": whole})
        metrics = own.get("/metrics").text
    assert 'blockzoo:key_cached_tokens_total{key="team"} 32.0' in metrics
    with store.catalog.reading() as reader:
        (month,) = reader.key_usage_of_month(datetime.now(UTC).date().isoformat()[:7])
    assert (month.requests, month.cached_tokens) == (2, 32)


def test_each_route_and_line_of_a_batch_is_counted_by_its_model(
    tokenizer: Tokenizer, store: Store, tmp_path: Path
) -> None:
    set_price(store, "", price_of("1"), price_of("1"))
    set_price(store, "org/fine", price_of("0"), price_of("0"))
    secret = make_key(store, "team")
    body = {"prompt": [5, 6, 7], "max_tokens": 2}
    lines = [
        {"custom_id": model, "method": "POST", "url": "/v1/completions", "body": {"model": model, **body}}
        for model in ("org/base", "org/fine")
    ]
    text = "\n".join(map(json.dumps, lines))
    with served(tokenizer, store, queue=str(tmp_path / "queue")) as server, client(server, secret) as http:
        used = [
            http.post("/v1/chat/completions", json=CHAT).json()["usage"]["total_tokens"],
            http.post("/v1/embeddings", json={"model": "base", "input": [5, 6]}).json()["usage"]["total_tokens"],
            http.post("/v1/responses", json={"model": "org/base", "input": "x", "max_output_tokens": 3}).json()[
                "usage"
            ]["total_tokens"],
        ]
        file = http.post("/v1/files", files={"file": ("a.jsonl", text)}, data={"purpose": "batch"}).json()["id"]
        order = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = http.post("/v1/batches", json=order).json()["id"]
        assert eventually(lambda: http.get(f"/v1/batches/{batch}").json()["status"] == "completed")
    tokens = sum(used) + 5
    assert spent(store, "team") == {
        "org/base": (4, tokens, cost_text(tokens * 10_000)),
        "org/fine": (1, 5, "0.00"),
    }


def test_an_alias_costs_what_it_stands_for_and_a_stand_in_what_was_asked_for(
    tokenizer: Tokenizer, store: Store
) -> None:
    set_price(store, "org/base", price_of("100"), price_of("100"))
    set_price(store, "org/fine", price_of("1"), price_of("1"))
    set_alias(store, "prod", "org/fine")
    secret = make_key(store, "team")
    body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 2}
    with (
        served(tokenizer, store, deltas={"org/fine": Rewriting("org/base", 0.9)}) as server,
        client(server, secret) as http,
        server.http() as own,
    ):
        assert eventually(lambda: ask(http, model="prod", **body).status_code == 200)
        before = spent_on(store, "org/fine")
        set_alias(store, "prod", "org/base")
        assert points_to(own, ["org/base"])
        assert ask(http, model="prod", **body).status_code == 200
        assert ask(http, adaptive=True, **body).json()["served_by"] == "org/fine"
    assert spent(store, "team") == {"org/fine": before, "org/base": (2, 10, "0.001")}


def spent_on(store: Store, model: str) -> tuple[int, int, str]:
    """Return what was spent on a model, once it is recorded."""
    assert eventually(lambda: model in spent(store, "team"))
    return spent(store, "team")[model]


def test_a_new_price_holds_from_then_on_and_not_before(tokenizer: Tokenizer, store: Store) -> None:
    set_price(store, "org/base", price_of("1"), price_of("1"))
    secret = make_key(store, "team")
    body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 1}
    with served(tokenizer, store) as server, client(server, secret) as http:
        assert ask(http, **body).status_code == 200
        assert spent_on(store, "org/base") == (1, 4, "0.000004")
        set_price(store, "org/base", price_of("1000"), price_of("0"))

        def dearer() -> bool:
            assert ask(http, **body).status_code == 200
            return amount_of(spent_on(store, "org/base")[2]) >= amount_of("0.003")

        assert eventually(dearer)
    answers, _, cost = spent(store, "team")["org/base"]
    assert cost in [cost_text(4 * 10_000 * old + 3 * 10_000_000 * (answers - old)) for old in range(1, answers)]
