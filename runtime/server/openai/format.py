"""Format answers as OpenAI's JSON for completions and chat completions, whole and in chunks.

Pure functions from pieces and finished choices to JSON-ready dictionaries. Both formats have the interface
`ChunkWording`; one instance is built per request. A log-probability of minus infinity becomes -9999.0, as in vLLM: JSON
has no infinity.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from runtime.frontend.assemble import Generation
from runtime.frontend.choice import TextPiece, TokenEntry
from runtime.frontend.tokenizer import printable
from runtime.frontend.tools.calls import CallPart
from runtime.types import FinishReason

_LOWEST = -9999.0
Document = dict[str, Any]


@dataclass(slots=True)
class FinishedChoice:
    """Accumulates the pieces of one choice of an unstreamed answer.

    Fields:
        text: The pieces' texts, to be joined.
        entries: Log-probabilities, if requested.
        entered: How many of them there were, by the number of texts that had come by then.
        served: The model that ran, if another than requested.
        calls: Calls of tools, as OpenAI words them.
        called: Whether the answer ended with them.
        called_at: By call, how many of the texts came before it.
        stop: The stop string that ended the choice.
        states: The prompt's pooled hidden states, where they are asked for.
        cached: Tokens of the prompt that were not computed for it.
    """

    index: int
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    entered: dict[int, int] = field(default_factory=dict)
    finish: FinishReason | None = None
    served: str | None = None
    calls: list[Document] = field(default_factory=list)
    called: bool = False
    called_at: list[int] = field(default_factory=list)
    stop: str | None = None
    states: tuple[float, ...] = ()
    cached: int = 0

    def add(self, piece: TextPiece) -> None:
        self.text.append(piece.text)
        self.tokens += piece.tokens
        if piece.entries:
            self.entries += piece.entries
            self.entered[len(self.text)] = len(self.entries)
        self.finish = piece.finish
        self.served = piece.served
        self.called = piece.called
        self.stop = piece.stop
        self.states = piece.states
        self.cached = piece.cached
        for part in piece.calls:
            if part.name is not None:
                function = {"name": part.name, "arguments": ""}
                self.called_at.append(len(self.text))
                self.calls.append({"id": part.id, "type": "function", "function": function})
            self.calls[part.index]["function"]["arguments"] += part.arguments


class Wording(Protocol):
    """Formats one request's answer as JSON."""

    def whole(self, choices: Sequence[FinishedChoice]) -> Document: ...


class ChunkWording(Wording, Protocol):
    """Formats it in chunks, too."""

    def opening(self, choice: int) -> Document | None:
        """Return the chunk that opens a choice in a stream, if the format has one."""
        ...

    def chunk(self, piece: TextPiece) -> Document: ...

    def usage_chunk(self, generated: int, cached: int) -> Document: ...


class _Common:
    """What both formats share: the outer document and the token counts."""

    def __init__(self, generation: Generation, kind: str, chunk_kind: str) -> None:
        self.generation = generation
        self._kind = kind
        self._chunk_kind = chunk_kind

    def frame(self, choices: Iterable[Document], chunk: bool, served: Iterable[str | None] = ()) -> Document:
        """Return the outer document around formatted choices.

        `served` lists, per choice, the model that ran instead of the requested one. The document gets `served_by` if it
        is the same for all of them.
        """
        kind = self._chunk_kind if chunk else self._kind
        receipt, model = self.generation.receipt, self.generation.model
        named = {"model": model.name} if model.asked is None else {"model": model.asked, "served_by": model.name}
        instead = set(served)
        if len(instead) == 1 and (name := instead.pop()) is not None:
            named["served_by"] = name
        document: Document = {
            "id": receipt.id,
            "object": kind,
            "created": receipt.created,
            **named,
            "choices": list(choices),
        }
        if chunk and self.generation.usage_chunk:
            document["usage"] = None
        return document

    def usage(self, choices: Sequence[FinishedChoice]) -> Document:
        cached = self.generation.cached_tokens([choice.cached for choice in choices])
        return self._usage(sum(len(choice.tokens) for choice in choices), cached)

    def usage_chunk(self, generated: int, cached: int) -> Document:
        return {**self.frame((), chunk=True), "usage": self._usage(generated, cached)}

    def _usage(self, generated: int, cached: int) -> Document:
        prompt = self.generation.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def printed(self, token: int) -> str:
        return printable(self.generation.model.tokenizer.token_bytes(token))


