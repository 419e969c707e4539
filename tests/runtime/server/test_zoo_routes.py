"""The server's own routes: models, state, metrics, trace, loading and unloading."""

from __future__ import annotations

import json

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer
from tests.runtime.server.harness import Running, running
from zoo.errors import InUse

ASK = {"model": "org/base", "prompt": "hello", "max_tokens": 5}


def samples(server: Running) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with server.http() as http:
        families = text_string_to_metric_families(http.get("/metrics").text)
        return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def test_models_as_openai_lists_them(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["org/base", "org/fine"]
    fine = client.models.retrieve("org/fine")
    assert (
        fine.object == "model"
        and fine.created == 1_700_000_000
        and fine.max_model_len == 256
        and fine.parent == "org/base"
    )
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/spare")


def test_the_stores_models_and_which_are_served(server: Running) -> None:
    with server.http() as http:
        rows = http.get("/zoo/models").json()["models"]
    assert {row["name"]: row["loaded"] for row in rows} == {"org/base": True, "org/fine": True, "org/spare": False}


def test_state_has_the_contracts_fields(server: Running) -> None:
    state = server.state()
    (agent,) = state["agents"]
    assert agent["device"] == "fake" and agent["pid"] > 0 and agent["id"]
    assert {instance["block"] for instance in agent["instances"]} == {"shared", "own-base", "own-fine"}
    assert {"block", "queue", "batch_limit"} <= set(agent["instances"][0])
    pages = agent["pages"]
    assert pages["capacity"] == sum(pages[name] for name in ("free", "local", "lent", "reserved", "in_flight"))
    assert [model["name"] for model in state["models"]] == ["org/base", "org/fine"]
    assert state["running"] == state["waiting"] == 0
    assert state["memory"] == agent["memory"] and state["counters"] == agent["counters"]
    assert agent["memory"]["weights"] < agent["memory"]["weights_unshared"]


def test_metrics_count_what_happened(tokenizer: Tokenizer, credit: int) -> None:
    with running(tokenizer, credit=credit) as server, server.client() as client:
        prompt = len(tokenizer.encode("hello"))
        client.completions.create(**ASK, n=2)
        list(client.completions.create(**{**ASK, "model": "org/fine"}, stream=True))
        found = samples(server)

        def value(name: str, **labels: str) -> float:
            return found[name, frozenset(labels.items())]

        assert value("vllm:prompt_tokens_total", model_name="org/base") == prompt
        assert value("vllm:generation_tokens_total", model_name="org/base") == 10
        assert value("vllm:generation_tokens_total", model_name="org/fine") == 5
        assert value("vllm:request_success_total", model_name="org/base", finished_reason="length") == 2
        assert value("vllm:time_to_first_token_seconds_count", model_name="org/base") == 2
        assert value("vllm:e2e_request_latency_seconds_count", model_name="org/fine") == 1
        assert value("vllm:request_prompt_tokens_sum", model_name="org/base") == prompt
        assert value("vllm:num_requests_running", model_name="org/base") == 0
        assert value("vllm:num_requests_waiting", model_name="org/base") == 0
        assert value("vllm:kv_cache_usage_perc", model_name="org/base") == 0
        assert value("vllm:num_preemptions_total") == 0
        assert value("blockzoo:pages", device="fake", state="free") == 512
        assert value("blockzoo:weight_bytes", device="fake") == 3000
        assert value("blockzoo:weight_bytes_unshared", device="fake") == 4000
        assert value("blockzoo:block_batch_size", block="shared") == 0
        assert value("blockzoo:steps_total") > 0


def test_trace_is_json_lines(server: Running, client: openai.OpenAI) -> None:
    client.completions.create(**ASK)
    with server.http() as http:
        lines = http.get("/zoo/trace").text.splitlines()
        events = [json.loads(line)["ev"] for line in lines]
        assert {"arrive", "batch.insert", "segment.run", "token", "finish", "model.load"} <= set(events)
        assert len(http.get("/zoo/trace?limit=3").text.splitlines()) == 3
        assert http.get("/zoo/trace?limit=x").status_code == 400


def test_trace_off_says_so(tokenizer: Tokenizer, credit: int) -> None:
    with running(tokenizer, credit=credit) as server, server.http() as http:
        assert http.get("/zoo/trace").json()["error"]["code"] == "trace_off"


def test_load_serve_unload(tokenizer: Tokenizer, credit: int) -> None:
    with (
        running(tokenizer, credit=credit, config=ServerConfig(api_key="k")) as server,
        server.client() as client,
        server.http() as http,
    ):
        with pytest.raises(openai.NotFoundError):
            client.completions.create(**{**ASK, "model": "org/spare"})
        assert http.post("/zoo/models/org/spare/load").json()["id"] == "org/spare"
        assert http.post("/zoo/models/spare/load").status_code == 200
        assert client.completions.create(**{**ASK, "model": "spare"}).usage.completion_tokens == 5
        assert http.post("/zoo/models/org/spare/unload").json() == {"unloaded": "org/spare"}
        with pytest.raises(openai.NotFoundError):
            client.completions.create(**{**ASK, "model": "org/spare"})
        assert http.post("/zoo/models/org/spare/unload").status_code == 404
        assert http.post("/zoo/models/nobody/load").json()["error"]["code"] == "model_not_found"
        assert http.post("/zoo/models/org/load").status_code == 404
        assert client.completions.create(**ASK).usage.completion_tokens == 5


def test_what_could_not_be_unloaded_is_listed_if_it_is_served_still(
    tokenizer: Tokenizer, credit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tokenizer, credit=credit) as server, server.http() as http:
        unload, listed = server.driver.unload, lambda: {model["id"] for model in http.get("/v1/models").json()["data"]}
        assert http.post("/zoo/models/org/spare/load").status_code == 200

        def late(name: str) -> None:
            raise InUse("sequences of it still run")

        monkeypatch.setattr(server.driver, "unload", late)
        assert http.post("/zoo/models/org/spare/unload").status_code == 409 and "org/spare" in listed()

        def gone(name: str) -> None:
            unload(name)
            raise InUse("sequences of it still run, and it cannot be served again")

        monkeypatch.setattr(server.driver, "unload", gone)
        assert http.post("/zoo/models/org/spare/unload").status_code == 409 and "org/spare" not in listed()


def test_every_answer_has_a_name_of_its_own(server: Running) -> None:
    with server.http() as http:
        names = {http.get(path).headers["x-request-id"] for path in ("/health", "/nothing", "/v1/models")}
    assert len(names) == 3
