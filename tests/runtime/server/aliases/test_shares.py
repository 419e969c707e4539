"""An alias of several models: one for each user, the shares, what changes with them, and what is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.frontend.aliases import ServedAlias
from runtime.frontend.tokenizer import Tokenizer
from tests.runtime.server.aliases.looking import following, points_to, shown
from tests.runtime.server.harness import Running
from tests.runtime.server.test_zoo_routes import samples
from zoo.aliases import set_alias
from zoo.records import AliasTarget
from zoo.store import Store

USERS = [f"user-{number}" for number in range(60)]
SHARES = "org/base:70,org/fine:30"


@pytest.fixture(scope="module")
def credit() -> int:
    return 1


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Store]]:
    root = tmp_path_factory.mktemp("shares") / "store"
    with following(tokenizer, root, SHARES) as (server, store):
        yield server, store


@pytest.fixture(scope="module")
def http(shared: tuple[Running, Store]) -> Iterator[httpx.Client]:
    with shared[0].http() as client:
        yield client


def split(*shares: tuple[str, int], name: str = "prod") -> ServedAlias:
    return ServedAlias(name, tuple(AliasTarget(model, share) for model, share in shares))


def asked(http: httpx.Client, path: str = "/v1/completions", **more: Any) -> str:
    body = {"model": "prod", "prompt": "hi", "max_tokens": 1, **more}
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["model"])


def test_each_user_keeps_one_model_and_the_shares_are_kept(shared: tuple[Running, Store], http: httpx.Client) -> None:
    key = frozenset({("alias", "prod"), ("model_name", "org/fine")})
    before = samples(shared[0]).get(("blockzoo:alias_requests_total", key), 0.0)
    first = {user: asked(http, user=user) for user in USERS}
    assert {user: asked(http, user=user) for user in USERS} == first
    found = Counter(first.values())
    assert found.keys() == {"org/base", "org/fine"} and 6 <= found["org/fine"] <= 30, found
    assert samples(shared[0])["blockzoo:alias_requests_total", key] - before == 2 * found["org/fine"]
    assert {target["share"] for target in shown(http)["targets"]} == {70, 30}
    assert http.get("/v1/models/prod").json()["root"] == "org/base"


def test_a_user_has_the_same_model_on_every_route(http: httpx.Client) -> None:
    turns = [{"role": "user", "content": "hi"}]
    for user in USERS[:8]:
        model = asked(http, user=user)
        assert asked(http, safety_identifier=user) == model
        assert asked(http, safety_identifier=user, user="another") == model
        assert asked(http, "/v1/chat/completions", messages=turns, user=user) == model
        assert asked(http, "/v1/messages", messages=turns, metadata={"user_id": user}) == model
        body = {"model": "prod", "input": "hi", "user": user, "max_output_tokens": 1}
        assert http.post("/v1/responses", json=body).json()["model"] == model


def test_requests_without_a_user_are_spread(http: httpx.Client) -> None:
    assert set(Counter(asked(http, user=None) for _ in range(40))) == {"org/base", "org/fine"}
    assert set(Counter(asked(http, user="") for _ in range(40))) == {"org/base", "org/fine"}


@pytest.mark.parametrize("wrong", [{"user": 5}, {"user": "x" * 513}, {"safety_identifier": ["a"]}])
def test_users_are_bounded_texts(http: httpx.Client, wrong: dict[str, Any]) -> None:
    for path, more in (("/v1/completions", {"prompt": "hi"}), ("/v1/embeddings", {"input": "hi"})):
        response = http.post(path, json={"model": "prod", "max_tokens": 1, **more, **wrong})
        assert response.status_code == 400 and response.json()["error"]["param"] == next(iter(wrong))
    turns = [{"role": "user", "content": "hi"}]
    body = {"model": "prod", "messages": turns, "max_tokens": 1, "metadata": {"user_id": next(iter(wrong.values()))}}
    assert http.post("/v1/messages", json=body).status_code == 400


def test_a_growing_share_takes_users_and_returns_none() -> None:
    users = [f"u{number}" for number in range(4000)]
    had: set[str] = set()
    for share in (1, 10, 50, 99):
        alias = split(("a", 100 - share), ("b", share))
        have = {user for user in users if alias.target_for(user) == "b"}
        assert had <= have and abs(len(have) / len(users) - share / 100) < 0.03
        had = have
    assert {split(("a", 50), ("b", 50)).target_for(user) for user in ("", None) for _ in range(60)} == {"a", "b"}


def test_shares_of_two_aliases_are_drawn_apart() -> None:
    one, two = split(("a", 50), ("b", 50)), split(("a", 50), ("b", 50), name="other")
    same = sum(one.target_for(f"u{number}") == two.target_for(f"u{number}") for number in range(2000))
    assert 800 < same < 1200


def test_all_models_of_a_change_are_loaded_before_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with following(tokenizer, tmp_path, "base") as (server, store), server.http() as http:
        set_alias(store, "prod", "org/base:50,org/spare:50")
        assert points_to(http, ["org/base", "org/spare"]) and server.service.models.has("org/spare")
        assert {asked(http, user=user) for user in USERS[:20]} == {"org/base", "org/spare"}
        refused = http.post("/zoo/models/org/spare/unload")
        assert refused.status_code == 409
        with store.catalog.writing() as writer:
            writer.roll_back("prod")
        assert points_to(http, ["org/base"]) and {asked(http, user=user) for user in USERS[:20]} == {"org/base"}
