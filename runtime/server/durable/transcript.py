"""The answer of one durable request, made from its token events alone.

The same events always give the same bytes, however they were grouped into steps and whichever server made them: one
chunk per event, numbered by its `id:`. So a stream may be continued behind any of its chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from runtime.frontend.choice import TextPiece
from runtime.frontend.errors import RequestError
from runtime.server.answers.forms import AnswerForm, form_of, writer_of
from runtime.server.openai.format import FinishedChoice
from runtime.server.openai.responses import dump
from runtime.server.openai.sse import StreamWriter
from runtime.server.request_runner import Prepared
from runtime.types import SequenceRequest, TokenEvent

#: What ends a server-sent event.
EVENT_END = b"\n\n"
_ID = b"id: "


class Chunk(NamedTuple):
    """Server-sent events of one number; clients that have seen this number do not need them."""

    number: int
    data: bytes


class AddedEvents(NamedTuple):
    """What `Transcript.add_events` made of a step: the events that count, their chunks and pieces."""

    events: list[TokenEvent]
    chunks: list[Chunk]
    pieces: list[TextPiece]


class Transcript:
    """The state of an answer.

    Attributes:
        count: Events so far.
        opening: The chunk that is published before there is an event, where there is one (`StreamWriter.early`).
    """

    def __init__(self, prepared: Prepared) -> None:
        self._generation = generation = prepared.generation
        self.count = 0
        self._choices = {choice.seq: choice for choice in prepared.choices}
        self._sequences = generation.sequences
        self._form = form_of(generation)
        self._wording = self._form.wording(generation)
        self._chunks = writer_of(self._form, generation) if generation.stream else None
        self._finished = [FinishedChoice(choice.index) for choice in prepared.choices]
        self.opening: list[Chunk] = []
        if self._chunks is not None and self._chunks.early:
            self.opening = [Chunk(0, _numbered(0, self._chunks.openings(range(len(self._finished)))))]

    def add_events(self, events: Iterable[TokenEvent]) -> AddedEvents:
        """Add the events of a step. Those of choices that have ended, by a stop string, do not count."""
        added = AddedEvents([], [], [])
        for one in events:
            choice = self._choices[one.seq]
            if choice.finish is not None:
                continue
            piece = choice.add_events([one])
            self._finished[choice.index].add(piece)
            added.events.append(one)
            added.pieces.append(piece)
            if self._chunks is not None:
                added.chunks.extend(self._chunk(self._chunks, piece))
            self.count += 1
        return added

    @property
    def unfinished_choices(self) -> int:
        """Choices that have not ended."""
        return sum(choice.finish is None for choice in self._choices.values())

    def unfinished(self) -> list[tuple[SequenceRequest, tuple[int, ...]]]:
        """Return the sequences that have not ended, with the tokens that they have produced."""
        return [
            (request, tuple(self._finished[index].tokens))
            for index, request in enumerate(self._sequences)
            if self._choices[request.seq].finish is None
        ]

    def document(self) -> bytes:
        """Return the whole answer as JSON."""
        return dump(self._wording.whole(self._finished))

    def ending(self) -> list[Chunk]:
        """Return the chunks behind the last token, none for an answer that is not streamed."""
        if self._chunks is None:
            return []
        generated, cached = sum(len(each.tokens) for each in self._finished), self._cached
        usage, end, number = self._chunks.usage(generated, cached), self._form.end, self._number
        counted = [Chunk(number, _numbered(number, usage))] if usage else []
        return [*counted, Chunk(number + 1, end)] if end else counted

    @property
    def _cached(self) -> int:
        """Tokens of the prompts that were not computed."""
        return self._generation.cached_tokens([each.cached for each in self._finished])

    @property
    def _number(self) -> int:
        """Number of the next chunk."""
        return self.count + len(self.opening)

    def _chunk(self, writer: StreamWriter, piece: TextPiece) -> list[Chunk]:
        number = self._number
        opening = writer.openings(range(len(self._finished)), self._cached) if number == 0 else b""
        data = writer.write_pieces([piece])
        numbered = _numbered(number, data) if data else b""
        return [Chunk(number, opening + numbered)] if opening or numbered else []


def broken_off(form: AnswerForm, published: Sequence[Chunk], error: RequestError) -> list[Chunk]:
    """Return the chunks that end a stream with an error behind what was published; none for a stream not begun."""
    if not published:
        return []
    count = published[-1].number + 1
    sent = sum(chunk.data.count(EVENT_END) for chunk in published)
    broken = Chunk(count, _numbered(count, form.failure(error, sent)))
    return [broken, Chunk(count + 1, form.end)] if form.end else [broken]


def behind(stream: bytes, number: int) -> bytes:
    """Return the part of a whole stream behind the chunk of a number, or of the last one before it."""
    if number < 0:
        return stream
    events = stream.split(EVENT_END)
    seen = 0
    for position, each in enumerate(events):
        if each.startswith(_ID) and int(each[len(_ID) : each.index(b"\n")]) <= number:
            seen = position + 1
    return EVENT_END.join(events[seen:])


def chunks_of(stream: bytes) -> list[Chunk]:
    """Return the chunks of a whole stream: events without a number belong to the next one, at the end to one more."""
    chunks: list[Chunk] = []
    held = b""
    for each in stream.split(EVENT_END)[:-1]:
        held += each + EVENT_END
        if each.startswith(_ID):
            chunks.append(Chunk(int(each[len(_ID) : each.index(b"\n")]), held))
            held = b""
    if held:
        chunks.append(Chunk(chunks[-1].number + 1 if chunks else 0, held))
    return chunks


def _numbered(number: int, events: bytes) -> bytes:
    """Return events with a number on the last of them: a client that has it has them all."""
    at = events.rfind(EVENT_END, 0, -len(EVENT_END))
    at = 0 if at < 0 else at + len(EVENT_END)
    return b"%b%b%d\n%b" % (events[:at], _ID, number, events[at:])


def joined(chunks: Sequence[Chunk]) -> bytes:
    return b"".join(chunk.data for chunk in chunks)
