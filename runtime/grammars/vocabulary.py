"""A model's vocabulary as llguidance needs it: the bytes of each token, and which tokens have no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class TokenBytes(Protocol):
    """What is needed of a tokenizer (`runtime.frontend.tokenizer.Tokenizer`)."""

    def silent(self, token: int) -> bool: ...

    def token_bytes(self, token: int) -> bytes: ...


def vocabulary_of(tokenizer: TokenBytes, size: int, ends: Sequence[int]) -> LLTokenizer:
    """Return the vocabulary of a model. It takes 0.2 s for 50,000 tokens, so that it is made once per vocabulary.

    Args:
        size: Number of the model's logits; ids that the tokenizer does not know are never allowed.
        ends: Ids that end an answer; at least one.
    """
    texts: list[bytes] = []
    special: list[int] = []
    for token in range(size):
        text = tokenizer.token_bytes(token)
        if tokenizer.silent(token) or not text:
            special.append(token)
            text = text or b"<unused %d>" % token
        texts.append(text)
    return _made(texts, special, ends)


def bytes_vocabulary() -> LLTokenizer:
    """Return the vocabulary of single bytes, with 256 as the end, by which grammars are checked for any model."""
    return _made([bytes([value]) for value in range(256)] + [b"<end>"], [256], [256])


def _made(texts: list[bytes], special: list[int], ends: Sequence[int]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Texts(ends[0], None, texts, special)), eos_token=list(ends))


@dataclass(frozen=True)
class _Texts:
    """The interface that llguidance expects of a tokenizer."""

    eos_token_id: int
    bos_token_id: int | None
    tokens: list[bytes]
    special_token_ids: list[int]

    def __call__(self, text: bytes) -> list[int]:
        """Return token ids of a text; only needed to run ahead of the model, which is not done."""
        raise ValueError("texts are not tokenized here")
