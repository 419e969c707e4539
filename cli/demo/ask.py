"""Asks the models of a server through OpenAI's own Python client: one after another, then all of them at once.

Knows nothing of how the server works.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cli.demo.recipe import FamilyMember

_TEMPERATURE = 0.5
_TOP_P = 0.9
_SEED = 7


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """One completion. `seconds`: from the request to its last byte."""

    model: str
    prompt: str
    text: str
    tokens: int
    seconds: float
    streamed: bool


@dataclass(frozen=True, slots=True)
class Together:
    """Requests for several models at the same time. `tokens`: produced by all of them."""

    requests: int
    models: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def ask_each(url: str, api_key: str, members: Sequence[FamilyMember], max_tokens: int) -> tuple[DemoAnswer, ...]:
    """One request per model, in turn; the first one streamed."""
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=1) as client:
        return tuple(_ask(client, member, max_tokens, stream=index == 0) for index, member in enumerate(members))


def _ask(client: Any, member: FamilyMember, max_tokens: int, *, stream: bool) -> DemoAnswer:
    started = time.monotonic()
    options = dict(_options(member, max_tokens))
    if stream:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
    reply = client.completions.create(**options)
    chunks = list(reply) if stream else [reply]
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    return DemoAnswer(
        member.name, member.prompt, text, chunks[-1].usage.completion_tokens, time.monotonic() - started, stream
    )


def _options(member: FamilyMember, max_tokens: int) -> dict[str, Any]:
    return {
        "model": member.name,
        "prompt": member.prompt,
        "max_tokens": max_tokens,
        "temperature": _TEMPERATURE,
        "top_p": _TOP_P,
        "seed": _SEED,
    }


def ask_together(url: str, api_key: str, members: Sequence[FamilyMember], each: int, max_tokens: int) -> Together:
    """`each` requests per model, all at once, none of them ending early."""
    return asyncio.run(_ask_together(url, api_key, members, each, max_tokens))


async def _ask_together(
    url: str, api_key: str, members: Sequence[FamilyMember], each: int, max_tokens: int
) -> Together:
    from openai import AsyncOpenAI

    started = time.monotonic()
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=1) as client:
        calls = [
            client.completions.create(**_options(member, max_tokens) | {"seed": seed}, extra_body={"ignore_eos": True})
            for seed in range(each)
            for member in members
        ]
        replies = await asyncio.gather(*calls)
    tokens = sum(reply.usage.completion_tokens for reply in replies if reply.usage)
    return Together(len(calls), len(members), tokens, time.monotonic() - started)
