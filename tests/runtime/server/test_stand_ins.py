"""Adaptive requests may be served by a low-rank delta, which the answer names; all other requests get their model."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace

import pytest

from runtime.chains import Rewriting
from runtime.frontend.tokenizer import Tokenizer
from runtime.policy.profiles import BlockProfile, Grid, Line
from runtime.types import ModelSpec, SamplingParams
from tests.runtime.cluster.whole import answer, chain_of
from tests.runtime.server.harness import BASE, FINE, SPARE, eventually, running

PROMPT = "def hello"
#: FINE may answer for BASE. SPARE may answer for FINE, but is not served.
DELTAS = {FINE.name: Rewriting(BASE.name, 0.9), SPARE.name: Rewriting(FINE.name, 0.9)}


@pytest.mark.parametrize(
    ("asks", "adaptive", "served"),
    [("org/base", True, FINE), ("org/base", False, BASE), ("org/base", None, BASE), ("org/fine", True, FINE)],
)
@pytest.mark.parametrize("chat", [False, True])
def test_only_adaptive_requests_are_served_by_the_delta(tokenizer: Tokenizer, asks, adaptive, served, chat) -> None:
    body = {"model": asks, "max_tokens": 6, "adaptive": adaptive, "return_token_ids": True}
    route, prompt = (
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        if chat
        else ("completions", {"prompt": PROMPT})
    )
    with running(tokenizer, deltas=DELTAS) as server, server.http() as client:
        said = client.post(f"/v1/{route}", json={**body, **prompt}).json()
        counted = server.state()["counters"]["adapted"]
        metrics = client.get("/metrics").text
    instead = served.name if served.name != asks else None
    assert said["model"] == asks and said.get("served_by") == instead
    assert counted == (instead is not None)
    assert f'vllm:prompt_tokens_total{{model_name="{asks}"}} {said["usage"]["prompt_tokens"]}' in metrics
    if not chat:
        assert said["choices"][0]["token_ids"] == answer(served, tokenizer.encode(PROMPT), SamplingParams(max_tokens=6))


def test_a_delta_answers_as_long_as_it_is_served_and_the_nearest_one_first(tokenizer: Tokenizer) -> None:
    body = {"model": BASE.name, "prompt": PROMPT, "max_tokens": 2, "adaptive": True}
    deltas = {FINE.name: Rewriting(BASE.name, 0.9), SPARE.name: Rewriting(BASE.name, 0.95)}
    with running(tokenizer, deltas=deltas) as server, server.http() as client:

        def asked() -> str | None:
            return client.post("/v1/completions", json=body).json().get("served_by")

        assert asked() == FINE.name
        assert client.post(f"/zoo/models/{SPARE.name}/load").status_code == 200
        assert asked() == SPARE.name
        for name, then in ((SPARE.name, FINE.name), (FINE.name, None)):
            assert client.post(f"/zoo/models/{name}/unload").status_code == 200
            assert asked() == then


def test_streams_name_the_delta_in_the_last_chunk_of_a_choice(tokenizer: Tokenizer) -> None:
    body = {"model": BASE.name, "prompt": PROMPT, "max_tokens": 3, "adaptive": True, "stream": True}
    with running(tokenizer, deltas=DELTAS) as server, server.http() as client:
        lines = client.post("/v1/completions", json=body).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert {chunk["model"] for chunk in chunks} == {BASE.name}
    assert [chunk.get("served_by") for chunk in chunks] == [None] * (len(chunks) - 1) + [FINE.name]


def profile(spec: ModelSpec, seconds: float) -> BlockProfile:
    """Return a profile of its chain with a constant cost per step, for any number of rows."""
    return BlockProfile(chain_of(spec).version, 1, Grid((1,), (1,), ((seconds,),)), Line((1,), (1.0,)), 0.0)


def events(client) -> list[dict]:
    told = [json.loads(line) for line in client.get("/zoo/trace").text.splitlines()]
    return [event for event in told if event["ev"].startswith("dispatch.")]


@pytest.mark.parametrize(("exact", "delta", "served"), [(1.0, 2.0, BASE), (2.0, 1.0, FINE), (1.0, 1.0, BASE)])
def test_with_profiles_the_policy_decides_and_the_trace_tells_why(tokenizer: Tokenizer, exact, delta, served) -> None:
    profiles = [profile(BASE, exact), profile(FINE, delta)]
    body = {"model": BASE.name, "prompt": PROMPT, "max_tokens": 2, "adaptive": True}
    with running(tokenizer, deltas=DELTAS, profiles=profiles, trace=True) as server, server.http() as client:
        said = client.post("/v1/completions", json=body).json()
        plain = client.post("/v1/completions", json={**body, "adaptive": False}).json()
        candidates, chosen = events(client)
    assert said["model"] == plain["model"] == BASE.name and "served_by" not in plain
    assert said.get("served_by") == (FINE.name if served is FINE else None)
    assert (candidates["ev"], chosen["ev"]) == ("dispatch.candidates", "dispatch.choose")
    assert candidates["cause"] == chosen["cause"] == "BL-28" and candidates["req"] == chosen["req"] == said["id"]
    assert chosen["asked"] == BASE.name and chosen["model"] == served.name
    totals = {
        each["model"]: each["queue"] + each["compute"] + each["transfer"] + each["load"]
        for each in candidates["candidates"]
    }
    assert totals == {BASE.name: exact, FINE.name: delta} and totals[served.name] == min(totals.values())


def test_without_profiles_of_both_the_delta_is_taken(tokenizer: Tokenizer) -> None:
    body = {"model": BASE.name, "prompt": PROMPT, "max_tokens": 2, "adaptive": True}
    with (
        running(tokenizer, deltas=DELTAS, profiles=[profile(BASE, 1e-9)], trace=True) as server,
        server.http() as client,
    ):
        assert client.post("/v1/completions", json=body).json()["served_by"] == FINE.name
        _, chosen = events(client)
    assert (chosen["ev"], chosen["model"]) == ("dispatch.choose", FINE.name)


def test_what_runs_already_counts(tokenizer: Tokenizer) -> None:
    """A batch of a model with the same base runs: the delta joins it; alone the exact model would be chosen."""
    kin = replace(FINE, kind="delta", base="org/root")
    root = replace(BASE, name="org/root")
    exact = replace(SPARE, name="org/exact", kind="full", base="org/root")
    body = {"model": exact.name, "prompt": PROMPT, "max_tokens": 2, "adaptive": True}
    with (
        running(
            tokenizer,
            specs=(root, kin, exact),
            deltas={kin.name: Rewriting(exact.name, 0.9)},
            profiles=[profile(exact, 1.0), profile(kin, 1.5)],
            trace=True,
            known=(root, kin, exact),
            pace=lambda step: time.sleep(0.02),
        ) as server,
        server.http() as client,
    ):
        kept = {"model": root.name, "prompt": PROMPT, "max_tokens": 100, "ignore_eos": True}
        long = threading.Thread(target=lambda: client.post("/v1/completions", json=kept))
        long.start()
        assert eventually(lambda: server.state()["running"] == 1)
        client.post("/v1/completions", json=body)
        assert long.is_alive()
        long.join()
        client.post("/v1/completions", json=body)
        told = [event["model"] for event in events(client) if event["ev"] == "dispatch.choose"]
    assert told == [kin.name, exact.name]
