"""The blocks of an answer: runs of text, and calls of tools, in the order in which they came.

Formats that number the parts of an answer are written from them: from a finished choice, or from pieces as they come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from runtime.frontend.choice import TextPiece, TokenEntry
from runtime.frontend.tools.calls import CallPart
from runtime.server.openai.format import FinishedChoice
from runtime.types import FinishReason


@dataclass(slots=True)
class Block:
    """A run of text, or a call with its arguments as text.

    Fields:
        index: Its place in the answer, from 0 on.
        call, name: Id of a call and name of its function; None for text.
        entries: Log-probabilities of a text's tokens, if requested.
    """

    index: int
    call: str | None = None
    name: str | None = None
    parts: list[str] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlockChange(NamedTuple):
    """A block begins, gets more text, or ends. `entries`: log-probabilities of the text's tokens."""

    change: Literal["begin", "more", "end"]
    block: Block
    text: str = ""
    entries: tuple[TokenEntry, ...] = ()


class BlockReader:
    """Reads the blocks of a choice from its pieces. `blocks`: those so far."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None
        #: Entries of tokens without a text so far: it is held back, or belongs to a call.
        self._held: list[TokenEntry] = []

    def read(self, piece: TextPiece) -> Iterator[BlockChange]:
        """Yield what a piece changes. An answer without text and calls has one empty block of text."""
        self._held += piece.entries
        if piece.text:
            if self._open is None or self._open.call is not None:
                yield from self._begin(None, None)
            yield self._more(piece.text, self._release())
        if piece.calls or (self._open is not None and self._open.call is not None):
            self._held.clear()
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

    def _more(self, text: str, entries: tuple[TokenEntry, ...] = ()) -> BlockChange:
        block = self.blocks[-1]
        block.parts.append(text)
        block.entries += entries
        return BlockChange("more", block, text, entries)

    def _release(self) -> tuple[TokenEntry, ...]:
        if not self._held:
            return ()
        held, self._held = tuple(self._held), []
        return held

    def _end(self) -> Iterator[BlockChange]:
        if self._open is not None:
            if self._open.call is None:  # tokens behind its last text
                self._open.entries += self._release()
            yield BlockChange("end", self._open)
            self._open = None


class BlockWriter:
    """Writes the stream of an answer by its blocks; a form of answers says what each change becomes (`events`)."""

    early = False

    def __init__(self) -> None:
        self._reader = BlockReader()
        self._generated = 0

    def write_pieces(self, pieces: Iterable[TextPiece]) -> bytes:
        """Return the events of pieces; behind the last one, those of the answer's end."""
        return b"".join(data for piece in pieces for data in self._written(piece))

    def usage(self, generated: int, cached: int) -> bytes:
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
    reader = BlockReader()
    for piece in _pieces(choice):
        for _ in reader.read(piece):
            pass
    return reader.blocks


def _pieces(choice: FinishedChoice) -> Iterator[TextPiece]:
    """Yield a whole choice as few pieces: cut where calls began, and where log-probabilities came."""
    end = len(choice.text)
    at = entered = 0
    for cut in sorted({*choice.called_at, *choice.entered, end}):
        before, entered = entered, choice.entered.get(cut, entered)
        calls = tuple(
            CallPart(index, call["function"]["arguments"], call["id"], call["function"]["name"])
            for index, (call, begin) in enumerate(zip(choice.calls, choice.called_at, strict=True))
            if begin == cut
        )
        finish: FinishReason | None = (choice.finish or "stop") if cut == end else None
        text, entries = "".join(choice.text[at:cut]), tuple(choice.entries[before:entered])
        yield TextPiece(choice.index, text, entries=entries, finish=finish, calls=calls)
        at = cut
