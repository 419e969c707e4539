"""Turn the token events of one choice into text pieces and log-probabilities, and apply stop strings.

An `AnswerChoice` receives all events of its sequence in order; `finish` is the reason why it ended. After a stop string
the sequence may still run: the caller then aborts it. Nothing here depends on JSON or sockets.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from blake3 import blake3

from runtime.frontend.assemble import Generation
from runtime.frontend.detokenizer import detokenizer_for
from runtime.frontend.stop_strings import StopStrings
from runtime.frontend.tokenizer import Tokenizer
from runtime.frontend.tools.calls import CallPart, CallReader
from runtime.types import FinishReason, Logprob, PromptLogprobs, TokenEvent

#: Error of an answer that its grammar's limits ended: the request asked for more than is computed.
GRAMMAR_LIMITS = "the answer is not complete: following its grammar took more than the limits allow"


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token's log-probabilities.

    Fields:
        logprob: None for the first token of a prompt.
        top: The most likely tokens.
        offset: Where the token's text begins, in characters of the choice's text.
    """

    token: int
    logprob: float | None
    top: tuple[Logprob, ...]
    offset: int


class TextPiece(NamedTuple):
    """What one step added to a choice.

    Fields:
        choice: Index of the choice.
        tokens: New tokens of the answer.
        entries: Log-probabilities; empty if not requested.
        finish: Why the choice ended, None while it runs.
        cut: Whether a stop string ended the choice while its sequence still runs, so that it must be aborted.
        served: The model that ran, if another than requested.
        calls: Parts of calls of tools.
        called: Whether the answer ended with calls.
        stop: The stop string that ended the choice.
        states: The prompt's pooled hidden states, at the end, where they are asked for.
        cached: Tokens of the prompt that were not computed for this choice.
    """

    choice: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    entries: tuple[TokenEntry, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None
    cut: bool = False
    served: str | None = None
    calls: tuple[CallPart, ...] = ()
    called: bool = False
    stop: str | None = None
    states: tuple[float, ...] = ()
    cached: int = 0


class AnswerChoice:
    """The text state of one sequence.

    Attributes:
        finish: Why it ended, None while it runs.
        tokens: Tokens of the answer so far.
        cached: Tokens of the prompt that were not computed for it.
    """

    def __init__(self, generation: Generation, index: int) -> None:
        request, prompt = generation.sequences[index], generation.prompt_of(index)
        self.index = index
        self.seq = request.seq
        self.finish: FinishReason | None = None
        self.tokens = self.cached = 0
        self._served: str | None = None
        self._min_tokens = request.sampling.min_tokens
        self._model = generation.model
        self._ending = _ending_tokens(generation, index)
        self._text = detokenizer_for(generation.model.tokenizer, prompt.tokens)
        self._stops = StopStrings(generation.stops)
        self._echo = self._echoed(prompt.text, prompt.tokens) if generation.echo else ""
        self._echoed_length = len(self._echo)
        self._prompt_tokens = len(prompt.tokens)
        self._prompt = prompt.tokens if generation.echo and generation.logprobs is not None else ()
        self._wants_logprobs = generation.logprobs is not None
        self._offsets = _Offsets(generation.model.tokenizer)
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._calls = None if generation.tools is None else generation.tools.reader(partial(_call_id, request.seq))
        self._pooling = request.sampling.pooling
        self._accepts, self._answer = generation.accepts, list[str]()

    def add_events(self, events: Iterable[TokenEvent]) -> TextPiece:
        """Process all events of one step for this choice. Events after its end are ignored."""
        text, tokens, entries, error, cut = [], [], [], None, False
        for event in events:
            if self.finish is not None:
                break
            self._prompt_logprobs += event.prompt_logprobs
            self._served = event.served or self._served
            self.cached = event.cached or self.cached
            text.append(self._opening())
            entries += self._prompt_entries()
            if event.token is not None:
                tokens.append(event.token)
                entries += self._entry(event)
            text.append(self._advance(event))
            error = event.error or self._incomplete(event)
            cut = self._stops.stopped and event.finish is None
        self.tokens += len(tokens)
        piece = TextPiece(
            self.index, "".join(text), tuple(tokens), tuple(entries), self.finish, error, cut, self._served,
            cached=self.cached,
        )  # fmt: skip
        if self._stops.matched is not None:
            piece = piece._replace(stop=self._stops.matched)
        if self._pooling is not None and self.finish == "length":
            return piece._replace(states=self._pooled())
        return piece if self._calls is None else _with_calls(piece, self._calls)

    def _pooled(self) -> tuple[float, ...]:
        """Return the mean of the prompt's hidden states, or the last of them. Raises ValueError if some are missing."""
        parts = {part.start: part for part in self._prompt_logprobs if part.positions}
        wanted = self._prompt_tokens if self._pooling == "mean" else 1
        count = sum(part.positions for part in parts.values())
        if count != wanted:
            raise ValueError(f"hidden states of {count} tokens, not of {wanted}")
        sums = [memoryview(part.states).cast("f") for part in parts.values()]
        return tuple(math.fsum(values) / count for values in zip(*sums, strict=True))

    def _echoed(self, text: str | None, tokens: Sequence[int]) -> str:
        """Return the prompt's text to echo.

        For a prompt of token ids, an unfinished character at the end is left out: the answer may complete it.
        """
        if text is not None:
            return text
        whole = self._model.tokenizer.decode(tokens)
        return whole[: len(whole) - self._text.pending]

    def _opening(self) -> str:
        """Return the echoed prompt the first time, then nothing."""
        text, self._echo = self._echo, ""
        return text

    def _advance(self, event: TokenEvent) -> str:
        """Return the new text of one event. Sets `finish` if a stop string or the event itself ends the choice."""
        self._min_tokens -= event.token is not None
        silent = event.token is None or (event.finish == "stop" and event.token in self._ending)
        text = "" if silent else self._text.push(event.token or 0)
        if event.finish is not None:
            text += self._text.finish()
        if self._accepts is not None:
            self._answer.append(text)
        given = self._stops.push(text, counts=self._min_tokens < 0)
        if self._stops.stopped:
            self.finish = "stop"
        elif event.finish is not None:
            given += self._stops.finish()
            self.finish = event.finish
        return given

    def _incomplete(self, event: TokenEvent) -> str | None:
        """Return an error if the model ended an answer that its grammar does not accept, which its limits can cause."""
        if self._accepts is None or event.finish != "stop" or event.token not in self._model.spec.eos_token_ids:
            return None
        if self._stops.stopped or self._accepts("".join(self._answer)):
            return None
        self.finish = "error"
        return GRAMMAR_LIMITS

    def _entry(self, event: TokenEvent) -> list[TokenEntry]:
        if not self._wants_logprobs or event.token is None:
            return []
        return [TokenEntry(event.token, event.logprob, event.top, self._offsets.place(event.token))]

    def _prompt_entries(self) -> list[TokenEntry]:
        """Return one entry per prompt token the first time, if the prompt is echoed with log-probabilities."""
        if not self._prompt:
            return []
        known = {
            part.start + i: (chosen, top)
            for part in self._prompt_logprobs
            for i, (chosen, top) in enumerate(zip(part.chosen, part.top, strict=True))
        }
        entries = []
        for position, token in enumerate(self._prompt):
            chosen, top = known.get(position, (None, ()))
            entries.append(TokenEntry(token, chosen.logprob if chosen else None, top, self._offsets.place(token)))
        self._prompt = ()
        shift = self._offsets.settle(self._echoed_length)
        return [replace(entry, offset=max(0, entry.offset + shift)) for entry in entries]


def _with_calls(piece: TextPiece, reader: CallReader) -> TextPiece:
    """Return a piece of which the text is content only, with the parts of calls."""
    read = reader.push(piece.text, piece.tokens)
    content, parts = read.content, read.parts
    if piece.finish is not None:
        rest = reader.finish()
        content, parts = content + rest.content, [*parts, *rest.parts]
    called = reader.calls > 0 and piece.finish == "stop"
    return piece._replace(text=content, calls=tuple(parts), called=called)


def _call_id(seq: str, number: int) -> str:
    """Return the id of a call: the same one, wherever the answer is written again."""
    return f"call_{blake3(f'{seq}:{number}'.encode()).hexdigest()[:24]}"


class _Offsets:
    """Tracks where each token's text begins, in characters.

    A character of several tokens counts for the first of them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def place(self, token: int) -> int:
        begin = self._at
        if not self._tokenizer.silent(token):
            self._at += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return begin

    def settle(self, at: int) -> int:
        """Continue at character `at` and return its difference from the current offset.

        The two differ where a decoder drops a space at the start of the text.
        """
        shift, self._at = at - self._at, at
        return shift


def _ending_tokens(generation: Generation, index: int) -> frozenset[int]:
    """Return the tokens, special or not, that end the sequence and are not part of its text."""
    sampling = generation.sequences[index].sampling
    eos = () if sampling.ignore_eos else generation.model.spec.eos_token_ids
    return frozenset((*eos, *sampling.stop_token_ids))
