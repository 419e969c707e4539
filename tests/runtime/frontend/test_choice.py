"""Choices: however a sequence's events are split into steps, its text, tokens and finish reason are the same."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.frontend.assemble import Generation, Limits, Receipt, assemble_completion
from runtime.frontend.choice import AnswerChoice, TextPiece
from runtime.frontend.schemas import CompletionBody
from runtime.frontend.served_models import ServedModel
from runtime.frontend.tokenizer import Tokenizer
from runtime.types import Logprob, ModelSpec, PromptLogprobs, TokenEvent

SPEC = ModelSpec("m", 1, 16, 4096, 400, eos_token_ids=(2,))
IDS = st.lists(st.integers(0, 330), min_size=1, max_size=40)
SHARED = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def generation(tokenizer: Tokenizer, **fields: object) -> Generation:
    body = CompletionBody(model="m", **{"prompt": [5, 6], "max_tokens": 100, **fields})
    return assemble_completion(body, ServedModel(SPEC, tokenizer), Receipt("r"), Limits())


def events_of(tokens: list[int], finish: str = "length", **first: object) -> list[TokenEvent]:
    """Return one event per token, the last one with the finish reason. `first`: further fields of the first event."""
    last = len(tokens) - 1
    return [
        TokenEvent(
            "r/0",
            "r",
            i,
            token,
            -0.5,
            (Logprob(token, -0.5),),
            finish=finish if i == last else None,
            **(first if i == 0 else {}),
        )
        for i, token in enumerate(tokens)
    ]


def take_all(asked: Generation, events: list[TokenEvent], cuts: list[int]) -> list[TextPiece]:
    choice = AnswerChoice(asked, 0)
    edges = [0, *sorted(cuts), len(events)]
    return [choice.add_events(events[a:b]) for a, b in itertools.pairwise(edges) if b > a]


def text_of(pieces: list[TextPiece]) -> str:
    return "".join(piece.text for piece in pieces)


@SHARED
@given(tokens=IDS, stop=st.text(st.sampled_from("ab �!d"), min_size=1, max_size=3), data=st.data())
def test_steps_do_not_change_the_text(tokenizer: Tokenizer, tokens: list[int], stop: str, data: st.DataObject) -> None:
    asked, events = generation(tokenizer, stop=stop), events_of(tokens)
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=6))
    singly, cut = take_all(asked, events, list(range(len(events)))), take_all(asked, events, cuts)
    whole = tokenizer.decode([5, 6, *tokens])[len(tokenizer.decode([5, 6]).rstrip("\ufffd")) :]
    assert text_of(singly) == text_of(cut)
    assert whole.startswith(text_of(cut)) and stop not in text_of(cut)
    ended = [piece.finish for piece in cut if piece.finish]
    assert ended[:1] == (["stop"] if stop in whole else ["length"])


@SHARED
@given(tokens=IDS)
def test_without_stops_the_text_is_the_decoded_text(byte_tokenizer: Tokenizer, tokens: list[int]) -> None:
    (quote,) = byte_tokenizer.encode("!", add_special=False)
    pieces = take_all(generation(byte_tokenizer, prompt=[quote]), events_of(tokens), list(range(len(tokens))))
    assert "!" + text_of(pieces) == byte_tokenizer.decode([quote, *tokens])


def test_the_end_token_is_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello", add_special=False)
    choice = AnswerChoice(generation(tokenizer, stop_token_ids=[ids[-1]]), 0)
    piece = choice.add_events(events_of(ids, "stop"))
    assert piece.tokens == tuple(ids) and choice.tokens == len(ids)
    assert tokenizer.decode([ids[-1]]).strip() not in piece.text[-1:]


def test_a_stop_string_asks_for_an_abort_only_while_the_sequence_runs(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world", add_special=False)
    running = AnswerChoice(generation(tokenizer, stop="wor"), 0).add_events(events_of([*ids, ids[0]])[:-1])
    assert running.finish == "stop" and running.cut and running.text.endswith("hello ")
    ids = tokenizer.encode("hello", add_special=False)
    ended = AnswerChoice(generation(tokenizer, stop="lo"), 0).add_events(events_of(ids))
    assert ended.finish == "stop" and not ended.cut


def test_nothing_comes_after_the_end(tokenizer: Tokenizer) -> None:
    choice = AnswerChoice(generation(tokenizer), 0)
    assert choice.add_events(events_of([7, 8])).finish == "length"
    assert choice.add_events(events_of([9])) == TextPiece(0, finish="length")


def test_prompt_logprobs_in_chunks_become_one_entry_per_token(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("hello world", add_special=False)
    asked = generation(tokenizer, prompt=prompt, echo=True, logprobs=1)
    parts = tuple(
        PromptLogprobs("r/0", i, (Logprob(prompt[i], -float(i)),), ((Logprob(9, -0.1),),))
        for i in range(1, len(prompt))
    )
    piece = AnswerChoice(asked, 0).add_events(events_of([7], prompt_logprobs=parts))
    assert [entry.logprob for entry in piece.entries] == [None, *(-float(i) for i in range(1, len(prompt))), -0.5]
    assert [entry.token for entry in piece.entries] == [*prompt, 7]
    assert piece.entries[len(prompt)].offset == len(tokenizer.decode(prompt))
    assert piece.entries[0].offset == 0 and piece.entries[0].top == ()


def test_a_failure_carries_its_reason(tokenizer: Tokenizer) -> None:
    piece = AnswerChoice(generation(tokenizer), 0).add_events(
        [TokenEvent("r/0", "r", 0, None, finish="error", error="the engine failed")]
    )
    assert (piece.finish, piece.error, piece.tokens) == ("error", "the engine failed", ())
