"""Adaptive requests may be served by a stand-in, which the answer names; all other requests get their model."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest

from runtime.frontend.tokenizer import Tokenizer
from runtime.policy.profiles import BlockProfile, Grid, Line
from runtime.types import SamplingParams
from tests.runtime.cluster.whole import answer
from tests.runtime.server.harness import BASE, FINE, SPARE, eventually, running

PROMPT = "def hello"


@pytest.mark.parametrize(
    ("asks", "adaptive", "served"),
    [("org/base", True, FINE), ("org/base", False, BASE), ("org/base", None, BASE), ("org/fine", True, FINE)],
)
@pytest.mark.parametrize("chat", [False, True])
def test_only_adaptive_requests_are_served_by_the_stand_in(tokenizer: Tokenizer, asks, adaptive, served, chat) -> None:
    body = {"model": asks, "max_tokens": 6, "adaptive": adaptive, "return_token_ids": True}
    route, prompt = (
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        if chat
        else ("completions", {"prompt": PROMPT})
    )
    with (
        running(tokenizer, stand_ins={BASE.name: FINE.name, FINE.name: "not/served"}) as server,
        server.http() as client,
    ):
        said = client.post(f"/v1/{route}", json={**body, **prompt}).json()
    assert said["model"] == asks
    assert said.get("served_by") == (served.name if served.name != asks else None)
    if not chat:
        assert said["choices"][0]["token_ids"] == answer(served, tokenizer.encode(PROMPT), SamplingParams(max_tokens=6))


def chain(name: str, seconds: float) -> BlockProfile:
    """Return a profile with a constant cost per step, for any number of rows."""
    return BlockProfile(name, 1, Grid((1,), (1,), ((seconds,),)), Line((1,), (1.0,)), 0.0)


def events(client) -> list[dict]:
    told = [json.loads(line) for line in client.get("/zoo/trace").text.splitlines()]
    return [event for event in told if event["ev"].startswith("dispatch.")]


@pytest.mark.parametrize(("exact", "rewriting", "served"), [(1.0, 2.0, BASE), (2.0, 1.0, FINE), (1.0, 1.0, BASE)])
def test_with_profiles_the_policy_decides_and_the_trace_tells_why(
    tokenizer: Tokenizer, exact, rewriting, served
) -> None:
    profiles = {BASE.name: chain("exact", exact), FINE.name: chain("rewriting", rewriting)}
    body = {"model": BASE.name, "prompt": PROMPT, "max_tokens": 2, "adaptive": True}
    with (
        running(tokenizer, stand_ins={BASE.name: FINE.name}, profiles=profiles, trace=True) as server,
        server.http() as client,
    ):
        said = client.post("/v1/completions", json=body).json()
        plain = client.post("/v1/completions", json={**body, "adaptive": False}).json()
        candidates, chosen = events(client)
    assert said["model"] == plain["model"] == BASE.name and "served_by" not in plain
    assert said.get("served_by") == (FINE.name if served is FINE else None)
    assert (candidates["ev"], chosen["ev"]) == ("dispatch.candidates", "dispatch.choose")
    assert candidates["cause"] == chosen["cause"] == "BL-21" and candidates["req"] == chosen["req"] == said["id"]
    assert chosen["asked"] == BASE.name and chosen["model"] == served.name
    totals = {
        each["model"]: each["queue"] + each["compute"] + each["transfer"] + each["load"]
        for each in candidates["candidates"]
    }
    assert totals == {BASE.name: exact, FINE.name: rewriting} and totals[served.name] == min(totals.values())


def test_without_profiles_of_both_the_rewriting_is_taken_and_the_trace_says_so(tokenizer: Tokenizer) -> None:
    body = {"model": BASE.name, "prompt": PROMPT, "max_tokens": 2, "adaptive": True}
    profiles = {BASE.name: chain("exact", 1.0)}
    with (
        running(tokenizer, stand_ins={BASE.name: FINE.name}, profiles=profiles, trace=True) as server,
        server.http() as client,
    ):
        assert client.post("/v1/completions", json=body).json()["served_by"] == FINE.name
        (chosen,) = events(client)
    assert (chosen["ev"], chosen["model"], "cause" in chosen) == ("dispatch.choose", FINE.name, False)


def test_what_runs_already_counts(tokenizer: Tokenizer) -> None:
    """A batch of a model with the same base runs: the stand-in joins it; alone the exact model would be chosen."""
    kin = replace(FINE, kind="delta", base="org/root")
    root = replace(BASE, name="org/root")
    exact = replace(SPARE, name="org/exact", kind="full", base="org/root")
    profiles = {exact.name: chain("exact", 1.0), kin.name: chain("rewriting", 1.5)}
    holding = threading.Event()
    body = {"model": exact.name, "prompt": PROMPT, "max_tokens": 2, "adaptive": True}
    with (
        running(
            tokenizer,
            specs=(root, kin, exact),
            stand_ins={exact.name: kin.name},
            profiles=profiles,
            trace=True,
            known=(root, kin, exact),
            pace=lambda step: holding.wait(5) and None if step > 1 else None,
        ) as server,
        server.http() as client,
    ):
        long = threading.Thread(
            target=lambda: client.post("/v1/completions", json={"model": root.name, "prompt": PROMPT, "max_tokens": 9})
        )
        long.start()
        assert eventually(lambda: server.state()["running"] == 1)
        busy = threading.Thread(target=lambda: client.post("/v1/completions", json=body))
        busy.start()
        assert eventually(lambda: len(events(client)) == 2)
        holding.set()
        long.join()
        busy.join()
        client.post("/v1/completions", json=body)
        told = [event["model"] for event in events(client) if event["ev"] == "dispatch.choose"]
    assert told == [kin.name, exact.name]
