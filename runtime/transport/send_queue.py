"""What goes to one peer: numbered, in order, never lost in silence. What the transport does not take at once waits,
within a limit.

Knows no sockets: `put` is whatever takes a message's frames, or says that it has no room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from runtime.chains import Array
from runtime.messages import Message
from runtime.transport.delta import DeltaEncoder
from runtime.transport.wire import Frame, encode

#: Takes frames and returns True, or has no room and returns False.
Put = Callable[[list[Frame]], bool]


class Choked(Exception):
    """More waits for a peer than may: it does not read."""


class SendQueue:
    """See the top of the file. `limit`: bytes that may wait here."""

    def __init__(self, put: Put, limit: int) -> None:
        self._put = put
        self._limit = limit
        self._number = 0
        self._said = DeltaEncoder()
        self._waiting: deque[tuple[list[Frame], int]] = deque()
        self._bytes = 0

    @property
    def waiting(self) -> int:
        """Bytes that wait."""
        return self._bytes

    def send(self, message: Message, arrays: Sequence[Array] = (), ticket: int | None = None) -> None:
        """Never blocks. `ticket`: as in `wire.encode`. Raises Choked, and WireError for a message that cannot be sent;
        then nothing has gone out."""
        short = self._said.short(message)
        frames = encode(self._number, message, arrays, None if short is message else short, ticket)
        self._said.mark_sent(message, short)
        self._number += 1
        if self.flush() and self._put(frames):
            return
        nbytes = sum(len(frame) for frame in frames)
        if self._bytes + nbytes > self._limit:
            raise Choked(f"{self._bytes + nbytes} bytes wait for it")
        self._waiting.append((frames, nbytes))
        self._bytes += nbytes

    def flush(self) -> bool:
        """Hand over what waits; whether nothing does any more."""
        while self._waiting and self._put(self._waiting[0][0]):
            self._bytes -= self._waiting.popleft()[1]
        return not self._waiting
