"""A cluster's answers name the variant that really ran."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.launch.threads import ThreadLauncher
from runtime.config import ClusterConfig, ServerConfig
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.engine.fakes.integer_model import counting_model, expected
from runtime.frontend.tokenizer import Tokenizer
from runtime.scheduler.admission.variant_choice import VariantChoice
from runtime.types import SamplingParams
from tests.runtime.scheduler.admission.test_variant_choice import variant_of
from tests.runtime.server.harness import FakeSource, serving

OWN = counting_model("org/base", "1 2* 3 4* 5* 6", max_model_len=256, vocab_size=320)
SMALL = counting_model("org/base~v", "1 2* 3 7* 5* 6", max_model_len=256, vocab_size=320)
CUT = (1, 3, 4)


def asked(client: Any, chat: bool, **body: Any) -> dict[str, Any]:
    """Send a completion or chat request; return the answer, or the last chunk of a stream."""
    route, prompt = (
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        if chat
        else ("completions", {"prompt": [5, 6]})
    )
    answer = client.post(
        f"/v1/{route}", json={"model": "org/base", "max_tokens": 6, "temperature": 0, **prompt, **body}
    )
    if not body.get("stream"):
        return dict(answer.json())
    return dict(
        json.loads([line for line in answer.text.splitlines() if 'finish_reason":"' in line][-1].removeprefix("data: "))
    )


@pytest.mark.parametrize("chat", [False, True])
def test_a_variant_that_ran_is_named_whole_and_in_streams(tokenizer: Tokenizer, chat: bool) -> None:
    launcher = ThreadLauncher(
        lambda device: lambda: IntegerEngine((OWN, SMALL), 400),
        settings=AgentSettings(report_seconds=0.05),
        beat_seconds=0.1,
    )
    blocks = {block.id: block for block in (*SMALL.blocks(*CUT), *OWN.blocks(*CUT))}
    smaller = {use.block: 10 for use in SMALL.chain(*CUT).uses} | {use.block: 1000 for use in OWN.chain(*CUT).uses}
    sized = [replace(block, nbytes=smaller[block.id]) for block in blocks.values()]
    adaptation = VariantChoice((variant_of(OWN, SMALL, *CUT),))
    driver = ClusterDriver([OWN.chain(*CUT)], sized, ["a"], launcher, ClusterConfig(), adaptation=adaptation)
    with (
        driver,
        serving(driver, FakeSource(tokenizer, known=[OWN.spec]), ServerConfig()) as server,
        server.http() as client,
    ):
        for stream in (False, True):
            said = asked(client, chat, adaptive=True, stream=stream, n=2)
            assert (said["model"], said["served_by"], said["choices"][0]["served_by"]) == (
                "org/base",
                "org/base~v",
                "org/base~v",
            )
            plain = asked(client, chat, stream=stream)
            assert plain["model"] == "org/base" and "served_by" not in plain and "served_by" not in plain["choices"][0]
        if not chat:
            told = asked(client, chat, adaptive=True, return_token_ids=True, ignore_eos=True)
            assert told["choices"][0]["token_ids"] == expected(SMALL, [5, 6], SamplingParams(6, ignore_eos=True))