class CompletionWording(_Common):
    """POST /v1/completions."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation, "text_completion", "text_completion")

    def whole(self, choices: Sequence[FinishedChoice]) -> Document:
        worded = [
            _with_served(self._choice(c.index, "".join(c.text), c.entries, c.tokens, c.finish, whole=True), c)
            for c in choices
        ]
        return {
            **self.frame(worded, chunk=False, served=[c.served for c in choices]),
            "usage": self.usage(choices),
        }

    def opening(self, choice: int) -> Document | None:
        return None

    def chunk(self, piece: TextPiece) -> Document:
        worded = self._choice(piece.choice, piece.text, piece.entries, piece.tokens, piece.finish, whole=False)
        return self.frame([_with_served(worded, piece)], chunk=True, served=_at_end(piece))

    def _choice(
        self,
        index: int,
        text: str,
        entries: Sequence[TokenEntry],
        tokens: Sequence[int],
        finish: FinishReason | None,
        whole: bool,
    ) -> Document:
        logprobs = self._logprobs(entries) if self.generation.logprobs is not None else None
        choice: Document = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        if self.generation.return_token_ids:
            choice["token_ids"] = list(tokens)
            if whole:
                choice["prompt_token_ids"] = list(self.generation.prompt_of(index).tokens)
        return choice

    def _logprobs(self, entries: Sequence[TokenEntry]) -> Document:
        return {
            "tokens": [self.printed(entry.token) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _top(self, entry: TokenEntry) -> dict[str, float | None] | None:
        """Return the top tokens and the chosen one. Of tokens that print alike, the most likely one's value is kept."""
        if entry.logprob is None:
            return None
        worded: dict[str, float | None] = {}
        for token, logprob in (*((t.token, t.logprob) for t in entry.top), (entry.token, entry.logprob)):
            worded.setdefault(self.printed(token), _finite(logprob))
        return worded


class ChatWording(_Common):
    """POST /v1/chat/completions."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation, "chat.completion", "chat.completion.chunk")

    def whole(self, choices: Sequence[FinishedChoice]) -> Document:
        document = {
            **self.frame(map(self._choice, choices), chunk=False, served=[c.served for c in choices]),
            "usage": self.usage(choices),
        }
        if self.generation.return_token_ids:
            document["prompt_token_ids"] = list(self.generation.prompts[0].tokens)
        return document

    def opening(self, choice: int) -> Document | None:
        delta = {"role": "assistant", "content": ""}
        return self.frame([{"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}], chunk=True)

    def chunk(self, piece: TextPiece) -> Document:
        delta: Document = {"content": piece.text} if piece.text else {}
        if piece.calls:
            delta["tool_calls"] = [_call_delta(part) for part in piece.calls]
        worded = self._with_tokens({"index": piece.choice, "delta": delta}, piece, piece.finish)
        return self.frame([worded], chunk=True, served=_at_end(piece))

    def _choice(self, choice: FinishedChoice) -> Document:
        content = "".join(choice.text)
        message: Document = {"role": "assistant", "content": content, "refusal": None}
        if choice.calls:
            message |= {"content": content or None, "tool_calls": choice.calls}
        return self._with_tokens({"index": choice.index, "message": message}, choice, choice.finish)

    def _with_tokens(
        self, worded: Document, source: TextPiece | FinishedChoice, finish: FinishReason | None
    ) -> Document:
        worded["logprobs"] = (
            self._logprobs(source.entries) if self.generation.logprobs is not None and source.entries else None
        )
        worded["finish_reason"] = "tool_calls" if source.called and finish == "stop" else finish
        if self.generation.return_token_ids:
            worded["token_ids"] = list(source.tokens)
        return _with_served(worded, source)

    def _logprobs(self, entries: Sequence[TokenEntry]) -> Document:
        return {"content": logprob_documents(self.generation, entries), "refusal": None}


def logprob_documents(generation: Generation, entries: Iterable[TokenEntry]) -> list[Document]:
    """Return log-probabilities as chats and responses have them, one object per token."""
    tokenizer = generation.model.tokenizer

    def worded(token: int, logprob: float | None) -> Document:
        raw = tokenizer.token_bytes(token)
        return {"token": printable(raw), "logprob": _finite(logprob), "bytes": list(raw)}

    return [
        {**worded(entry.token, entry.logprob), "top_logprobs": [worded(t.token, t.logprob) for t in entry.top]}
        for entry in entries
    ]


def _call_delta(part: CallPart) -> Document:
    function: Document = {"arguments": part.arguments}
    if part.name is None:
        return {"index": part.index, "function": function}
    return {"index": part.index, "id": part.id, "type": "function", "function": {"name": part.name, **function}}


def _at_end(piece: TextPiece) -> tuple[str | None, ...]:
    return () if piece.finish is None else (piece.served,)


def _with_served(worded: Document, source: TextPiece | FinishedChoice) -> Document:
    """Add `served_by` to a finished choice if another model than the requested one generated it."""
    if source.finish is not None and source.served is not None:
        worded["served_by"] = source.served
    return worded


def _finite(logprob: float | None) -> float | None:
    """Return a log-probability that JSON can hold; NaN becomes the lowest value too, which `max` would not do."""
    if logprob is None:
        return None
    return logprob if logprob > _LOWEST else _LOWEST
