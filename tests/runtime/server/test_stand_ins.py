"""Adaptive requests may get a model's rewriting, and are told so; all others get the model they named."""

from __future__ import annotations

import pytest

from runtime.engine.fake import answer
from runtime.frontend.tokenizer import Tokenizer
from runtime.types import SamplingParams
from tests.runtime.server.harness import BASE, FINE, running

PROMPT = "def hello"


@pytest.mark.parametrize(
    ("asks", "adaptive", "served"),
    [("org/base", True, FINE), ("org/base", False, BASE), ("org/base", None, BASE), ("org/fine", True, FINE)],
)
@pytest.mark.parametrize("chat", [False, True])
def test_only_adaptive_requests_are_served_by_the_stand_in(tokenizer: Tokenizer, asks, adaptive, served, chat) -> None:
    body = {"model": asks, "max_tokens": 6, "adaptive": adaptive, "return_token_ids": True}
    route, prompt = ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}) if chat else ("completions", {"prompt": PROMPT})
    with running(tokenizer, stand_ins={BASE.name: FINE.name, FINE.name: "not/served"}) as server, server.http() as client:
        said = client.post(f"/v1/{route}", json={**body, **prompt}).json()
    assert said["model"] == asks
    assert said.get("served_by") == (served.name if served.name != asks else None)
    if not chat:
        assert said["choices"][0]["token_ids"] == answer(served, tokenizer.encode(PROMPT), SamplingParams(max_tokens=6))
