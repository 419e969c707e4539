"""Requests may use an early exit where the server allows it, which the answer reports (BL-30)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer
from runtime.types import SamplingParams
from tests.runtime.cluster.whole import answer
from tests.runtime.server.harness import BASE, running

PROMPT = "def hello"
EXIT = replace(BASE, name="org/base@exit-2", blocks=("shared",))
ON = ServerConfig(early_exit=True)


@pytest.mark.parametrize("chat", [False, True])
def test_the_request_chooses_and_the_answer_says_what_ran(tokenizer: Tokenizer, chat: bool) -> None:
    route, prompt = (
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        if chat
        else ("completions", {"prompt": PROMPT})
    )
    body = {"model": "org/base", "max_tokens": 6, "return_token_ids": True, **prompt}
    with running(tokenizer, known=[BASE, EXIT], specs=[BASE, EXIT], config=ON) as server, server.http() as client:
        early = client.post(f"/v1/{route}", json={**body, "early_exit": 2, "adaptive": True}).json()
        whole = client.post(f"/v1/{route}", json=body).json()
    assert (early["model"], early["served_by"]) == ("org/base", "org/base@exit-2")
    assert whole["model"] == "org/base" and "served_by" not in whole
    if not chat:
        params = SamplingParams(max_tokens=6)
        assert early["choices"][0]["token_ids"] == answer(EXIT, tokenizer.encode(PROMPT), params)
        assert whole["choices"][0]["token_ids"] == answer(BASE, tokenizer.encode(PROMPT), params)


@pytest.mark.parametrize(
    ("config", "layers", "says"),
    [
        (ServerConfig(), 2, "--early-exit"),
        (ON, 3, "its exits here: 2"),
        (ON, 0, "greater than or equal to 1"),
        (ON, "2", "valid integer"),
    ],
)
def test_what_is_not_there_is_refused(tokenizer: Tokenizer, config: ServerConfig, layers: object, says: str) -> None:
    with running(tokenizer, known=[BASE, EXIT], specs=[BASE, EXIT], config=config) as server, server.http() as client:
        said = client.post("/v1/completions", json={"model": "org/base", "prompt": PROMPT, "early_exit": layers})
    assert said.status_code == 400 and says in said.json()["error"]["message"]
