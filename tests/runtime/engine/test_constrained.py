"""Answers with a grammar, by the real scheduler, agent and engine: valid, repeatable, and no change to other rows."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from runtime.config import EngineConfig
from runtime.engine.kernels.program_reuse import ProgramReuse
from runtime.engine.models.registry import kernels_for
from runtime.engine.step import decode_reuse
from runtime.engine.step.decode_ends import PlainHead
from runtime.frontend.stored_tokenizer import stored_tokenizer
from runtime.grammars.sources import from_choices, from_regex, from_schema
from runtime.types import SamplingParams, SequenceRequest
from tests import checkpoints
from tests.runtime.engine.drive import DenseDevice, Drive, Limits, PagedDevice, drive
from zoo.handle import ModelHandle

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
#: JSON without white space, of which a model with random weights would write a lot.
JSON = from_regex(r'\{"kind":"(cat|dog)","legs":[1-9]?[0-9]\}')
PROMPT = tuple(range(40, 52))


@pytest.fixture(scope="module")
def model(bench) -> str:
    return bench.add("texts", checkpoints.make("llama", bench.root / "hf" / "texts"))


def ask(model: str, seq: str, grammar: str = "", prompt=PROMPT, **params: Any) -> SequenceRequest:
    options = {"max_tokens": 60, "temperature": 1.0, "seed": int(seq) if seq.isdigit() else 7, **params}
    return SequenceRequest(seq, seq, model, prompt, SamplingParams(grammar=grammar, **options))


def device(bench, model: str, kind: Any = PagedDevice, pages: int | None = None, **options: Any) -> Any:
    config = EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4, **options)
    made = kind(bench.store, config, [model])
    if pages is None:
        return made
    size = made.memory().kv_pool // made.page_capacity
    return kind(bench.store, replace(config, kv_cache_memory_bytes=pages * size), [model])


def text(bench, model: str, out: Drive, seq: str) -> str:
    with bench.store.catalog.reading() as reader:
        tokenizer = stored_tokenizer(ModelHandle(bench.store, reader.model(model)))
    return tokenizer.decode(out.tokens(seq))


@pytest.mark.parametrize("kind", [PagedDevice, DenseDevice])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"logprobs": 3}, {"repetition_penalty": 1.3}])
def test_answers_follow_their_grammar_and_end_with_it(bench, model, kind, params) -> None:
    made = device(bench, model, kind)
    out = drive(made, {0: [ask(model, f"{i}", JSON, **params) for i in range(4)], 3: [ask(model, "9", JSON, **params)]})
    for seq in "01239":
        got = json.loads(text(bench, model, out, seq))
        assert got["kind"] in ("cat", "dog") and 0 <= got["legs"] <= 99
        assert out.events[seq][-1].finish == "stop"


def test_a_schema_is_followed(bench, model) -> None:
    out = drive(device(bench, model), {0: [ask(model, f"{i}", from_schema(SCHEMA), max_tokens=200) for i in range(6)]})
    ended = [seq for seq in out.events if out.events[seq][-1].finish == "stop"]
    assert ended, "no answer ended"
    for seq in ended:
        assert set(json.loads(text(bench, model, out, seq))) == {"kind", "legs"}


@pytest.mark.parametrize("kind", [PagedDevice, DenseDevice])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_grammar_are_unchanged_bit_for_bit(bench, model, kind, temperature) -> None:
    free = [ask(model, f"{i}", prompt=PROMPT[i:], temperature=temperature, logprobs=2) for i in range(3)]
    alone = drive(device(bench, model, kind), {0: free})
    bound = [ask(model, f"1{i}", JSON, temperature=temperature) for i in range(3)]
    beside = drive(device(bench, model, kind), {0: [*free, *bound]})
    for one in free:
        assert [(e.token, e.logprob, e.top) for e in beside.events[one.seq]] == [
            (e.token, e.logprob, e.top) for e in alone.events[one.seq]
        ]


def test_rows_with_a_grammar_or_a_temperature_take_their_tokens_from_the_kernels_head(
    bench, model, monkeypatch
) -> None:
    """As free greedy rows do, in the same steps; rows with log-probabilities take theirs from the modules' logits."""
    seen, tokens = list[tuple[int, int, int]](), PlainHead.tokens

    def counted(head: PlainHead, hidden: Any, by: Any, masks: Any) -> list[int]:
        seen.append((hidden.shape[1], len(masks), len(by.rows)))
        return tokens(head, hidden, by, masks)

    monkeypatch.setattr(PlainHead, "tokens", counted)
    drawn = dict(temperature=1.5, top_k=40, top_p=0.95, min_p=0.01, seed=7)
    asked = [
        ask(model, f"{i}", JSON if i % 2 else "", PROMPT[i:], **(drawn if i < 3 else {"temperature": 0.0}))
        for i in range(6)
    ]
    fast = drive(device(bench, model), {0: asked})
    if kernels_for(EngineConfig()) is not None:
        assert (6, 3, 3) in seen, "three of six rows with a grammar, and three with a temperature, in one step"
    seen.clear()
    slow = drive(device(bench, model), {0: [replace(o, sampling=replace(o.sampling, logprobs=0)) for o in asked]})
    assert not seen
    for one in asked:
        assert fast.tokens(one.seq) == slow.tokens(one.seq)


