"""The tokenizer adapter agrees with transformers, and gives each token's bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.frontend.errors import RequestError
from runtime.frontend.tokenizer import NoTokenizer, Tokenizer, adapt, printable
from tests.runtime.frontend.samples import byte_level, sentence_piece
from zoo.errors import InputError

SHARED = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXTS = st.text(st.sampled_from("ab hello.é你好😀\n</s>"), max_size=40)


@pytest.mark.parametrize("kind", ["byte-level", "sentence-piece"])
@SHARED
@given(text=TEXTS, add_special=st.booleans())
def test_ids_and_text_are_transformers(
    tmp_path_factory: pytest.TempPathFactory, kind: str, text: str, add_special: bool
) -> None:
    outer = sentence_piece() if kind == "sentence-piece" else byte_level(tmp_path_factory.getbasetemp() / "agree")
    adapted = adapt(outer)
    ids = outer(text, add_special_tokens=add_special)["input_ids"]
    assert adapted.encode(text, add_special) == ids
    assert adapted.decode(ids) == outer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@SHARED
@given(text=st.text(st.sampled_from("ab hello.é你好😀\n"), max_size=40))
def test_the_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special=False)
    joined = b"".join(tokenizer.token_bytes(id_) for id_ in ids).decode()
    assert joined.removeprefix(" " if tokenizer.byte_fallback else "") == text


def test_special_and_unknown_tokens_are_silent(tokenizer: Tokenizer) -> None:
    assert tokenizer.silent(2) and tokenizer.silent(10_000) and not tokenizer.silent(270)
    assert tokenizer.token_bytes(2) == b"</s>" and tokenizer.token_bytes(10_000) == b""


def test_a_file_that_asks_for_truncation_is_overruled(tmp_path: Path) -> None:
    outer = byte_level(tmp_path)
    outer.backend_tokenizer.enable_truncation(3)
    outer.backend_tokenizer.enable_padding(length=50)
    text = "hello world, hello world"
    adapted = adapt(outer)
    assert adapted.decode(adapted.encode(text)) == text


def test_printable() -> None:
    assert printable("é".encode()) == "é"
    assert printable(b"\xf0\x9f") == "bytes:\\xf0\\x9f"


def test_no_chat_template_is_a_400(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="chat template"):
        adapt(sentence_piece()).encode_chat([{"role": "user", "content": "x"}])


def test_a_template_that_raises_is_a_400(tmp_path: Path) -> None:
    outer = byte_level(tmp_path)
    before, outer.chat_template = outer.chat_template, "{{ raise_exception('roles must alternate') }}"
    try:
        with pytest.raises(RequestError, match="roles must alternate"):
            adapt(outer).encode_chat([{"role": "user", "content": "x"}])
    finally:
        outer.chat_template = before


def test_what_cannot_be_adapted(tmp_path: Path) -> None:
    assert isinstance(adapt(None), NoTokenizer)
    with pytest.raises(InputError, match="no fast form"):
        adapt(object())
