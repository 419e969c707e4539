"""Usage says how many prompt tokens were not computed: as many as the engine did not run, on every route."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.frontend.assemble import Generation, Prompt, Receipt
from runtime.frontend.tokenizer import Tokenizer
from tests.runtime.server.harness import BASE, running

LONG = " ".join(f"the {number} animals" for number in range(12))
MESSAGES = [{"role": "user", "content": LONG}]
_REUSED = "vllm:prefix_cache_hits_total"
WAYS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": LONG, "max_tokens": 3},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/responses": {"input": LONG, "max_output_tokens": 3},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
}


@pytest.fixture(params=[False, True], ids=["", "durable"])
def http(request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path: Path) -> Iterator[httpx.Client]:
    """A new server, which has computed nothing yet."""
    queue = str(tmp_path / "queue") if request.param else None
    with running(tokenizer, queue=queue, sharing="cached") as server, server.http() as client:
        yield client


def asked(http: httpx.Client, route: str, key: str, **more: Any) -> httpx.Response:
    body = {"model": "org/base", **WAYS[route], **more}
    return http.post(route, json=body, headers={"Idempotency-Key": key}).raise_for_status()


def counts(route: str, usage: dict[str, Any]) -> tuple[int, int]:
    """Return the tokens of the prompt, and those of them that were not computed."""
    if route == "/v1/messages":
        assert usage["cache_creation_input_tokens"] == 0
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]
    if route == "/v1/responses":
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def usages_of(text: str) -> list[dict[str, Any]]:
    """Return the counts that a stream says, in order."""
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    places = [event for each in events for event in (each, each.get("response"), each.get("message")) if event]
    return [each["usage"] for each in places if each.get("usage")]


def reused(http: httpx.Client) -> float:
    """Return how many tokens the scheduler has not let run."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    return sum(sample.value for each in families for sample in each.samples if sample.name == _REUSED)


@pytest.mark.parametrize("route", WAYS)
def test_what_a_cache_had_is_counted(http: httpx.Client, route: str) -> None:
    first = asked(http, route, "a").json()["usage"]
    assert counts(route, first)[1] == reused(http) == 0
    again = asked(http, route, "b").json()["usage"]
    prompt, cached = counts(route, again)
    assert cached == reused(http) == (prompt - 1) // BASE.page_tokens * BASE.page_tokens > 0
    assert prompt == counts(route, first)[0]
    options = {"stream_options": {"include_usage": True}} if route.endswith("completions") else {}
    said = usages_of(asked(http, route, "c", stream=True, **options).text)
    assert {counts(route, usage) for usage in said} == {(prompt, cached)} and said[-1] == again
    assert reused(http) == 2 * cached
    other = asked(http, route, "d", cache_salt="other").json()["usage"]
    assert counts(route, other) == (prompt, 0)


def test_of_choices_of_one_prompt_those_tokens_count_that_none_has_computed() -> None:
    two = (Prompt((1, 2)), Prompt((3,)))
    generation = Generation(Receipt("r"), False, cast(Any, None), two, cast(Any, (None,) * 4))
    assert generation.cached_tokens([16, 0, 32, 48]) == 32


def test_choices_that_have_their_prompt_from_each_other_have_it_from_no_cache(http: httpx.Client) -> None:
    prompts = [f"{number} {LONG}" for number in range(3)]
    asked(http, "/v1/completions", "warm", prompt=prompts[1])
    usage = asked(http, "/v1/completions", "all", prompt=prompts, n=2).json()["usage"]
    one = asked(http, "/v1/completions", "one", prompt=prompts[1], n=2).json()["usage"]
    assert counts("/v1/completions", usage)[1] == counts("/v1/completions", one)[1] > 0


def test_a_repetition_says_what_the_request_did(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The counts are part of the answer: also where another server has built it from the journal."""
    with running(tokenizer, queue=str(tmp_path / "queue"), sharing="cached") as server, server.http() as http:
        usage = [asked(http, "/v1/completions", key).json()["usage"] for key in ("a", "b", "b", "a")]
    assert usage[1] == usage[2] != usage[0] == usage[3]
