"""From request bodies to sequences: defaults, seeds, bounds, and what depends on the model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime.frontend.assemble import Generation, Limits, Receipt, assemble_chat, assemble_completion
from runtime.frontend.errors import RequestError
from runtime.frontend.schemas import ChatBody, CompletionBody, parse
from runtime.frontend.served_models import SamplingDefaults, ServedModel, ServedModels
from runtime.frontend.tokenizer import NoTokenizer, Tokenizer
from runtime.types import ModelSpec, SamplingParams

SPEC = ModelSpec("org/m", 1, 16, 64, 320, eos_token_ids=(2,))


def completion(tokenizer: Tokenizer, defaults: SamplingDefaults | None = None, **fields: Any) -> Generation:
    raw = json.dumps({"model": "m", "prompt": [5, 6, 7], **fields}).encode()
    model = ServedModel(SPEC, tokenizer, defaults or SamplingDefaults())
    return assemble_completion(
        parse(CompletionBody, raw), model, Receipt("cmpl-1", 2, 3), Limits(max_choices=8, max_sequences=10)
    )


def sampling(tokenizer: Tokenizer, **fields: Any) -> SamplingParams:
    return completion(tokenizer, **fields).sequences[0].sampling


def test_openais_defaults(tokenizer: Tokenizer) -> None:
    params = sampling(tokenizer, seed=4)
    assert params == SamplingParams(max_tokens=16, temperature=1.0, seed=4)


def test_the_models_own_defaults_give_way_to_the_request(tokenizer: Tokenizer) -> None:
    own = SamplingDefaults(0.6, 0.9, 20, 0.05, 1.1)
    params = completion(tokenizer, own).sequences[0].sampling
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty) == (
        0.6,
        0.9,
        20,
        0.05,
        1.1,
    )
    given = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    params = completion(tokenizer, own, **given).sequences[0].sampling
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty) == (0, 1, 0, 0, 1)


def test_a_deadline_of_the_first_token_reaches_the_sequences(tokenizer: Tokenizer) -> None:
    one = completion(tokenizer, ttft_slo_ms=500).sequences[0]
    assert (one.slo_ms, one.ttft_slo_ms) == (None, 500)


def test_extras_reach_the_sequences(tokenizer: Tokenizer) -> None:
    fields = {
        "slo_ms": 500,
        "priority": -2,
        "adaptive": True,
        "ignore_eos": True,
        "min_tokens": 3,
        "stop_token_ids": [9],
    }
    one = completion(tokenizer, logit_bias={"7": 1, "5": -100}, logprobs=2, **fields).sequences[0]
    assert (one.slo_ms, one.priority, one.adaptive, one.arrival, one.request, one.model) == (
        500,
        -2,
        True,
        3,
        "cmpl-1",
        "org/m",
    )
    assert one.sampling.logit_bias == ((5, -100.0), (7, 1.0))
    assert (one.sampling.ignore_eos, one.sampling.min_tokens, one.sampling.stop_token_ids, one.sampling.logprobs) == (
        True,
        3,
        (9,),
        2,
    )
    assert one.sampling.prompt_logprobs is None


def test_who_shares_pages_with_whom_is_the_clients_to_say_and_no_secret_of_theirs_goes_further(
    tokenizer: Tokenizer,
) -> None:
    plain, one, again, other = (
        completion(tokenizer, **salt).sequences[0].tenant
        for salt in ({}, *[{"cache_salt": s} for s in ("a", "a", "bé")])
    )
    assert plain == "" and one == again and len({plain, one, other}) == 3
    assert all(len(tenant) == 32 and tenant.isascii() for tenant in (one, other))
    for wrong in ("", "x" * 257, 5):
        with pytest.raises(RequestError, match="cache_salt"):
            completion(tokenizer, cache_salt=wrong)


def test_seeds(tokenizer: Tokenizer) -> None:
    given = completion(tokenizer, prompt=[[5], [6]], n=3, seed=10)
    assert [one.sampling.seed for one in given.sequences] == [10, 11, 12, 10, 11, 12]
    assert len({one.seq for one in given.sequences}) == 6 and {one.request for one in given.sequences} == {"cmpl-1"}
    drawn = [one.sampling.seed for _ in range(4) for one in completion(tokenizer, n=8).sequences]
    assert len(set(drawn)) == 32 and all(0 <= seed < 2**63 for seed in drawn)
    assert all(
        0 <= one.sampling.seed < 2**63
        for seed in (-(2**63), -1, 2**63 - 1)
        for one in completion(tokenizer, n=3, seed=seed).sequences
    )


def test_default_length_is_cut_to_the_context_and_a_given_one_must_fit(tokenizer: Tokenizer) -> None:
    assert sampling(tokenizer, prompt=[5] * 60).max_tokens == 4
    assert sampling(tokenizer, prompt=[5] * 60, max_tokens=4).max_tokens == 4
    for fields in (
        {"prompt": [5] * 60, "max_tokens": 5},
        {"prompt": [5] * 64},
        {"prompt": [5] * 65, "max_tokens": 0, "echo": True},
    ):
        with pytest.raises(RequestError) as caught:
            completion(tokenizer, **fields)
        assert caught.value.code == "context_length_exceeded" and caught.value.status == 400
    assert sampling(tokenizer, prompt=[5] * 64, max_tokens=0, echo=True, logprobs=1).prompt_logprobs == 1


def test_bounds_on_sequences(tokenizer: Tokenizer) -> None:
    assert len(completion(tokenizer, prompt=[[5]] * 5, n=2).sequences) == 10
    for fields in ({"n": 9}, {"prompt": [[5]] * 6, "n": 2}):
        with pytest.raises(RequestError):
            completion(tokenizer, **fields)


def test_chat_fills_the_context_by_default(byte_tokenizer: Tokenizer) -> None:
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "logprobs": True}).encode()
    generation = assemble_chat(parse(ChatBody, raw), ServedModel(SPEC, byte_tokenizer), Receipt("c"), Limits())
    (one,) = generation.sequences
    assert len(one.prompt) + one.sampling.max_tokens == SPEC.max_model_len
    assert generation.logprobs == 0 and one.sampling.logprobs == 0


def test_a_tokenizer_larger_than_the_model_is_caught(tokenizer: Tokenizer) -> None:
    model = ServedModel(ModelSpec("m", 1, 16, 64, 4), tokenizer)
    with pytest.raises(RequestError, match="vocabulary"):
        assemble_completion(CompletionBody(model="m", prompt="hello"), model, Receipt("r"), Limits())


def test_without_a_tokenizer_text_is_refused_and_ids_are_not() -> None:
    assert completion(NoTokenizer()).prompts[0].tokens == (5, 6, 7)
    with pytest.raises(RequestError, match="token ids"):
        completion(NoTokenizer(), prompt="hello")


def test_names_resolve_as_in_the_catalogue(tokenizer: Tokenizer) -> None:
    specs = [ModelSpec(name, 1, 16, 64, 320) for name in ("org/Llama-7b", "other/llama-7b", "org/base", "base")]
    models = ServedModels(ServedModel(spec, tokenizer) for spec in specs)
    assert models.find("base").name == "base"
    assert models.find("ORG/BASE").name == "org/base"
    assert models.find("g/Llama-7b").name == "org/Llama-7b"
    for name in ("7b", "", "llama"):
        with pytest.raises(RequestError) as caught:
            models.find(name)
        assert caught.value.status == 404 and caught.value.code == "model_not_found"
    models.remove("base")
    assert models.find("base").name == "org/base"
