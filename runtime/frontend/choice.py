"""One choice of an answer: token events in, pieces of text and log-probabilities out, stop strings applied.

A `AnswerChoice` sees all events of its sequence in order and says when it has ended; who ended it (end of text, length,
a stop string) is `finish`. When a stop string ended it, the sequence may still run: the caller then aborts it. Knows
nothing of JSON or sockets.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from runtime.frontend.assemble import Generation
from runtime.frontend.detokenizer import detokenizer_for
from runtime.frontend.stop_strings import StopStrings
from runtime.frontend.tokenizer import Tokenizer
from runtime.types import FinishReason, Logprob, PromptLogprobs, TokenEvent


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token with its log-probability (None: the first of a prompt has none) and where its text begins in the choice's
    text.
    """

    token: int
    logprob: float | None
    top: tuple[Logprob, ...]
    offset: int


class TextPiece(NamedTuple):
    """What one step added to a choice. `entries` only where logprobs were asked for; `tokens` are new answer tokens.

    `cut`: a stop string ended the choice while its sequence runs on: abort it. `served`: what really ran, where that is
    not the model that was asked for.
    """

    choice: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    entries: tuple[TokenEntry, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None
    cut: bool = False
    served: str | None = None


class AnswerChoice:
    """The state of one sequence's text."""

    def __init__(self, generation: Generation, index: int) -> None:
        request, prompt = generation.sequences[index], generation.prompt_of(index)
        self.index = index
        self.seq = request.seq
        self.finish: FinishReason | None = None
        self.tokens = 0
        self._served: str | None = None
        self._min_tokens = request.sampling.min_tokens
        self._model = generation.model
        self._ending = _ending_tokens(generation, index)
        self._text = detokenizer_for(generation.model.tokenizer, prompt.tokens)
        self._stops = StopStrings(generation.stops)
        self._echo = self._echoed(prompt.text, prompt.tokens) if generation.echo else ""
        self._echoed_length = len(self._echo)
        self._prompt = prompt.tokens if generation.echo and generation.logprobs is not None else ()
        self._wants_logprobs = generation.logprobs is not None
        self._offsets = _Offsets(generation.model.tokenizer)
        self._prompt_logprobs: list[PromptLogprobs] = []

    def add_events(self, events: Iterable[TokenEvent]) -> TextPiece:
        """All events of one step that belong to this choice. After the end everything is ignored."""
        text, tokens, entries, error, cut = [], [], [], None, False
        for event in events:
            if self.finish is not None:
                break
            self._prompt_logprobs += event.prompt_logprobs
            self._served = event.served or self._served
            text.append(self._opening())
            entries += self._prompt_entries()
            if event.token is not None:
                tokens.append(event.token)
                entries += self._entry(event)
            text.append(self._advance(event))
            error = event.error
            cut = self._stops.stopped and event.finish is None
        self.tokens += len(tokens)
        return TextPiece(
            self.index, "".join(text), tuple(tokens), tuple(entries), self.finish, error, cut, self._served
        )

    def _echoed(self, text: str | None, tokens: Sequence[int]) -> str:
        """The prompt as it was given; of token ids what is final, since the answer may complete a character."""
        if text is not None:
            return text
        whole = self._model.tokenizer.decode(tokens)
        return whole[: len(whole) - self._text.pending]

    def _opening(self) -> str:
        """The echoed prompt, once."""
        text, self._echo = self._echo, ""
        return text

    def _advance(self, event: TokenEvent) -> str:
        """The new text of one event, which may end the choice by a stop string or by itself."""
        self._min_tokens -= event.token is not None
        silent = event.token is None or (event.finish == "stop" and event.token in self._ending)
        text = "" if silent else self._text.push(event.token or 0)
        if event.finish is not None:
            text += self._text.finish()
        given = self._stops.push(text, counts=self._min_tokens < 0)
        if self._stops.stopped:
            self.finish = "stop"
        elif event.finish is not None:
            given += self._stops.finish()
            self.finish = event.finish
        return given

    def _entry(self, event: TokenEvent) -> list[TokenEntry]:
        if not self._wants_logprobs or event.token is None:
            return []
        return [TokenEntry(event.token, event.logprob, event.top, self._offsets.place(event.token))]

    def _prompt_entries(self) -> list[TokenEntry]:
        """One entry per prompt token, once, where the prompt is echoed with log-probabilities."""
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


class _Offsets:
    """Where each token's text begins, in characters; a character of several tokens begins with its first."""

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
        """Go on at character `at`; how far that is from where the tokens led (a decoder may drop a space at the
        start).
        """
        shift, self._at = at - self._at, at
        return shift


def _ending_tokens(generation: Generation, index: int) -> frozenset[int]:
    """Tokens that end the sequence and are no part of its text, special or not."""
    sampling = generation.sequences[index].sampling
    eos = () if sampling.ignore_eos else generation.model.spec.eos_token_ids
    return frozenset((*eos, *sampling.stop_token_ids))
