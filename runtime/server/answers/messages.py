"""Word answers as Anthropic's Messages do: a message of blocks, and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from runtime.frontend.assemble import Generation
from runtime.frontend.choice import TextPiece
from runtime.frontend.errors import RequestError
from runtime.server.answers.blocks import Block, BlockChange, BlockWriter, blocks_of
from runtime.server.answers.message_errors import message_error, message_refusal
from runtime.server.openai.format import Document, FinishedChoice
from runtime.server.openai.responses import dump


class MessageWording:
    """POST /v1/messages."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def whole(self, choices: Sequence[FinishedChoice]) -> Document:
        """Return the message of the one choice that there is."""
        choice = choices[0]
        content = [_content(block) for block in blocks_of(choice)]
        frame = self.frame(choice.served, len(choice.tokens), choice.cached)
        return {**frame, "content": content, **ending(choice)}

    def frame(self, served: str | None, generated: int, cached: int) -> Document:
        """Return the message without content. `served`: the model that ran, if another than requested."""
        model = self._generation.model
        instead = served or (None if model.asked is None else model.name)
        return {
            "id": self._generation.receipt.id,
            "type": "message",
            "role": "assistant",
            "model": model.asked or model.name,
            **({} if instead is None else {"served_by": instead}),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.usage(generated, cached),
        }

    def usage(self, generated: int, cached: int) -> Document:
        """Return the counts of tokens: Anthropic's `input_tokens` are those that no cache had."""
        return {
            "input_tokens": self._generation.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": generated,
        }


def ending(source: FinishedChoice | TextPiece) -> Document:
    """Return why an answer ended."""
    if source.called and source.finish == "stop":
        reason = "tool_use"
    elif source.finish == "length":
        reason = "max_tokens"
    else:
        reason = "end_turn" if source.stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": source.stop if reason == "stop_sequence" else None}


class MessageWriter(BlockWriter):
    """Writes the events of one stream."""

    def __init__(self, generation: Generation) -> None:
        super().__init__()
        self._wording = MessageWording(generation)

    def openings(self, choices: Iterable[int], cached: int = 0) -> bytes:
        """Return the event before the first token."""
        return _event("message_start", {"message": self._wording.frame(None, 0, cached)})

    def events(self, piece: TextPiece, changes: Sequence[BlockChange]) -> Iterator[bytes]:
        yield from map(_changed, changes)
        if piece.finish is not None:
            served = {} if piece.served is None else {"served_by": piece.served}
            usage = self._wording.usage(self._generated, piece.cached)
            yield _event("message_delta", {"delta": ending(piece), "usage": usage, **served})
            yield _event("message_stop", {})


def _changed(change: BlockChange) -> bytes:
    block = change.block
    if change.change == "begin":
        empty = Block(block.index, block.call, block.name)
        return _event("content_block_start", {"index": block.index, "content_block": _content(empty)})
    if change.change == "end":
        return _event("content_block_stop", {"index": block.index})
    if block.call is None:
        delta = {"type": "text_delta", "text": change.text}
    else:
        delta = {"type": "input_json_delta", "partial_json": change.text}
    return _event("content_block_delta", {"index": block.index, "delta": delta})


def _content(block: Block) -> Document:
    """Return a block of the message. The input of a call that was cut is empty: it is no JSON."""
    if block.call is None:
        return {"type": "text", "text": block.text}
    try:
        given = json.loads(block.text or "{}")
    except (ValueError, RecursionError):
        given = {}
    return {"type": "tool_use", "id": block.call, "name": block.name, "input": given}


def message_failure(error: RequestError, sent: int) -> bytes:
    """Return the event of an error in a stream."""
    return b"event: error\ndata: %b\n\n" % dump(message_refusal(error))


def reworded_refusal(status: int, document: bytes) -> bytes:
    """Return a stored error, which has OpenAI's shape, in that of messages."""
    return dump(message_error(status, json.loads(document)["error"]["message"]))


def _event(name: str, fields: Document) -> bytes:
    document = {"type": name, **fields}
    # A delta comes with every token, and has only texts and small numbers: the same bytes, in less time.
    data = msgspec.json.encode(document) if name == "content_block_delta" else dump(document)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
