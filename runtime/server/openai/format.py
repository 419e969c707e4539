"""How answers are worded: OpenAI's JSON of completions and chat completions, whole and in chunks.

Pure: pieces and finished choices in, JSON-ready dictionaries out. Two wordings behind one interface; both are built
once per request. Log-probabilities of minus infinity become -9999.0, as vLLM does, since JSON knows no infinity.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from runtime.frontend.assemble import Generation
from runtime.frontend.choice import TextPiece, TokenEntry
from runtime.frontend.tokenizer import printable
from runtime.types import FinishReason

_LOWEST = -9999.0
Document = dict[str, Any]


@dataclass(slots=True)
class FinishedChoice:
    """A choice while it is collected, then whole."""

    index: int
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish: FinishReason | None = None
    served: str | None = None

    def add(self, piece: TextPiece) -> None:
        self.text.append(piece.text)
        self.tokens += piece.tokens
        self.entries += piece.entries
        self.finish = piece.finish
        self.served = piece.served


class Wording(Protocol):
    """One request's answer in JSON."""

    def whole(self, choices: Sequence[FinishedChoice]) -> Document: ...

    def opening(self, choice: int) -> Document | None:
        """The chunk that opens a choice in a stream, where there is one."""
        ...

    def chunk(self, piece: TextPiece) -> Document: ...

    def usage_chunk(self, generated: int) -> Document: ...


def wording_for(generation: Generation) -> Wording:
    return ChatWording(generation) if generation.chat else CompletionWording(generation)


class _Common:
    """What both share: the frame of a document, and the token counts."""

    def __init__(self, generation: Generation, kind: str, chunk_kind: str) -> None:
        self.generation = generation
        self._kind = kind
        self._chunk_kind = chunk_kind

    def frame(self, choices: Iterable[Document], chunk: bool, served: Iterable[str | None] = ()) -> Document:
        """`served`: what ran instead of the model for each of the choices; the document says it where that is one for
        all of them.
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

    def usage(self, generated: int) -> Document:
        prompt = self.generation.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    def usage_chunk(self, generated: int) -> Document:
        return {**self.frame((), chunk=True), "usage": self.usage(generated)}

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
            "usage": self.usage(sum(len(c.tokens) for c in choices)),
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
        """The likeliest tokens and the chosen one; tokens that print alike keep the likeliest's value."""
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
            "usage": self.usage(sum(len(c.tokens) for c in choices)),
        }
        if self.generation.return_token_ids:
            document["prompt_token_ids"] = list(self.generation.prompts[0].tokens)
        return document

    def opening(self, choice: int) -> Document | None:
        delta = {"role": "assistant", "content": ""}
        return self.frame([{"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}], chunk=True)

    def chunk(self, piece: TextPiece) -> Document:
        delta = {"content": piece.text} if piece.text else {}
        worded = self._with_tokens({"index": piece.choice, "delta": delta}, piece, piece.finish)
        return self.frame([worded], chunk=True, served=_at_end(piece))

    def _choice(self, choice: FinishedChoice) -> Document:
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        return self._with_tokens({"index": choice.index, "message": message}, choice, choice.finish)

    def _with_tokens(
        self, worded: Document, source: TextPiece | FinishedChoice, finish: FinishReason | None
    ) -> Document:
        worded["logprobs"] = (
            self._logprobs(source.entries) if self.generation.logprobs is not None and source.entries else None
        )
        worded["finish_reason"] = finish
        if self.generation.return_token_ids:
            worded["token_ids"] = list(source.tokens)
        return _with_served(worded, source)

    def _logprobs(self, entries: Sequence[TokenEntry]) -> Document:
        content = []
        for entry in entries:
            top = [self._token(t.token, t.logprob) for t in entry.top]
            content.append({**self._token(entry.token, entry.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float | None) -> Document:
        raw = self.generation.model.tokenizer.token_bytes(token)
        return {"token": printable(raw), "logprob": _finite(logprob), "bytes": list(raw)}


def _at_end(piece: TextPiece) -> tuple[str | None, ...]:
    return () if piece.finish is None else (piece.served,)


def _with_served(worded: Document, source: TextPiece | FinishedChoice) -> Document:
    """A choice that another model has made than the one that was asked for says so at its end."""
    if source.finish is not None and source.served is not None:
        worded["served_by"] = source.served
    return worded


def _finite(logprob: float | None) -> float | None:
    """Also NaN becomes the lowest value: `max` would pass it on."""
    if logprob is None:
        return None
    return logprob if logprob > _LOWEST else _LOWEST
