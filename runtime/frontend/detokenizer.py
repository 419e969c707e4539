"""Text of a growing sequence, piece by piece. The pieces joined are exactly the text of all tokens decoded at once.

Why a window: a tokenizer decodes in context (a SentencePiece decoder drops the space before the first token, a
character may need several tokens), so the last tokens are decoded together with a few before them, and what was given
out already is skipped. vLLM and tokenizers' DecodeStream do the same with two offsets; here the number of characters
given out takes their place, so that bytes which never become a character are given out too, and the window stays short
whatever comes.

Held back: (1) one U+FFFD at the end, which is how an unfinished UTF-8 character looks in a byte-level tokenizer (all
before it is
final: replacement works on maximal subparts); (2) a run of byte-fallback tokens (`<0xE4>`) until it ends, because their
decoder turns the whole run into text or, when any of it is no UTF-8, each byte into U+FFFD.

Where the text is the tokens' bytes and nothing else (byte-level: GPT-2's, Llama 3's, Qwen's) no window is needed: a
decoder of UTF-8 goes on from byte to byte.

Knows nothing of stop strings, requests or logprobs.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from runtime.frontend.tokenizer import REPLACEMENT, Tokenizer

#: Tokens kept as context. A UTF-8 character has at most four bytes, so a decoder that starts anywhere is back in step
#: with the true text after three tokens; twice that leaves room for tokens without text.
_KEEP = 8


class Detokenizer(Protocol):
    """Text of one sequence."""

    @property
    def pending(self) -> int:
        """Characters, as they would be decoded now, that are held back."""
        ...

    def push(self, token: int) -> str:
        """The text that this token made final; often empty."""
        ...

    def finish(self) -> str:
        """What was held back, as it is: the sequence has ended."""
        ...


def detokenizer_for(tokenizer: Tokenizer, context: Sequence[int] = ()) -> Detokenizer:
    """`context`: tokens before the first one, whose text is not given out (a prompt); only its end is looked at."""
    return ByteDetokenizer(tokenizer, context) if tokenizer.bytewise else WindowDetokenizer(tokenizer, context)


class ByteDetokenizer:
    """For tokenizers that are `bytewise`. Held back: an unfinished character.

    Python's decoder, like Rust's, puts one U+FFFD for each maximal part of a character that goes no further.
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
    """For any tokenizer.

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
        """Characters of the window that are final. A broken run of byte tokens may still become text, all of it."""
        text = self._tokenizer.decode(self._window)
        open_run = bool(self._window) and self._window[-1] in self._tokenizer.byte_fallback
        return len(text.rstrip(REPLACEMENT) if open_run else _final(text))

    def _tail(self, tokens: list[int]) -> list[int]:
        """The last tokens; a run of byte tokens at the very end stays whole, since it may go on."""
        start = max(0, len(tokens) - _KEEP)
        if tokens and tokens[-1] in self._tokenizer.byte_fallback:
            while start > 0 and tokens[start - 1] in self._tokenizer.byte_fallback:
                start -= 1
        return tokens[start:]


def _final(text: str) -> str:
    """The part of a decoded text that later tokens cannot change."""
    return text.removesuffix(REPLACEMENT)
