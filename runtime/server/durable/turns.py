"""The order in which a server opens the sequences of requests that it has taken over.

Requests with much to replay from their journals are ready later than those that have not begun. Opened as they get
ready, those that have not begun would come first, and their model would be loaded in the place of the one that streams
wait for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

#: Seconds for which a request waits for those before it: one of them may have to load its model first.
_MOST_SECONDS = 5.0


class Turns:
    """A queue of names; each waits until those before it have left. Belongs to one event loop."""

    def __init__(self) -> None:
        self._queue: dict[str, asyncio.Event] = {}

    def enter(self, names: Iterable[str]) -> None:
        """Put names that are not in the queue behind those that are."""
        for name in names:
            self._queue.setdefault(name, asyncio.Event())
        self._call()

    async def wait_turn(self, name: str) -> None:
        """Wait until all names before this one have left, for a while; one that is not in the queue does not wait."""
        if (turn := self._queue.get(name)) is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_MOST_SECONDS):
                    await turn.wait()

    def end_turn(self, name: str) -> None:
        """Take a name out of the queue, if it is there: it has had its turn, or waits for something else."""
        if (turn := self._queue.pop(name, None)) is not None:
            turn.set()
            self._call()

    def _call(self) -> None:
        for turn in self._queue.values():
            turn.set()
            return
