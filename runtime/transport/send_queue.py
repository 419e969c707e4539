"""Queue messages to one peer: numbered, in order, up to a limit, and never lost silently.

Does not depend on sockets: `put` is any function that takes a message's frames or reports that it has no room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from runtime.chains import Array
from runtime.messages import Message
from runtime.transport.delta import DeltaEncoder
from runtime.transport.wire import Frame, encode

#: Takes frames and returns True, or returns False if it has no room.
Put = Callable[[list[Frame]], bool]


class Choked(Exception):
    """Raised when the limit of waiting bytes is exceeded: the peer does not read."""


class SendQueue:
    """Queue messages to one peer. `limit`: bytes that may wait here."""

    def __init__(self, put: Put, limit: int) -> None:
        self._put = put
        self._limit = limit
        self._number = 0
        self._said = DeltaEncoder()
        self._waiting: deque[tuple[list[Frame], int]] = deque()
        self._bytes = 0

    @property
    def waiting(self) -> int:
        """Return the number of bytes that wait."""
        return self._bytes

    @property
    def number(self) -> int:
        """Return the number of the next message."""
        return self._number

    def skip(self, count: int) -> None:
        """Count messages that went out past this queue. None waits."""
        self._number += count

    def send(self, message: Message, arrays: Sequence[Array] = (), ticket: int | None = None) -> None:
        """Send or queue a message; never blocks. `ticket`: as in `wire.encode`.

        Raises Choked, and WireError for a message that cannot be encoded; then it was not sent.
        """
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
        """Send waiting messages; return whether none is left."""
        while self._waiting and self._put(self._waiting[0][0]):
            self._bytes -= self._waiting.popleft()[1]
        return not self._waiting
