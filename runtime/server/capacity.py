"""How much is in the server at once, and whether it takes more.

Counts places: a request takes one while it is read and tokenised, then one per sequence. Lives on the event loop's
thread only. Knows nothing of what the requests are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from runtime.frontend.errors import overloaded, unavailable


class CapacitySlot:
    """What one request holds of the gate."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.size = 1

    def grow(self, size: int) -> None:
        """Take `size` places in all. Raises RequestError 429 when they are not free."""
        self._gate.reserve_places(size - self.size)
        self.size = size


class Gate:
    """At most `limit` places. Closed while the server drains."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self.closed = False

    @property
    def places_in_use(self) -> int:
        return self._taken

    @contextmanager
    def place(self) -> Iterator[CapacitySlot]:
        """One place for a request, given back with all it has grown by. Raises RequestError 429, or 503 when closed."""
        if self.closed:
            raise unavailable("The server is shutting down.")
        place = CapacitySlot(self)
        self.reserve_places(1)
        try:
            yield place
        finally:
            self._taken -= place.size

    def reserve_places(self, count: int) -> None:
        if self._taken + count > self._limit:
            raise overloaded(f"The server is full: {self._taken} sequences are queued or running. Try again later.")
        self._taken += count
