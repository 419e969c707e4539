"""Server-sent events: encode a stream's chunks and write them to one client.

A chunk's bytes always equal `responses.dump` of its document (`format.Wording.chunk`), also when they are made from a
template. Nothing here depends on sequences.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from starlette.requests import ClientDisconnect
from starlette.types import Send

from runtime.frontend.choice import TextPiece
from runtime.server.openai.format import ChunkWording
from runtime.server.openai.responses import dump

#: Seconds that one write to a stream may wait; a client that does not read for so long is treated as disconnected.
SEND_SECONDS = 60.0

_SEPARATOR = b"\n\n"
DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
#: Placeholders for a text and a token id in a template.
_TEXT, _TOKEN = "\x00", -1
_quote = json.JSONEncoder(ensure_ascii=False).encode


def event(document: Any) -> bytes:
    return b"data: %b\n\n" % dump(document)


class StreamWriter(Protocol):
    """Writes the events of one answer.

    Attributes:
        early: Whether its openings are sent before there is a token, so that a client knows the answer's id.
    """

    early: bool

    def openings(self, choices: Iterable[int], cached: int = 0) -> bytes:
        """Return the events before the first token. `cached`: tokens of the prompt that were not computed, if known."""
        ...

    def write_pieces(self, pieces: Iterable[TextPiece]) -> bytes: ...

    def usage(self, generated: int, cached: int) -> bytes:
        """Return the event behind the last token, of so many in all, if there is one.

        `cached`: tokens of the prompt that were not computed.
        """
        ...


class _Mould(NamedTuple):
    """The encoded chunk of one choice, split where its text and, if they are shown, its token ids go."""

    head: str
    middle: str
    tail: str


class ChunkWriter:
    """Encodes the chunks of one stream.

    Most pieces have a text and nothing else. For those the JSON around the text is encoded once per choice and reused.
    """

    early = False

    def __init__(self, wording: ChunkWording, token_ids: bool, usage: bool = False) -> None:
        self._wording = wording
        self._token_ids = token_ids
        self._usage = usage
        self._moulds: dict[int, _Mould | None] = {}

    def openings(self, choices: Iterable[int], cached: int = 0) -> bytes:
        """Return the chunks that open choices, for formats that have them."""
        documents = map(self._wording.opening, choices)
        return b"".join(event(document) for document in documents if document is not None)

    def write_pieces(self, pieces: Iterable[TextPiece]) -> bytes:
        """Return one event per piece with content. Tokens with no final text yet produce none."""
        return b"".join(map(self._event, pieces))

    def usage(self, generated: int, cached: int) -> bytes:
        """Return the event of the token counts, if the stream has one."""
        return event(self._wording.usage_chunk(generated, cached)) if self._usage else b""

    def _event(self, piece: TextPiece) -> bytes:
        if piece.text and piece.finish is None and not piece.entries and not piece.calls:
            mould = self._mould(piece.choice)
            if mould is not None:
                ids = ",".join(map(str, piece.tokens)) if self._token_ids else ""
                return f"{mould.head}{_quote(piece.text)}{mould.middle}{ids}{mould.tail}".encode()
        if piece.text or piece.entries or piece.calls or piece.finish is not None or (self._token_ids and piece.tokens):
            return event(self._wording.chunk(piece))
        return b""

    def _mould(self, choice: int) -> _Mould | None:
        if choice not in self._moulds:
            self._moulds[choice] = self._make_template(choice)
        return self._moulds[choice]

    def _make_template(self, choice: int) -> _Mould | None:
        """Return None if a name in the document contains a placeholder: then every chunk is encoded as a whole."""
        worded = event(self._wording.chunk(TextPiece(choice, _TEXT, (_TOKEN,)))).decode()
        head, *rest = worded.split(_quote(_TEXT))
        if len(rest) != 1:
            return None
        if not self._token_ids:
            return _Mould(head, rest[0], "")
        middle, *tail = rest[0].split(f"[{_TOKEN}]")
        return _Mould(head, f"{middle}[", f"]{tail[0]}") if len(tail) == 1 else None


class Outlet:
    """Writes a stream to one client. Use it as a context manager in the task that writes.

    A client that has not read for `seconds` is treated as disconnected. One timer per stream checks how long the
    current write has waited; a timer per write would be one per token. `events`: those written so far.
    """

    def __init__(self, send: Send, seconds: float = SEND_SECONDS) -> None:
        self._send = send
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._since: float | None = None
        self._expired = False
        self.events = 0

    async def start(self) -> None:
        await self._write({"type": "http.response.start", "status": 200, "headers": _HEADERS})

    async def write(self, events: bytes, more: bool = True) -> None:
        """Write events in one message. Empty `events` are written only to end the answer. Raises ClientDisconnect."""
        self.events += events.count(_SEPARATOR)
        if events or not more:
            await self._write({"type": "http.response.body", "body": events, "more_body": more})

    async def _write(self, message: dict[str, Any]) -> None:
        self._since = self._loop.time()
        try:
            await self._send(message)
        except asyncio.CancelledError:
            # The task may have been cancelled for another reason at the same time: keep that one.
            if self._expired and self._task is not None and self._task.uncancel() == 0:
                raise ClientDisconnect from None
            raise
        finally:
            self._since = None

    def _look(self) -> None:
        now = self._loop.time()
        left = self._seconds if self._since is None else self._since + self._seconds - now
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        elif self._task is not None:
            self._expired = True
            self._task.cancel()

    def __enter__(self) -> Outlet:
        self._timer = self._loop.call_later(self._seconds, self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
