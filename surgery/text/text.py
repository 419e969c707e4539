"""Text for probes, training and recovery: documents in two disjoint parts, and windows of token ids drawn from them.

    text = read_text("notes.jsonl")                 # or None: the built-in text of the standard library
    windows = text.tokens(tokenizer, 128, 32, part="held_out", seed=0)        # int64 [32, 128]
    probe = Probe(text.digest, "…", windows)        # its digest covers the exact ids that a score was measured on

The same source gives the same parts, digest and windows on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from blake3 import blake3
from torch import Tensor

from surgery.text.sources import Document, library_slice, read_documents
from zoo.errors import InputError

Part = Literal["train", "held_out", "all"]

#: One document in this many is held out.
_HELD_OUT = 16
#: Characters of a piece per token of a window. A token of English or of code has about four, so a window seldom spans
#: more than three pieces, and seldom do more than two windows share a piece.
_STRIDE = 8


@dataclass(frozen=True)
class Text:
    """Documents to train on, and documents only to measure on. No document is in both.

    Fields:
        probe: The part to score models on: "all", unless models of the family may have been trained on the text.
    """

    origin: str
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    probe: Part = "all"

    @cached_property
    def digest(self) -> str:
        """BLAKE3 (64 hex digits) over both parts: equal for equal texts, wherever they were read from."""
        whole = blake3()
        for part in (self.train, self.held_out):
            whole.update(b"part")
            for document in part:
                whole.update(_hash(document))
        return whole.hexdigest()

    def part(self, name: Part) -> tuple[Document, ...]:
        """Return the documents of a part; `all` is for probes, where nothing is trained."""
        return {"train": self.train, "held_out": self.held_out, "all": self.train + self.held_out}[name]

    def tokens(self, tokenizer: Any, length: int, count: int, part: Part = "train", seed: int = 0) -> Tensor:
        """Return windows of token ids, drawn from all over the part; no two overlap.

        Args:
            tokenizer: A transformers tokenizer; None if all documents are token ids.
            length: Tokens per window. Tokens that the tokenizer puts before a text come before each piece.
            count: Maximum number of windows; fewer if the part does not hold as many.

        Returns:
            int64 [up to count, length], the same for the same arguments.

        Raises:
            InputError: The part does not hold one window, or holds text and there is no tokenizer.
        """
        if length < 1 or count < 1:
            raise InputError(f"windows of {length} tokens, {count} of them, cannot be drawn")
        windows: list[list[int]] = []
        rest: list[int] = []
        for ids in _encoded(self._places(part, length, seed), tokenizer, self.origin):
            rest += ids
            whole = min(len(rest) // length, count - len(windows))
            windows += [rest[at * length : (at + 1) * length] for at in range(whole)]
            del rest[: whole * length]
            if len(windows) == count:
                break
        if not windows:
            raise InputError(
                f"{self.origin} has too little text: one window takes {length} tokens, and {_named(part)} holds "
                f"{len(rest)}"
            )
        return torch.tensor(windows, dtype=torch.int64)

    def _places(self, part: Part, length: int, seed: int) -> list[Document]:
        """Return the part's documents in pieces, in a random order."""
        stride = _STRIDE * length
        pieces = [document[at : at + stride] for document in self.part(part) for at in range(0, len(document), stride)]
        random.Random(seed).shuffle(pieces)  # noqa: S311
        return pieces


def read_text(source: str | None = None) -> Text:
    """Return the text that a source names.

    Args:
        source: A text file; a JSONL file (`text`, `conversations`, `messages`, or `token_ids` for models without a
            tokenizer); `datasets:PATH[:CONFIG][:SPLIT]`, on the hub or local; `library:mail` for a part of the built-in
            text; None for all of it.

    Raises:
        InputError: It cannot be read, or holds no text; a bad line of a JSONL file is named by its number.
    """
    built_in = library_slice(source)
    if built_in is not None:
        return Text(source or "the built-in text", built_in.train, built_in.held_out, "held_out")
    documents = read_documents(source or "")
    if not documents:
        raise InputError(f"{source} is a probe file without text")
    return Text(source or "", *_split(documents))


def _split(documents: Sequence[Document]) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """Return (train, held out) by the documents' own hashes, so that equal documents stay together.

    A single document is trained on.
    """
    hashes = [int.from_bytes(_hash(document)[:8]) for document in documents]
    limit = max(min(hashes), (1 << 64) // _HELD_OUT)
    if max(hashes) <= limit:
        limit = min(hashes) if min(hashes) < max(hashes) else -1
    paired = list(zip(documents, hashes, strict=True))
    return tuple(d for d, number in paired if number > limit), tuple(d for d, number in paired if number <= limit)


def _hash(document: Document) -> bytes:
    if isinstance(document, str):
        return blake3(document.encode("utf-8", "surrogatepass")).digest()
    return blake3(b"ids" + b",".join(b"%d" % each for each in document)).digest()


def _encoded(documents: Iterable[Document], tokenizer: Any, origin: str) -> Iterator[Sequence[int]]:
    for document in documents:
        if not isinstance(document, str):
            yield document
        elif tokenizer is None:
            raise InputError(
                f"without a tokenizer the probe must be token ids (JSONL lines with `token_ids`), and {origin} holds "
                "text"
            )
        else:
            yield tokenizer(document, verbose=False)["input_ids"]


def _named(part: Part) -> str:
    return {"train": "its part to learn from", "held_out": "its held-out part", "all": "all of it"}[part]


@dataclass(frozen=True, eq=False)
class Probe:
    """What a score is measured on.

    Fields:
        text: Digest of the text.
        tokenizer: Digest of the tokenizer; "" without one.
        windows: Ids, int64 [n, length].
    """

    text: str
    tokenizer: str
    windows: Tensor = field(repr=False)

    @property
    def count(self) -> int:
        """Tokens in all."""
        return self.windows.numel()

    @cached_property
    def digest(self) -> str:
        """BLAKE3 (64 hex digits) over the exact token ids and the shape of the windows."""
        rows, length = self.windows.shape
        ids = self.windows.contiguous().cpu().numpy().astype("<i8").tobytes()
        return blake3(f"probe {rows} {length} ".encode() + ids).hexdigest()
