"""Completions through the real OpenAI client: the tokens are the engine's, the text is that of these tokens."""

from __future__ import annotations

import openai
import pytest

from runtime.frontend.tokenizer import Tokenizer
from runtime.types import SamplingParams
from tests.runtime.cluster.whole import answer
from tests.runtime.server.harness import BASE, FINE, Running

PROMPT = "def hello"


def expected(tokenizer: Tokenizer, count: int, spec=BASE, prompt: str = PROMPT) -> list[int]:
    return answer(spec, tokenizer.encode(prompt), SamplingParams(max_tokens=count))


def test_text_tokens_and_usage(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    done = client.completions.create(
        model="org/base", prompt=PROMPT, max_tokens=20, extra_body={"return_token_ids": True}
    )
    ids, prompt = expected(tokenizer, 20), tokenizer.encode(PROMPT)
    choice = done.choices[0]
    assert choice.token_ids == ids
    assert choice.text == tokenizer.decode(prompt + ids)[len(PROMPT) :]
    assert choice.finish_reason == "length"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (
        len(prompt),
        20,
        len(prompt) + 20,
    )
    assert done.id.startswith("cmpl-") and done.object == "text_completion" and done.model == "org/base"


def test_the_default_length_is_openais(client: openai.OpenAI) -> None:
    assert client.completions.create(model="org/base", prompt=PROMPT).usage.completion_tokens == 16


def test_a_unique_ending_names_the_model(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    done = client.completions.create(model="FINE", prompt=PROMPT, max_tokens=5, extra_body={"return_token_ids": True})
    assert done.model == "org/fine"
    assert done.choices[0].token_ids == expected(tokenizer, 5, FINE)


def test_stream_is_the_same_text_in_pieces(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    whole = client.completions.create(model="org/base", prompt=PROMPT, max_tokens=60)
    chunks = list(
        client.completions.create(
            model="org/base", prompt=PROMPT, max_tokens=60, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({c.id for c in chunks}) == 1
    assert len(chunks) > 10


def test_several_prompts_and_choices_are_numbered_choice_by_choice(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    done = client.completions.create(
        model="org/base", prompt=["one", "three"], n=2, max_tokens=4, extra_body={"return_token_ids": True}
    )
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    for choice, prompt in zip(done.choices, ["one", "one", "three", "three"], strict=True):
        assert choice.token_ids == expected(tokenizer, 4, prompt=prompt)
        assert choice.prompt_token_ids == tokenizer.encode(prompt)
    assert done.usage.prompt_tokens == len(tokenizer.encode("one")) + len(tokenizer.encode("three"))
    assert done.usage.completion_tokens == 16


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8]]])
def test_token_ids_are_prompts(client: openai.OpenAI, prompt: list) -> None:
    done = client.completions.create(
        model="org/base", prompt=prompt, max_tokens=3, extra_body={"return_token_ids": True}
    )
    first = prompt if isinstance(prompt[0], int) else prompt[0]
    assert done.choices[0].token_ids == answer(BASE, first, SamplingParams(max_tokens=3))


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_itself(
    client: openai.OpenAI, server: Running, tokenizer: Tokenizer, stream: bool
) -> None:
    text = client.completions.create(model="org/base", prompt=PROMPT, max_tokens=60).choices[0].text
    stop = text[17:21]
    done = client.completions.create(
        model="org/base", prompt=PROMPT, max_tokens=60, stop=[stop, "never there"], stream=stream
    )
    parts = list(done) if stream else [done]
    got = "".join(part.choices[0].text for part in parts)
    assert got == text[: text.index(stop)]
    assert parts[-1].choices[0].finish_reason == "stop"
    assert server.state()["running"] == 0


def test_a_stop_string_within_min_tokens_is_passed_over(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    text = client.completions.create(model="org/base", prompt=PROMPT, max_tokens=60).choices[0].text
    done = client.completions.create(
        model="org/base", prompt=PROMPT, max_tokens=60, stop=text[2:4], extra_body={"min_tokens": 60}
    )
    assert done.choices[0].text == text


def test_a_stop_token_is_counted_but_not_shown(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = expected(tokenizer, 30)
    extra = {"stop_token_ids": [ids[9]], "return_token_ids": True}
    done = client.completions.create(model="org/base", prompt=PROMPT, max_tokens=30, extra_body=extra)
    shown = ids[: ids.index(ids[9])]
    prompt = tokenizer.encode(PROMPT)
    assert done.choices[0].finish_reason == "stop"
    assert done.choices[0].token_ids == [*shown, ids[9]]
    assert done.usage.completion_tokens == len(shown) + 1
    assert done.choices[0].text == tokenizer.decode(prompt + shown)[len(PROMPT) :]


def test_logprobs(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    done = client.completions.create(
        model="org/base", prompt=PROMPT, max_tokens=10, logprobs=3, extra_body={"return_token_ids": True}
    )
    logprobs = done.choices[0].logprobs
    assert logprobs.token_logprobs == [-1.0] * 10
    assert len(logprobs.tokens) == len(logprobs.text_offset) == 10
    assert all(len(top) == 3 for top in logprobs.top_logprobs)
    assert logprobs.text_offset[0] == 0 and logprobs.text_offset == sorted(logprobs.text_offset)


def test_echo_with_and_without_logprobs(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    plain = client.completions.create(model="org/base", prompt=PROMPT, max_tokens=5).choices[0].text
    assert (
        client.completions.create(model="org/base", prompt=PROMPT, max_tokens=5, echo=True).choices[0].text
        == PROMPT + plain
    )
    scored = client.completions.create(model="org/base", prompt=PROMPT, max_tokens=5, echo=True, logprobs=1).choices[0]
    prompt = tokenizer.encode(PROMPT)
    assert scored.text == PROMPT + plain
    assert scored.logprobs.token_logprobs == [None] + [-1.0] * (len(prompt) + 4)
    assert scored.logprobs.top_logprobs[0] is None
    assert "".join(scored.logprobs.tokens[: len(prompt)]) == PROMPT
    assert scored.logprobs.text_offset[len(prompt)] == len(PROMPT)


def test_scoring_a_prompt_generates_nothing(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    done = client.completions.create(model="org/base", prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)
    assert done.choices[0].text == PROMPT
    assert len(done.choices[0].logprobs.tokens) == len(tokenizer.encode(PROMPT))
    assert done.choices[0].finish_reason == "length"
    assert done.usage.completion_tokens == 0


def test_echoed_stream(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="org/base", prompt=[7, 8, 200], max_tokens=9, echo=True, logprobs=1)
    parts = list(
        client.completions.create(
            model="org/base", prompt=[7, 8, 200], max_tokens=9, echo=True, logprobs=1, stream=True
        )
    )
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    offsets = [offset for part in parts if part.choices[0].logprobs for offset in part.choices[0].logprobs.text_offset]
    assert offsets == whole.choices[0].logprobs.text_offset
