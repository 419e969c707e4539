"""Chat completions through the real OpenAI client."""

from __future__ import annotations

import openai

from runtime.frontend.tokenizer import Tokenizer
from runtime.types import SamplingParams
from tests.runtime.cluster.whole import answer
from tests.runtime.server.harness import BASE

MESSAGES = [{"role": "system", "content": "short"}, {"role": "user", "content": "say hé"}]


def expected(tokenizer: Tokenizer, count: int) -> list[int]:
    return answer(BASE, tokenizer.encode_chat(MESSAGES), SamplingParams(max_tokens=count))


def test_answer_follows_the_template(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    done = client.chat.completions.create(
        model="org/base", messages=MESSAGES, max_tokens=12, extra_body={"return_token_ids": True}
    )
    prompt = tokenizer.encode_chat(MESSAGES)
    assert tokenizer.decode(prompt) == "<system>short\n<user>say hé\n<assistant>"
    assert done.choices[0].token_ids == expected(tokenizer, 12)
    assert done.choices[0].message.role == "assistant"
    assert (
        done.choices[0].message.content
        == tokenizer.decode(prompt + expected(tokenizer, 12))[len(tokenizer.decode(prompt)) :]
    )
    assert done.usage.prompt_tokens == len(prompt) and done.usage.completion_tokens == 12


def test_without_a_length_the_context_is_filled(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    done = client.chat.completions.create(model="org/base", messages=MESSAGES)
    assert done.usage.total_tokens == BASE.max_model_len
    assert done.choices[0].finish_reason == "length"


def test_parts_of_text_and_the_word_developer(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model="org/base", messages=MESSAGES, max_completion_tokens=8)
    parts = [
        {"role": "developer", "content": "short"},
        {"role": "user", "content": [{"type": "text", "text": "say hé"}]},
    ]
    assert client.chat.completions.create(model="org/base", messages=parts, max_tokens=8).choices == plain.choices


def test_stream_opens_with_the_role_and_ends_with_the_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="org/base", messages=MESSAGES, max_tokens=50, n=2)
    chunks = list(
        client.chat.completions.create(
            model="org/base", messages=MESSAGES, max_tokens=50, n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert mine[0].delta.role == "assistant" and mine[0].delta.content == ""
        assert all(part.delta.role is None for part in mine[1:])
        assert "".join(part.delta.content or "" for part in mine) == choice.message.content
        assert [part.finish_reason for part in mine if part.finish_reason] == ["length"]
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []


def test_logprobs_carry_bytes_that_join_to_the_text(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    done = client.chat.completions.create(
        model="org/base", messages=MESSAGES, max_tokens=30, logprobs=True, top_logprobs=2
    )
    content = done.choices[0].logprobs.content
    assert len(content) == 30
    assert all(len(token.top_logprobs) == 2 and token.logprob == -1.0 for token in content)
    specials = {"<pad>", "<s>", "</s>"}
    joined = b"".join(bytes(token.bytes) for token in content if token.token not in specials)
    assert joined.decode("utf-8", "replace") == done.choices[0].message.content
    assert client.chat.completions.create(model="org/base", messages=MESSAGES, max_tokens=3).choices[0].logprobs is None


def test_a_seed_is_accepted_and_repeats(client: openai.OpenAI) -> None:
    one, two = (
        client.chat.completions.create(model="org/base", messages=MESSAGES, max_tokens=9, seed=-7, n=2)
        for _ in range(2)
    )
    assert one.choices == two.choices
