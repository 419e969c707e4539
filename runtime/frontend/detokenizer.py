"""Incremental detokenization: the text of a growing sequence, piece by piece.

The pieces joined are exactly the text of all tokens decoded at once. A tokenizer decodes in context (a SentencePiece
decoder drops the space before the first token, a character may need several tokens). So the last tokens are decoded
together with a few before them, and the characters that were already returned are skipped.

vLLM and tokenizers' DecodeStream do the same with two token offsets. Counting returned characters instead also returns
bytes that never become a character, and keeps the window short in every case.

Held back until final:
1. One U+FFFD at the end, which is how an unfinished UTF-8 character looks in a byte-level tokenizer. All before it is
   final, since each U+FFFD replaces a maximal subpart.
2. A run of byte-fallback tokens (`<0xE4>`) until it ends: the decoder turns the whole run into text or, if it is not
   valid UTF-8, each byte into U+FFFD.

Where the text is just the tokens' bytes (byte-level tokenizers: GPT-2, Llama 3, Qwen) an incremental UTF-8 decoder
replaces the window. Nothing here depends on stop strings, requests or log-probabilities.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from runtime.frontend.tokenizer import REPLACEMENT, Tokenizer

#: Tokens kept as context. A UTF-8 character has at most four bytes, so a decoder that starts anywhere is in step with
#: the true text after three tokens; twice that leaves room for tokens without text.
_KEEP = 8


class Detokenizer(Protocol):
    """Decodes one sequence incrementally."""

    @property
    def pending(self) -> int:
        """How many characters, as they would be decoded now, are held back."""
        ...

    def push(self, token: int) -> str:
        """Return the text that this token made final; often empty."""
        ...

    def finish(self) -> str:
        """Return the text held back, as it is. Call it when the sequence has ended."""
        ...


def detokenizer_for(tokenizer: Tokenizer, context: Sequence[int] = ()) -> Detokenizer:
    """Return the detokenizer for a tokenizer.

    `context` are the tokens before the first one (a prompt). Their text is not returned; only the last of them are
    used.
    """
    return ByteDetokenizer(tokenizer, context) if tokenizer.bytewise else WindowDetokenizer(tokenizer, context)


class ByteDetokenizer:
    """Detokenizer for `bytewise` tokenizers. Holds back an unfinished character.

    Python's decoder, like Rust's, emits one U+FFFD for each maximal part of an invalid character.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in context[-4 * _KEEP :]:
            self.push(token)

    @property
    def pending(self) -> int:
        return int(bool(self._decoder.getstate()[0]))

    def push(self, token: int) -> str:
        return "" if self._tokenizer.silent(token) else self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """Detokenizer for any tokenizer.

    Cost: one decode of at most 2 * _KEEP tokens per token (a run of byte tokens is decoded once, at its end).
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = self._tail([token for token in context[-4 * _KEEP :] if not tokenizer.silent(token)])
        self._given = self._count()

    @property
    def pending(self) -> int:
        return max(0, len(self._tokenizer.decode(self._window)) - self._given)

    def push(self, token: int) -> str:
        if self._tokenizer.silent(token):
            return ""
        self._window.append(token)
        if token in self._tokenizer.byte_fallback:
            return ""
        text = _final(self._tokenizer.decode(self._window))
        new = text[self._given :]
        self._given = max(self._given, len(text))
        self._shorten()
        return new

    def finish(self) -> str:
        text = self._tokenizer.decode(self._window)
        new = text[self._given :]
        self._given = len(text)
        return new

    def _shorten(self) -> None:
        if len(self._window) >= 2 * _KEEP:
            self._window = self._tail(self._window)
            self._given = self._count()

    def _count(self) -> int:
        """Return how many characters of the window are final.

        An unfinished run of byte tokens may still become other text.
        """
        text = self._tokenizer.decode(self._window)
        open_run = bool(self._window) and self._window[-1] in self._tokenizer.byte_fallback
        return len(text.rstrip(REPLACEMENT) if open_run else _final(text))

    def _tail(self, tokens: list[int]) -> list[int]:
        """Return the last tokens. A run of byte tokens at the end is kept whole, since it may continue."""
        start = max(0, len(tokens) - _KEEP)
        if tokens and tokens[-1] in self._tokenizer.byte_fallback:
            while start > 0 and tokens[start - 1] in self._tokenizer.byte_fallback:
                start -= 1
        return tokens[start:]


def _final(text: str) -> str:
    """Return the part of a decoded text that later tokens cannot change."""
    return text.removesuffix(REPLACEMENT)
