"""Word answers as OpenAI's Responses API does: a document of items, and the typed events of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from runtime.frontend.apis.responses import InputItem, ResponseBody
from runtime.frontend.assemble import Generation
from runtime.frontend.choice import TextPiece, TokenEntry
from runtime.frontend.errors import RequestError
from runtime.server.answers.blocks import Block, BlockChange, BlockWriter, blocks_of
from runtime.server.openai.format import Document, FinishedChoice, logprob_documents
from runtime.server.openai.responses import dump

PREFIX = "resp_"
_DELTAS = frozenset({"response.output_text.delta", "response.function_call_arguments.delta"})


class ResponseWording:
    """POST /v1/responses."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._name = generation.receipt.id.removeprefix(PREFIX)

    def whole(self, choices: Sequence[FinishedChoice]) -> Document:
        """Return the response of the one choice that there is."""
        choice = choices[0]
        return self.document(blocks_of(choice), choice, len(choice.tokens))

    def document(self, blocks: Sequence[Block], end: FinishedChoice | TextPiece, generated: int) -> Document:
        """Return the response with all of its items."""
        cut = end.finish == "length"
        items = [self.item(block, "completed") for block in blocks]
        if cut:
            items[-1]["status"] = "incomplete"
        prompt = self._generation.prompt_tokens
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": end.cached},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + generated,
        }
        return {
            **self.frame("incomplete" if cut else "completed", end.served),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items,
            "usage": usage,
        }

    def frame(self, status: str, served: str | None = None) -> Document:
        """Return the response without items. `served`: the model that ran, if another than requested."""
        receipt, model = self._generation.receipt, self._generation.model
        body = self._generation.asked
        if not isinstance(body, ResponseBody):
            raise TypeError(type(body).__name__)
        instead = served or (None if model.asked is None else model.name)
        return response_frame(body, receipt.id, receipt.created, model.asked or model.name, status) | (
            {} if instead is None else {"served_by": instead}
        )

    def item(self, block: Block, status: str) -> Document:
        """Return one item of the output."""
        if block.call is None:
            return {
                "id": self.item_id(block),
                "type": "message",
                "status": status,
                "role": "assistant",
                "content": [] if status == "in_progress" else [self.part(block)],
            }
        return {
            "id": self.item_id(block),
            "type": "function_call",
            "status": status,
            "call_id": block.call,
            "name": block.name,
            "arguments": "" if status == "in_progress" else block.text,
        }

    def part(self, block: Block) -> Document:
        """Return the content of a message."""
        return text_part(block.text, self.logprobs(block.entries))

    def logprobs(self, entries: Iterable[TokenEntry]) -> list[Document]:
        return logprob_documents(self._generation, entries)

    def item_id(self, block: Block) -> str:
        return f"{'msg' if block.call is None else 'fc'}_{self._name}_{block.index}"


def response_frame(body: ResponseBody, id: str, created: int, model: str, status: str) -> Document:
    """Return a response to a body, without items. `created`: Unix seconds."""
    given = body.model_dump(include={"tools", "text"}, by_alias=True, exclude_unset=True)
    choice = body.tool_choice or "auto"
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "status": status,
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "store": bool(body.store),
        "temperature": body.temperature,
        "text": given.get("text") or {"format": {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": given.get("tools") or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def input_item_document(response: str, at: int, item: InputItem) -> Document:
    """Return an item of a kept response's input, with an id of its own; `at`: its place in the input."""
    name = f"{response.removeprefix(PREFIX)}_{at}"
    given: Document = item.model_dump(exclude_none=True)
    if item.kind != "message":
        prefix = "fc" if item.kind == "function_call" else "fco"
        return {**given, "id": f"{prefix}_in_{name}", "status": "completed"}
    texts = [item.content] if isinstance(item.content, str) else [part.text for part in item.content or ()]
    kind = "output_text" if item.role == "assistant" else "input_text"
    content: list[Document] = [
        {"type": kind, "text": text} | ({"annotations": []} if kind == "output_text" else {}) for text in texts
    ]
    return {
        "type": "message", "id": f"msg_in_{name}", "role": item.role, "status": "completed", "content": content
    }  # fmt: skip


class ResponseWriter(BlockWriter):
    """Writes the events of one stream."""

    def __init__(self, generation: Generation) -> None:
        super().__init__()
        self.early = isinstance(generation.asked, ResponseBody) and bool(generation.asked.background)
        self._wording = ResponseWording(generation)
        self._number = 0

    def openings(self, choices: Iterable[int], cached: int = 0) -> bytes:
        """Return the events before the first token."""
        frame = self._wording.frame("in_progress")
        return b"".join(self._event(name, {"response": frame}) for name in ("response.created", "response.in_progress"))

    def events(self, piece: TextPiece, changes: Sequence[BlockChange]) -> Iterator[bytes]:
        for number, change in enumerate(changes):
            cut = piece.finish == "length" and number == len(changes) - 1
            yield from (self._event(name, fields) for name, fields in self._changed(change, cut))
        if piece.finish is not None:
            whole = self._wording.document(self._reader.blocks, piece, self._generated)
            yield self._event(f"response.{whole['status']}", {"response": whole})

    def _changed(self, change: BlockChange, cut: bool) -> Iterator[tuple[str, Document]]:
        block = change.block
        place: Document = {"item_id": self._wording.item_id(block), "output_index": block.index}
        inner = place if block.call is not None else {**place, "content_index": 0}
        if change.change == "begin":
            item = self._wording.item(block, "in_progress")
            yield "response.output_item.added", {"output_index": block.index, "item": item}
            if block.call is None:
                yield "response.content_part.added", {**inner, "part": text_part("")}
        elif change.change == "more" and block.call is None:
            logprobs = self._wording.logprobs(change.entries)
            yield "response.output_text.delta", {**inner, "delta": change.text, "logprobs": logprobs}
        elif change.change == "more":
            yield "response.function_call_arguments.delta", {**inner, "delta": change.text}
        else:
            if block.call is None:
                part = self._wording.part(block)
                yield "response.output_text.done", {**inner, "text": block.text, "logprobs": part["logprobs"]}
                yield "response.content_part.done", {**inner, "part": part}
            else:
                done = {**inner, "name": block.name, "arguments": block.text}
                yield "response.function_call_arguments.done", done
            item = self._wording.item(block, "incomplete" if cut else "completed")
            yield "response.output_item.done", {"output_index": block.index, "item": item}

    def _event(self, name: str, fields: Document) -> bytes:
        number, self._number = self._number, self._number + 1
        return _named({"type": name, "sequence_number": number, **fields})


def response_failure(error: RequestError, sent: int) -> bytes:
    """Return the event of an error in a stream of which so many events were sent."""
    code = error.code or error.kind
    return _named({"type": "error", "sequence_number": sent, "code": code, "message": str(error), "param": error.param})


def text_part(text: str, logprobs: Sequence[Document] = ()) -> Document:
    return {"type": "output_text", "annotations": [], "logprobs": list(logprobs), "text": text}


def _named(document: Document) -> bytes:
    name = document["type"]
    # A delta comes with every token, and has only texts and small numbers: the same bytes, in less time.
    plain = name in _DELTAS and not document.get("logprobs")
    data = msgspec.json.encode(document) if plain else dump(document)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