@pytest.mark.skipif(kernels_for(EngineConfig()) is None, reason="NO KERNELS: steps are not repeated")
def test_masks_of_a_repeated_step_start_with_its_layers(bench, model, monkeypatch) -> None:
    """Not before: the scheduler's thread would wait for Python's lock. And not later: masks are to be ready."""
    works, seen = list[Any](), list[bool]()
    prepare, layers = decode_reuse.prepare_masks, ProgramReuse.run

    def prepared(*given: Any, **how: Any) -> Any:
        made = prepare(*given, **how)
        works[:] = made
        seen.extend(work.is_started for work in made)
        return made

    def run(course: ProgramReuse, hidden: Any) -> None:
        assert all(work.is_started for work in works)
        layers(course, hidden)

    monkeypatch.setattr(decode_reuse, "prepare_masks", prepared)
    monkeypatch.setattr(ProgramReuse, "run", run)
    drive(device(bench, model), {0: [ask(model, f"{i}", JSON) for i in range(3)]})
    assert seen and not any(seen)


def test_a_greedy_answer_that_satisfies_its_grammar_is_unchanged(bench, model) -> None:
    """Token by token, although its text could be written in other tokens."""
    with bench.store.catalog.reading() as reader:
        tokenizer = stored_tokenizer(ModelHandle(bench.store, reader.model(model)))
    compared = 0
    for number in range(12):
        prompt = tuple(range(60 + 9 * number, 70 + 9 * number))
        free = ask(model, "1", prompt=prompt, temperature=0.0, max_tokens=8, logit_bias=((70, 3.0), (300, 4.0)))
        tokens = drive(device(bench, model), {0: [free]}).tokens("1")
        its, count = "", 0
        for end in range(1, len(tokens) + 1):
            raw = b"".join(map(tokenizer.token_bytes, tokens[:end]))
            if tokenizer.silent(tokens[end - 1]):
                break
            with suppress(UnicodeDecodeError):
                its, count = raw.decode(), end
        if count > 2:
            sampling = replace(free.sampling, grammar=from_choices([its, "\u00e9"]), max_tokens=count)
            bound = drive(device(bench, model), {0: [replace(free, sampling=sampling)]}).tokens("1")
            assert bound == tokens[:count]
            compared += 1
    assert compared, "no answer is text"


def test_a_preempted_answer_goes_on_as_if_nothing_had_happened(bench, model) -> None:
    bound = [ask(model, f"{i}", JSON, prompt=PROMPT[i % 4 :]) for i in range(5)]
    calm = drive(device(bench, model), {0: bound})
    tight = drive(device(bench, model, pages=3 * 13), {2 * i: [one] for i, one in enumerate(bound)}, Limits(8, 5))
    assert tight.preemptions > 0, "the pool was to be too small"
    for one in bound:
        assert tight.tokens(one.seq) == calm.tokens(one.seq)


def test_an_answer_taken_up_from_its_tokens_is_the_same(bench, model) -> None:
    """A server that takes requests over has their tokens, and nothing of their state."""
    whole = drive(device(bench, model), {0: [ask(model, "5", JSON)]}).tokens("5")
    half = replace(ask(model, "5", JSON), output=tuple(whole[:4]))
    assert drive(device(bench, model), {0: [half]}).tokens("5") == whole[4:]


@pytest.mark.parametrize("credit", [1, 4])
def test_steps_launched_ahead_and_tokens_on_credit(bench, model, credit) -> None:
    plain = drive(device(bench, model), {0: [ask(model, "5", JSON), ask(model, "6")]})
    made = device(bench, model, async_scheduling="on")
    out = drive(made, {0: [ask(model, "5", JSON), ask(model, "6")]}, credit=credit)
    assert out.tokens("5") == plain.tokens("5") and out.tokens("6") == plain.tokens("6")


def test_alternatives_are_of_the_masked_distribution(bench, model) -> None:
    out = drive(device(bench, model), {0: [ask(model, "1", from_choices(["a", "b"]), logprobs=5)]})
    first = out.events["1"][0]
    assert 1 <= len(first.top) <= 4, "tokens that the grammar forbids are no alternatives"
    assert sum(2.718281828**each.logprob for each in first.top) == pytest.approx(1.0, abs=1e-4)
