"""The pieces of a streamed text join to the text, for any IDs of both kinds of tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.frontend.detokenizer import ByteDetokenizer, WindowDetokenizer, detokenizer_for
from runtime.frontend.tokenizer import REPLACEMENT, Tokenizer, adapt
from tests.runtime.frontend.samples import byte_level_with_added, sentence_piece

SHARED = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
IDS = st.lists(st.integers(0, 330), max_size=60)
TEXTS = st.text(st.sampled_from("ab hello.é你好😀👩‍👩‍👧\ufffd\n"), max_size=40)


def pieces(tokenizer: Tokenizer, ids: list[int], context: list[int] | None = None) -> list[str]:
    """Return the pieces of the tokenizer's own detokenizer; the window detokenizer must give the same text in all."""
    parts = [list[str](), list[str]()]
    for detokenizer, found in zip(
        (detokenizer_for(tokenizer, context or []), WindowDetokenizer(tokenizer, context or [])), parts, strict=True
    ):
        found += [*(detokenizer.push(token) for token in ids), detokenizer.finish()]
    assert "".join(parts[0]) == "".join(parts[1])
    return parts[0]


@SHARED
@given(ids=IDS)
def test_random_ids_join_to_their_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@SHARED
@given(ids=st.lists(st.integers(3, 258), min_size=1, max_size=60))
def test_mostly_bytes_join_to_their_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@SHARED
@given(text=TEXTS)
def test_true_text_never_shows_a_broken_character(tokenizer: Tokenizer, text: str) -> None:
    parts = pieces(tokenizer, tokenizer.encode(text, add_special=False))
    assert "".join(parts) == text
    assert "".join(parts).count(REPLACEMENT) == text.count(REPLACEMENT)


@SHARED
@given(text=st.text(st.sampled_from("ab hello.é你好😀👩‍👧"), max_size=40), data=st.data())
def test_answer_continues_its_prompt_wherever_it_is_cut(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = tokenizer.encode(text, add_special=False)
    cut = data.draw(st.integers(0, len(ids)))
    prompt = tokenizer.decode(ids[:cut]).rstrip(REPLACEMENT)
    assert "".join(pieces(tokenizer, ids[cut:], ids[:cut])) == text[len(prompt) :]


def test_a_space_survives_after_the_prompt() -> None:
    tokenizer = adapt(sentence_piece())
    prompt, answer = tokenizer.encode("hello"), tokenizer.encode("world", add_special=False)
    assert tokenizer.decode(answer) == "world"
    assert "".join(pieces(tokenizer, answer, prompt)) == " world"


def test_a_character_of_four_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀😀a", add_special=False)
    assert len(ids) >= 9
    parts = [part for part in pieces(tokenizer, ids) if part]
    assert REPLACEMENT not in "".join(parts)
    assert "".join(parts) == "😀😀a"


def test_broken_bytes_come_out_in_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀", add_special=False)[:-1]
    text = "".join(pieces(tokenizer, ids))
    assert text == tokenizer.decode(ids)
    assert text.endswith(REPLACEMENT)


@pytest.mark.parametrize("tail", [b"\x80", b"\xf0\x9f"])
def test_endless_junk_is_given_out_and_keeps_the_window_short(byte_tokenizer: Tokenizer, tail: bytes) -> None:
    junk = [next(i for i in range(320) if byte_tokenizer.token_bytes(i) == bytes([value])) for value in tail]
    detokenizer = WindowDetokenizer(byte_tokenizer)
    given = "".join(detokenizer.push(token) for _ in range(2000) for token in junk)
    assert len(given) >= 1999
    assert len(detokenizer._window) <= 16


def test_special_tokens_leave_no_trace(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello hello", add_special=False)
    mixed = [token for id_ in ids for token in (id_, 2)]
    assert "".join(pieces(tokenizer, mixed)) == "hello hello"


def test_byte_level_text_needs_no_window_and_added_tokens_are_decoded_as_the_tokenizer_does(
    byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    plain = adapt(byte_level_with_added(tmp_path, "é", "a b", "naïve", "你", "x"))
    assert isinstance(detokenizer_for(byte_tokenizer), ByteDetokenizer) and isinstance(
        detokenizer_for(plain), ByteDetokenizer
    )
    assert isinstance(detokenizer_for(adapt(sentence_piece())), WindowDetokenizer)
    ids = [
        token for text in ("é", "a b", "naïve", "你", "x", "plain") for token in plain.encode(text, add_special=False)
    ]
    assert "".join(pieces(plain, ids)) == plain.decode(ids)
    assert "".join(pieces(plain, [*ids, *reversed(ids)])) == plain.decode([*ids, *reversed(ids)])
