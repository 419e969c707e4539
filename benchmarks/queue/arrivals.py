"""Submit requests to a driver so that there is always work: in waves, or one by one at random times.

waves      lots of requests, each when at most a random part of a lot still waits
poisson    one by one, alternately faster and slower than they end: the queue grows to a random length, and shrinks
           to another one, again and again
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any, Literal

from runtime.types import SequenceRequest

Arrivals = Literal["waves", "poisson"]

#: Arrivals over ends while the queue grows, and while it shrinks.
_FASTER, _SLOWER = 2.0, 0.5
#: Seconds between arrivals until requests have ended.
_GAP = 0.02
#: Ends by which their rate is measured.
_ENDS = 64


class Submission:
    """The requests of one run.

    Args:
        ask: Returns the request with this number.
        count: Requests in all.
        places: Requests that run at a time.
        most: Requests of a wave, or the most that wait.
    """

    def __init__(
        self, driver: Any, ask: Callable[[int], SequenceRequest], count: int, places: int, most: int, rng: random.Random
    ) -> None:
        self._driver, self._ask, self._count, self._places, self._most = driver, ask, count, places, most
        self._rng, self._asked, self._left = rng, 0, 0
        self._ends: list[float] = []
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, how: Arrivals) -> None:
        """Submit all requests, and return when they have ended."""
        await (self._in_waves() if how == "waves" else self._one_by_one())
        await asyncio.gather(*self._tasks)

    @property
    def _waiting(self) -> int:
        return self._left - self._places

    async def _in_waves(self) -> None:
        while self._asked < self._count:
            self._submit(min(self._most, self._count - self._asked))
            few = self._rng.randint(0, self._most // 2)
            async with self._changed:
                await self._changed.wait_for(lambda few=few: self._waiting <= few)  # type: ignore[misc]

    async def _one_by_one(self) -> None:
        grows, mark, due = True, self._rng.randint(self._most // 2, self._most), time.monotonic()
        while self._asked < self._count:
            if (self._waiting >= mark) if grows else (self._waiting <= mark):
                grows = not grows
                low, high = (self._most // 2, self._most) if grows else (0, self._most // 4)
                mark = self._rng.randint(low, high)
            due += self._rng.expovariate(1.0) / ((_FASTER if grows else _SLOWER) * self._rate())
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            self._submit(1)

    def _rate(self) -> float:
        latest = self._ends[-_ENDS:]
        return (len(latest) - 1) / max(latest[-1] - latest[0], 1e-3) if len(latest) == _ENDS else 1 / _GAP

    def _submit(self, count: int) -> None:
        batch = [self._ask(number) for number in range(self._asked, self._asked + count)]
        self._asked, self._left = self._asked + count, self._left + count
        self._tasks.append(asyncio.get_running_loop().create_task(self._follow(batch)))

    async def _follow(self, batch: list[SequenceRequest]) -> None:
        async with self._driver.open_stream(batch) as stream:
            async for events in stream:
                ended = sum(event.finish is not None for event in events)
                if ended:
                    self._left -= ended
                    self._ends += [time.monotonic()] * ended
                    async with self._changed:
                        self._changed.notify_all()
