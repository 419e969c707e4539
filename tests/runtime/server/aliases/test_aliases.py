"""A server answers for the aliases of its store, and follows them: switches, models to load, what it cannot load."""

from __future__ import annotations

import json
import time
from pathlib import Path

import openai
import pytest

from runtime.config import ServerConfig
from runtime.frontend.served_models import StoredModel
from runtime.frontend.tokenizer import Tokenizer
from runtime.server.aliases import follower
from runtime.types import SamplingParams
from tests.runtime.cluster.whole import answer
from tests.runtime.server.aliases.looking import following, points_to, shown
from tests.runtime.server.harness import BASE, FINE, SPARE, eventually
from tests.runtime.server.test_zoo_routes import samples
from zoo.aliases import set_alias

SPECS = {spec.name: spec for spec in (BASE, FINE, SPARE)}
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def credit() -> int:
    return 1


def asked(client: openai.OpenAI, model: str = "prod", **more: object) -> str:
    """Return the model that answers, after checking that the answer is that model's own."""
    done = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=8, temperature=0, extra_body={"return_token_ids": True, **more}
    )
    assert done.choices[0].token_ids == answer(SPECS[done.model], PROMPT, SamplingParams(max_tokens=8))
    return done.model


def test_an_alias_is_a_model_of_every_route(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with following(tokenizer, tmp_path, "org/fine") as (server, _), server.client() as client, server.http() as http:
        assert [model.id for model in client.models.list()] == ["org/base", "org/fine", "prod"]
        card = http.get("/v1/models/prod").json()
        assert (card["id"], card["root"], card["parent"], card["max_model_len"]) == (
            "prod",
            "org/fine",
            "org/base",
            256,
        )
        assert card["created"] > 1_700_000_000
        assert asked(client) == "org/fine"
        turns = [{"role": "user", "content": "hi"}]
        chat = {"model": "prod", "messages": turns, "max_tokens": 4}
        assert http.post("/v1/chat/completions", json=chat).json()["model"] == "org/fine"
        assert http.post("/v1/messages", json=chat).json()["model"] == "org/fine"
        assert http.post("/v1/responses", json={"model": "prod", "input": "hi"}).json()["model"] == "org/fine"
        assert http.post("/tokenize", json={"model": "prod", "prompt": "hi"}).json()["count"] > 0
        assert http.post("/v1/messages/count_tokens", json=chat).status_code == 200
        whole = client.completions.create(model="prod", prompt="hi", max_tokens=6, stream=True)
        assert {chunk.model for chunk in whole} == {"org/fine"}
        counted = samples(server)[
            "blockzoo:alias_requests_total", frozenset({("alias", "prod"), ("model_name", "org/fine")})
        ]
        assert counted == 5


def test_the_key_guards_the_list(tokenizer: Tokenizer, tmp_path: Path) -> None:
    key = ServerConfig(api_key="k3y")
    with following(tokenizer, tmp_path, "base", config=key) as (server, _), server.http() as http:
        assert shown(http)["targets"] == [{"model": "org/base", "share": 100}]
        assert http.get("/zoo/aliases", headers={"Authorization": "Bearer other"}).status_code == 401
        assert http.put("/zoo/aliases").status_code == 405


def test_a_running_server_follows_every_change(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with following(tokenizer, tmp_path) as (server, store), server.client() as client, server.http() as http:
        with pytest.raises(openai.NotFoundError):
            asked(client)
        set_alias(store, "prod", "org/base")
        assert points_to(http, ["org/base"]) and asked(client) == "org/base"
        set_alias(store, "prod", "org/fine")
        assert points_to(http, ["org/fine"]) and asked(client) == "org/fine"
        with store.catalog.writing() as writer:
            writer.roll_back("prod")
        begun = time.monotonic()
        assert points_to(http, ["org/base"], seconds=1.0) and asked(client) == "org/base"
        assert time.monotonic() - begun < 1.0
        with store.catalog.writing() as writer:
            writer.delete_alias("prod")
        assert eventually(lambda: not shown(http))
        with pytest.raises(openai.NotFoundError):
            asked(client)
        assert "prod" not in {model.id for model in client.models.list()}


def test_a_change_waits_for_its_model_and_the_answers_do_not(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with following(tokenizer, tmp_path, "base") as (server, store), server.client() as client, server.http() as http:
        load = server.driver.load

        def slow(name: str) -> object:
            time.sleep(1.0)
            return load(name)

        monkeypatch.setattr(server.driver, "load", slow)
        set_alias(store, "prod", "org/spare")
        assert eventually(lambda: bool(shown(http)["wanted"]))
        assert shown(http)["wanted"]["targets"] == [{"model": "org/spare", "share": 100}]
        assert asked(client) == "org/base"
        assert points_to(http, ["org/spare"]) and asked(client) == "org/spare"
        assert shown(http)["error"] is None


def test_what_cannot_be_loaded_leaves_the_alias_as_it_is(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with following(tokenizer, tmp_path, "base") as (server, store), server.client() as client, server.http() as http:
        load, tried = server.driver.load, []

        def broken(name: str) -> object:
            tried.append(name)
            raise RuntimeError("no memory is left")

        monkeypatch.setattr(server.driver, "load", broken)
        set_alias(store, "prod", "org/spare")
        assert eventually(lambda: shown(http)["error"] == "no memory is left")
        time.sleep(4 * follower.PAUSE)
        assert tried == ["org/spare"] and asked(client) == "org/base"
        set_alias(store, "prod", "org/fine")
        assert points_to(http, ["org/fine"]) and asked(client) == "org/fine"
        monkeypatch.setattr(server.driver, "load", load)
        set_alias(store, "prod", "org/spare")
        assert points_to(http, ["org/spare"]) and asked(client) == "org/spare"


def test_an_alias_of_what_is_not_served_is_none_until_it_is(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with following(tokenizer, tmp_path, "spare") as (server, _), server.client() as client, server.http() as http:
        assert shown(http)["targets"] is None and "prod" not in {model.id for model in client.models.list()}
        assert http.post("/zoo/models/org/spare/load").status_code == 200
        assert points_to(http, ["org/spare"]) and asked(client) == "org/spare"


def test_what_an_alias_points_to_is_not_unloaded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with following(tokenizer, tmp_path, "fine") as (server, store), server.client() as client, server.http() as http:
        for name in ("org/fine", "prod"):
            refused = http.post(f"/zoo/models/{name}/unload")
            assert refused.status_code == 409 and "alias prod points to it" in refused.json()["error"]["message"]
        assert asked(client) == "org/fine"
        set_alias(store, "prod", "base")
        assert points_to(http, ["org/base"])
        assert http.post("/zoo/models/org/fine/unload").json() == {"unloaded": "org/fine"}
        with store.catalog.writing() as writer:
            writer.roll_back("prod")
        assert points_to(http, ["org/fine"]) and asked(client) == "org/fine"


def test_a_served_models_name_comes_before_an_alias(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with following(tokenizer, tmp_path, "fine") as (server, store), server.client() as client, server.http() as http:
        with store.catalog.writing() as writer:
            writer.remove_model("org/spare")
        assert http.post("/zoo/models/org/spare/load").status_code == 200  # the harness has it still
        set_alias(store, "org/spare", "fine")
        assert eventually(lambda: bool(shown(http, "org/spare")))
        assert asked(client, "org/spare") == "org/spare"
        assert [model.id for model in client.models.list()] == ["org/base", "org/fine", "org/spare", "prod"]


def test_models_on_demand_are_loaded_by_the_first_request_or_before_a_switch(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    waiting = (StoredModel("org/spare", "org/base"),)
    with (
        following(tokenizer, tmp_path, "spare", on_demand=waiting) as (server, store),
        server.client() as client,
        server.http() as http,
    ):
        assert http.get("/v1/models/prod").json()["max_model_len"] is None
        assert not server.service.models.has("org/spare")
        assert asked(client) == "org/spare"
        assert http.get("/v1/models/prod").json()["max_model_len"] == 256
        set_alias(store, "prod", "base")
        assert points_to(http, ["org/base"])
        assert http.post("/zoo/models/org/spare/unload").status_code == 200
        set_alias(store, "prod", "spare")
        assert points_to(http, ["org/spare"]) and server.service.models.has("org/spare")


def test_a_durable_request_keeps_the_model_it_was_accepted_for(tokenizer: Tokenizer, tmp_path: Path) -> None:
    body = {"model": "prod", "prompt": PROMPT, "max_tokens": 60, "return_token_ids": True, "temperature": 0}
    queue, key = str(tmp_path / "queue"), {"Idempotency-Key": "one"}
    pace = lambda _: time.sleep(0.02)  # noqa: E731
    with following(tokenizer, tmp_path / "store", "base", queue=queue, pace=pace) as (server, _):
        with (
            server.http() as http,
            http.stream("POST", "/v1/completions", json={**body, "stream": True}, headers=key) as got,
        ):
            lines = (line for line in got.iter_lines() if line.startswith("data:"))
            first = [json.loads(next(lines)[5:]) for _ in range(5)]
        assert {chunk["model"] for chunk in first} == {"org/base"}
    with following(tokenizer, tmp_path / "other", "fine", queue=queue) as (server, _), server.http() as http:
        done = http.post("/v1/completions", json={**body, "stream": True}, headers=key)
        chunks = [json.loads(line[5:]) for line in done.text.splitlines() if line.startswith("data: {")]
    assert {chunk["model"] for chunk in chunks} == {"org/base"}
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert tokens == answer(BASE, PROMPT, SamplingParams(max_tokens=60))


def test_a_catalogue_that_cannot_be_read_leaves_the_aliases_as_they_are(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with following(tokenizer, tmp_path, "base") as (server, store), server.client() as client, server.http() as http:
        reading = type(store.catalog).reading

        def broken(catalog: object) -> object:
            raise OSError("the disk is gone")

        monkeypatch.setattr(type(store.catalog), "reading", broken)
        time.sleep(3 * follower.PAUSE)
        assert asked(client) == "org/base" and shown(http)["wanted"] is None
        monkeypatch.setattr(type(store.catalog), "reading", reading)
        set_alias(store, "prod", "fine")
        assert points_to(http, ["org/fine"])
