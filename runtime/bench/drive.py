"""Send a workload to a client, open or closed loop, and record times. Independent of HTTP and of engines.

- Open loop: each request is sent when it is due, whether or not earlier ones were answered.
- Closed loop: `clients` tasks take requests one after the other; a request is due when a task takes it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Protocol

from runtime.bench.answers import Answer, TokenTimes
from runtime.bench.workload import Workload, WorkloadRequest


class Clock(Protocol):
    """The time source of the run and its clients, in seconds."""

    def now(self) -> float: ...

    async def until(self, moment: float) -> None: ...


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.perf_counter()

    async def until(self, moment: float) -> None:
        """Sleep until `moment`; return at once if it has passed."""
        if (left := moment - self.now()) > 0:
            await asyncio.sleep(left)


class Client(Protocol):
    """Sends one request and returns when its tokens arrived.

    A failed request is reported in `TokenTimes`; an exception ends the whole run.
    """

    async def send_request(self, ask: WorkloadRequest) -> TokenTimes: ...


Done = Callable[[int, int], None]


async def drive(workload: Workload, client: Client, clock: Clock, done: Done | None = None) -> list[Answer]:
    """Run a workload and return all answers in the order of the requests. Times count from the call.

    `done(answered, all)` is called after each answer.
    """
    run = _Run(client, clock, len(workload.asks), done)
    if workload.clients is None:
        await _together([run.at(ask, run.begin + ask.at) for ask in workload.asks])
    else:
        waiting = iter(workload.asks)
        await _together([run.one_by_one(waiting) for _ in range(min(workload.clients, len(workload.asks)))])
    return sorted(run.answers, key=lambda answer: answer.number)


async def _together(jobs: list[Awaitable[None]]) -> None:
    """Await all jobs. If one fails, cancel the rest and raise its exception."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Run:
    """State shared by the tasks of one run."""

    def __init__(self, client: Client, clock: Clock, count: int, done: Done | None) -> None:
        self.begin = clock.now()
        self.answers: list[Answer] = []
        self._client = client
        self._clock = clock
        self._count = count
        self._done = done

    async def at(self, ask: WorkloadRequest, due: float) -> None:
        await self._clock.until(due)
        sent = self._clock.now()
        heard = await self._client.send_request(ask)
        ended = heard.stamps[-1] if heard.stamps and heard.error is None else self._clock.now()
        self.answers.append(
            Answer(
                ask.number,
                ask.model,
                due - self.begin,
                sent - self.begin,
                ended - self.begin,
                _since(heard, self.begin),
            )
        )
        if self._done is not None:
            self._done(len(self.answers), self._count)

    async def one_by_one(self, waiting: Iterator[WorkloadRequest]) -> None:
        for ask in waiting:
            await self.at(ask, self._clock.now())


def _since(heard: TokenTimes, begin: float) -> TokenTimes:
    return replace(heard, stamps=tuple(stamp - begin for stamp in heard.stamps))
