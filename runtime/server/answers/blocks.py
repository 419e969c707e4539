"""The blocks of an answer: runs of text, and calls of tools, in the order in which they came.

Formats that number the parts of an answer are written from them: from a finished choice, or from pieces as they come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from runtime.frontend.choice import TextPiece
from runtime.server.openai.format import FinishedChoice


@dataclass(slots=True)
class Block:
    """A run of text, or a call with its arguments as text.

    Fields:
        index: Its place in the answer, from 0 on.
        call, name: Id of a call and name of its function; None for text.
    """

    index: int
    call: str | None = None
    name: str | None = None
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlockChange(NamedTuple):
    """A block begins, gets more text, or ends."""

    change: Literal["begin", "more", "end"]
    block: Block
    text: str = ""


class BlockReader:
    """Reads the blocks of a choice from its pieces. `blocks`: those so far."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def read(self, piece: TextPiece) -> Iterator[BlockChange]:
        """Yield what a piece changes. An answer without text and calls has one empty block of text."""
        if piece.text:
            if self._open is None or self._open.call is not None:
                yield from self._begin(None, None)
            yield self._more(piece.text)
        for part in piece.calls:
            if part.name is not None:
                yield from self._begin(part.id, part.name)
            if part.arguments:
                yield self._more(part.arguments)
        if piece.finish is not None:
            if not self.blocks:
                yield from self._begin(None, None)
            yield from self._end()

    def _begin(self, call: str | None, name: str | None) -> Iterator[BlockChange]:
        yield from self._end()
        self._open = Block(len(self.blocks), call, name)
        self.blocks.append(self._open)
        yield BlockChange("begin", self._open)

    def _more(self, text: str) -> BlockChange:
        block = self.blocks[-1]
        block.parts.append(text)
        return BlockChange("more", block, text)

    def _end(self) -> Iterator[BlockChange]:
        if self._open is not None:
            yield BlockChange("end", self._open)
            self._open = None


class BlockWriter:
    """Writes the stream of an answer by its blocks; a form of answers says what each change becomes (`events`)."""

    def __init__(self) -> None:
        self._reader = BlockReader()
        self._generated = 0

    def write_pieces(self, pieces: Iterable[TextPiece]) -> bytes:
        """Return the events of pieces; behind the last one, those of the answer's end."""
        return b"".join(data for piece in pieces for data in self._written(piece))

    def usage(self, generated: int) -> bytes:
        """Return nothing: the last events have the counts."""
        return b""

    def events(self, piece: TextPiece, changes: Sequence[BlockChange]) -> Iterator[bytes]:
        """Yield the events of a piece and of what it changes."""
        raise NotImplementedError

    def _written(self, piece: TextPiece) -> Iterator[bytes]:
        self._generated += len(piece.tokens)
        return self.events(piece, list(self._reader.read(piece)))


def blocks_of(choice: FinishedChoice) -> list[Block]:
    """Return the blocks of a whole choice: those that its pieces would give."""
    found: list[Block] = []
    at = 0

    def add_text(end: int) -> None:
        parts = [text for text in choice.text[at:end] if text]
        if parts:
            found.append(Block(len(found), parts=parts))

    for call, begin in zip(choice.calls, choice.called_at, strict=True):
        add_text(begin)
        at = begin
        function = call["function"]
        found.append(Block(len(found), call["id"], function["name"], [function["arguments"]]))
    add_text(len(choice.text))
    return found or [Block(0)]
