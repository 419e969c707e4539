"""The bytes of a stream equal those of its whole documents, though repeated parts are rendered once."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import runtime.server.openai.sse as events
from runtime.frontend.assemble import Generation, Limits, Receipt, assemble_chat, assemble_completion
from runtime.frontend.choice import TextPiece, TokenEntry
from runtime.frontend.schemas import ChatBody, ChatMessage, CompletionBody, StreamOptions
from runtime.frontend.served_models import ServedModel
from runtime.frontend.tokenizer import Tokenizer
from runtime.server.openai.format import ChatWording, ChunkWording, CompletionWording
from runtime.server.openai.responses import dump
from runtime.server.openai.sse import ChunkWriter
from runtime.types import ModelSpec

PIECES = st.builds(
    TextPiece,
    choice=st.integers(0, 2),
    text=st.one_of(
        st.text(max_size=6), st.sampled_from(["", "\x00", '"', "\\u0000", "[-1]", "你\n", "</s>", "\u2028"])
    ),
    tokens=st.lists(st.integers(0, 300), max_size=3).map(tuple),
    entries=st.sampled_from([(), (TokenEntry(5, -0.5, (), 0),)]),
    finish=st.sampled_from([None, None, None, "stop", "length"]),
)
NAMES = ["org/base", 'quo"te\\', "\x00", "[-1]", '"\x00"', "münchen/你"]
SHARED = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def generation(tokenizer: Tokenizer, name: str, chat: bool, **fields: object) -> Generation:
    model, receipt = ServedModel(ModelSpec(name, 1, 16, 4096, 400), tokenizer), Receipt("cmpl-1", 12)
    common = {"model": name, "max_tokens": 9, "n": 3, "stream": True, **fields}
    if chat:
        return assemble_chat(
            ChatBody(messages=[ChatMessage(role="user", content="hi")], **common), model, receipt, Limits()
        )
    return assemble_completion(CompletionBody(prompt=[5], **common), model, receipt, Limits())


def wording_for(asked: Generation) -> ChunkWording:
    return ChatWording(asked) if asked.chat else CompletionWording(asked)


def worded(wording: ChunkWording, piece: TextPiece, token_ids: bool) -> bytes:
    """Render the whole document at every step, as the reference."""
    says = piece.text or piece.entries or piece.calls or piece.finish is not None or (token_ids and piece.tokens)
    return b"data: " + dump(wording.chunk(piece)) + b"\n\n" if says else b""


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("name", NAMES)
@SHARED
@given(pieces=st.lists(PIECES, max_size=5), token_ids=st.booleans(), usage=st.booleans())
def test_chunks_are_their_documents(
    tokenizer: Tokenizer, chat: bool, name: str, pieces: list[TextPiece], token_ids: bool, usage: bool
) -> None:
    asked = generation(
        tokenizer, name, chat, return_token_ids=token_ids, stream_options=StreamOptions(include_usage=usage)
    )
    wording = wording_for(asked)
    assert ChunkWriter(wording, token_ids).write_pieces(pieces) == b"".join(
        worded(wording, piece, token_ids) for piece in pieces
    )


def test_what_repeats_is_worded_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    wordings = []
    monkeypatch.setattr(events, "dump", lambda document: wordings.append(document) or dump(document))
    chunks = ChunkWriter(wording_for(generation(tokenizer, "m", chat=False)), token_ids=False)
    stream = b"".join(chunks.write_pieces([TextPiece(0, text, (5,))]) for text in "abcdef")
    assert [json.loads(line[6:])["choices"][0]["text"] for line in stream.split(b"\n\n") if line] == [*"abcdef"]
    assert len(wordings) == 1


def test_openings_are_chats_only(tokenizer: Tokenizer) -> None:
    chat = ChunkWriter(wording_for(generation(tokenizer, "m", chat=True)), token_ids=False).openings(range(2))
    assert [json.loads(line[6:])["choices"][0]["index"] for line in chat.split(b"\n\n") if line] == [0, 1]
    assert ChunkWriter(wording_for(generation(tokenizer, "m", chat=False)), token_ids=False).openings(range(2)) == b""
