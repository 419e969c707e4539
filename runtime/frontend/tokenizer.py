"""The tokenizer interface of the frontend, and its implementation over the library `tokenizers`.

Text is decoded without special tokens and without clean-up of spaces, as in vLLM, so that it depends on the ids alone.
Neither transformers nor tokenizers is imported: the adapter gets a loaded core from `runtime.frontend.tokenizer_files`
or from transformers. Safe to call from several threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from runtime.frontend.chat_template import ChatTemplate, TemplateRefused, chosen_template
from runtime.frontend.errors import RequestError
from zoo.errors import InputError

REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """Converts between text and token ids.

    Properties:
        byte_fallback: Ids of single bytes; their text depends on the adjacent bytes.
        bytewise: Whether the text of ids is the joined `token_bytes` of those that are not silent, decoded as UTF-8.
    """

    @property
    def byte_fallback(self) -> frozenset[int]: ...

    @property
    def bytewise(self) -> bool: ...

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Return the text of `ids`, with `special` that of special tokens too. Invalid UTF-8 becomes U+FFFD."""
        ...

    @property
    def chat_source(self) -> str:
        """The source of the chat template, empty without one."""
        ...

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with a text, None if no special token has it."""
        ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Return the ids of a conversation up to the assistant's turn, with the tools that it may call.

        Raises RequestError without a usable chat template.
        """
        ...

    def silent(self, token: int) -> bool:
        """Return whether a token never has text: it is special, or unknown (vocabularies are often padded)."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, independent of context; empty for unknown ids."""
        ...


class NoTokenizer:
    """Used for a model without a tokenizer: it takes and returns token ids only."""

    byte_fallback: frozenset[int] = frozenset()
    bytewise = False
    chat_source = ""

    def special_id(self, text: str) -> int | None:
        return None

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        raise RequestError("this model has no tokenizer: give the prompt as token ids", param="prompt")

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        return ""

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        raise RequestError(
            "this model has no tokenizer, so no chat: give token ids to /v1/completions", param="messages"
        )

    def silent(self, token: int) -> bool:
        return True

    def token_bytes(self, token: int) -> bytes:
        return b""


class FastTokenizer:
    """A tokenizer of the library `tokenizers`, called directly.

    transformers' own call sets truncation on each use, which is not thread-safe.
    """

    def __init__(self, core: Any, chat: ChatTemplate | None) -> None:
        self._inner = core
        self._chat = chat
        self._inner.no_truncation()
        self._inner.no_padding()
        added = self._inner.get_added_tokens_decoder()
        self._added: dict[int, str] = {id_: token.content for id_, token in added.items()}
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        self.byte_fallback = frozenset(self._byte_tokens())
        decoders = _decoder_types(self._inner.decoder)
        self._byte_level = "ByteLevel" in decoders
        self.bytewise = decoders == {"ByteLevel"}
        # Caches of `silent` and `token_bytes`, which are called for each generated token. At most one entry per id.
        self._silent: dict[int, bool] = {}
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the ids of a text. The batch call is used because it releases the GIL while it works."""
        encoding = self._inner.encode_batch_fast([text], add_special_tokens=add_special)[0]
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=not special))

    @property
    def chat_source(self) -> str:
        return "" if self._chat is None else self._chat.source

    def special_id(self, text: str) -> int | None:
        return next((id_ for id_ in self._special if self._added[id_] == text), None)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        if self._chat is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions", param="messages", code="no_chat_template"
            )
        try:
            text = self._chat.render(messages, **({} if tools is None else {"tools": [dict(tool) for tool in tools]}))
        except TemplateRefused as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {str(error)[:300]}", param="messages"
            ) from error
        # A template contains its own special tokens, so none are added.
        return self.encode(text, add_special=False)

    def silent(self, token: int) -> bool:
        known = self._silent.get(token)
        if known is None:
            known = self._silent[token] = token in self._special or self._inner.id_to_token(token) is None
        return known

    def token_bytes(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._stands_for(token)
        return known

    def _stands_for(self, token: int) -> bytes:
        piece = self._added.get(token) or self._inner.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:  # added tokens too: they pass through the same decoder
            return _from_byte_level(piece)
        if token in self._added:
            return str(piece).encode()
        if token in self.byte_fallback:
            return bytes([int(piece[3:5], 16)])
        return str(piece).replace("\u2581", " ").encode()

    def _byte_tokens(self) -> Iterator[int]:
        for value in range(256):
            id_ = self._inner.token_to_id(f"<0x{value:02X}>")
            if id_ is not None:
                yield id_


def adapt(tokenizer: Any | None) -> Tokenizer:
    """Return the adapter for a tokenizer of transformers, `NoTokenizer` for None.

    Raises InputError for tokenizers without a Rust core or without a vocabulary.
    """
    if tokenizer is None:
        return NoTokenizer()
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        raise InputError(f"{type(tokenizer).__name__} has no fast form (tokenizer.json); convert the tokenizer first")
    source = chosen_template(tokenizer.chat_template)
    return adapt_core(inner, ChatTemplate(source, tokenizer.special_tokens_map) if source else None)


def adapt_core(core: Any, chat: ChatTemplate | None) -> Tokenizer:
    """Return the adapter for a Rust core and a template. Raises InputError for one without a vocabulary."""
    if core.get_vocab_size(with_added_tokens=False) == 0:
        raise InputError("the tokenizer has no vocabulary")
    return FastTokenizer(core, chat)


def printable(token: bytes) -> str:
    r"""Return a token as text, or `bytes:\xe2\x82` as OpenAI does for bytes that are not valid UTF-8 on their own."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{value:02x}" for value in token)


def _decoder_types(decoder: Any) -> set[str]:
    """Return the type names of the decoder's parts, read from its serialized form."""
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {part["type"] for part in (state, *state.get("decoders", ()))}


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's map of bytes to printable characters, inverted.

    Printable bytes map to themselves; all other bytes map to code points from 256 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in visible]
    return {chr(value): value for value in visible} | {chr(256 + i): value for i, value in enumerate(hidden)}


_ALPHABET = _byte_level_alphabet()


def _from_byte_level(piece: str) -> bytes:
    if all(character in _ALPHABET for character in piece):
        return bytes(_ALPHABET[character] for character in piece)
    return piece.encode()
