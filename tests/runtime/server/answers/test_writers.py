"""Events of streams are JSON as all other answers are, whatever their texts hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime.frontend.apis.messages import MessageBody
from runtime.frontend.apis.responses import ResponseBody
from runtime.frontend.assemble import Generation, Prompt, Receipt
from runtime.frontend.choice import TextPiece
from runtime.frontend.schemas import rebuilt
from runtime.frontend.served_models import ServedModel
from runtime.frontend.tokenizer import NoTokenizer
from runtime.server.answers.forms import form_of, writer_of
from runtime.server.openai.responses import dump
from runtime.types import SamplingParams, SequenceRequest
from tests.runtime.server.harness import BASE

HUGE: Any = {"type": "object", "properties": {"x": {"maximum": 10**40}}}


@pytest.mark.parametrize(
    "asked",
    [
        rebuilt(
            ResponseBody,
            {
                "model": "m",
                "input": "hi",
                "text": {"format": {"type": "json_schema", "schema": HUGE}},
                "temperature": 0.1,
            },
        ),
        rebuilt(MessageBody, {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_each_event_is_what_a_document_would_be(asked: Any) -> None:
    sequence = SequenceRequest("a/0", "a", BASE.name, (5,), SamplingParams(2))
    model = ServedModel(BASE, NoTokenizer())
    generation = Generation(Receipt("resp_a", 1), True, model, (Prompt((5,)),), (sequence,), stream=True, asked=asked)
    writer = writer_of(form_of(generation), generation)
    texts = ['"\\/\b\f\n\r\t', "\x00\x1f\x7f\x80", "é你\U0001f600\u2028\ufffd", "</script>"]
    pieces = [TextPiece(0, text, (7,)) for text in texts]
    stream = writer.openings(range(1)) + writer.write_pieces([*pieces, TextPiece(0, "", (), finish="stop")])
    events = [block.split(b"\n") for block in stream.split(b"\n\n") if block]
    shown = []
    for name, data in events:
        document = json.loads(data.removeprefix(b"data: "))
        assert data == b"data: " + dump(document) and name == b"event: " + document["type"].encode()
        delta = document.get("delta", {})
        shown.append(delta if isinstance(delta, str) else delta.get("text", ""))
    assert "".join(shown) == "".join(texts)
