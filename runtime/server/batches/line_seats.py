"""How many lines of batches may be open in the scheduler: few while interactive requests are there, else nearly all."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

#: Seconds between two looks whether interactive requests have left, while lines wait.
_LOOK = 0.05
#: Of so many seats of the scheduler one is left free for an interactive request, which need not wait then.
_FREE_OF = 8


class LineSeats:
    """Seats of lines, given in the order in which lines come. Belongs to one event loop.

    Args:
        seats: Sequences that the scheduler runs at once.
        busy: Returns whether interactive requests are in the server. Then only an eighth of the seats is given: a step
            is as long as what runs in it, and prompts of lines would run in all of them.
    """

    def __init__(self, seats: int, busy: Callable[[], bool]) -> None:
        self._few = max(1, seats // _FREE_OF)
        self._most = max(1, seats - self._few)
        self._busy = busy
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._look: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def hold_seat(self) -> AsyncIterator[None]:
        """Hold a seat; waits until it is given."""
        loop = asyncio.get_running_loop()
        given = loop.create_future()
        self._waiting.append(given)
        self._fill()
        try:
            await given
            yield
        finally:
            if given.done() and not given.cancelled():
                self._taken -= 1
            self._fill()

    def _fill(self) -> None:
        """Give free seats to those that wait, and look again later if any still wait."""
        most = self._few if self._busy() else self._most
        while self._waiting and (self._taken < most or self._waiting[0].cancelled()):
            first = self._waiting.popleft()
            if not first.cancelled():
                first.set_result(None)
                self._taken += 1
        if self._waiting and self._look is None:
            self._look = asyncio.get_running_loop().call_later(_LOOK, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._fill()
