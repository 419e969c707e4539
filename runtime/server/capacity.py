"""Admission limit of the HTTP server: how many requests and sequences may be in it at once.

The unit is a place. A request takes one place while its body is read and tokenized, then one per sequence. Everything
here runs on the event loop's thread, so there is no lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from runtime.frontend.errors import overloaded, unavailable


class CapacitySlot:
    """The places that one request holds of a `Gate`.

    Fields:
        size: Number of places held.
        counted: Whether it is one of `Gate.requests`.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.size = 1
        self.counted = False

    def count_request(self) -> None:
        """Record that the request is here as a whole; once."""
        self.counted = True
        self._gate.requests += 1

    def grow(self, size: int) -> None:
        """Hold `size` places in total. Raises RequestError 429 if too few are free."""
        self._gate.reserve_places(size - self.size)
        self.size = size


class Gate:
    """Count places in use, at most `limit`.

    Attributes:
        closed: Set when the server drains; then no request is admitted.
        requests: Those of interactive clients that hold places and are here as a whole: lines of batches make room.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self.closed = False
        self.requests = 0

    @property
    def places_in_use(self) -> int:
        return self._taken

    @contextmanager
    def place(self) -> Iterator[CapacitySlot]:
        """Take one place for the duration of the block, and release it with all that the slot has grown by.

        Raises RequestError 429 if the server is full, 503 if the gate is closed.
        """
        if self.closed:
            raise unavailable("The server is shutting down.")
        place = CapacitySlot(self)
        self.reserve_places(1)
        try:
            yield place
        finally:
            self._taken -= place.size
            self.requests -= place.counted

    def reserve_places(self, count: int) -> None:
        if self._taken + count > self._limit:
            raise overloaded(f"The server is full: {self._taken} sequences are queued or running. Try again later.")
        self._taken += count
