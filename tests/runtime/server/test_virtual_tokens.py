"""Virtual tokens as clients see them: in no prompt, no count and no reported limit; they only take pages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import openai
import pytest

from runtime.frontend.tokenizer import Tokenizer
from runtime.types import SamplingParams
from tests.runtime.cluster.whole import answer
from tests.runtime.server.harness import BASE, FINE, Running, eventually, running

PROMPTED = replace(FINE, name="org/prompted", virtual_tokens=70)  # more than a step's budget of tokens
PROMPT = "Once upon a time"
#: Tokens that the device holds: 12 pages, two for every 16 tokens.
HELD = 96


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer, credit: int) -> Iterator[Running]:
    with running(
        tokenizer, credit=credit, specs=(BASE, PROMPTED), pages=12, pace=lambda _: time.sleep(0.001)
    ) as started:
        yield started


def test_echo_scores_and_usage_know_the_prompt_alone(served: Running, tokenizer: Tokenizer) -> None:
    """Echo, log-probabilities and usage cover the prompt alone.

    Three choices do not fit the device at once; they take turns.
    """
    prompt = tuple(tokenizer.encode(PROMPT))
    with served.client() as client:
        done = client.completions.create(
            model="org/prompted",
            prompt=PROMPT,
            max_tokens=5,
            n=3,
            echo=True,
            logprobs=1,
            extra_body={"return_token_ids": True},
        )
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(prompt), 15)
    for choice in done.choices:
        assert choice.text.startswith(PROMPT)
        assert choice.logprobs.token_logprobs == [None] + [-1.0] * (len(prompt) + 4)
        assert choice.model_extra["token_ids"] == answer(PROMPTED, prompt, SamplingParams(max_tokens=5))


def test_the_context_that_is_told_is_the_callers(served: Running) -> None:
    room = HELD - PROMPTED.virtual_tokens
    with served.client() as client:
        assert {model.id: model.model_extra["max_model_len"] for model in client.models.list()} == {
            "org/base": HELD,
            "org/prompted": room,
        }
        whole = client.completions.create(model="org/prompted", prompt=[5] * (room - 1), max_tokens=1)
        assert whole.usage.total_tokens == room
        with pytest.raises(openai.BadRequestError, match=str(room)):
            client.completions.create(model="org/prompted", prompt=[5] * room, max_tokens=1)


def test_leaving_and_stop_strings_give_all_pages_back(served: Running) -> None:
    with served.client() as client:
        whole = client.completions.create(model="org/prompted", prompt=[5, 6], max_tokens=20).choices[0].text
        stopped = client.completions.create(
            model="org/prompted", prompt=[5, 6], max_tokens=20, stop=[whole[4:7]]
        ).choices[0]
        assert (stopped.text, stopped.finish_reason) == (whole[: whole.index(whole[4:7])], "stop")
        with client.completions.create(model="org/prompted", prompt=[5, 6], max_tokens=20, stream=True) as stream:
            next(iter(stream))
    assert eventually(lambda: served.state()["agents"][0]["pages"]["free"] == 12)
