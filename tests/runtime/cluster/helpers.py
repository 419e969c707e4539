"""Helpers for tests of drivers: drivers that stop when a test ends, engines that wait or fail on demand.

Clients have timeouts, so that none waits for ever.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from runtime.chains import Array, Stage, StageResult
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.streams.streams import Stream
from runtime.types import EngineLost, ModelSpec, SequenceRequest, StepPlan, TokenEvent
from tests.runtime.cluster.whole import WholeEngine, answer, inline
from tests.runtime.virtual import spec

M = spec(max_model_len=4096)
LIMIT = 60.0


class Gate:
    """Holds each step until the gate is opened, so that a test can act during a step."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.passes = threading.Semaphore(0)

    def __call__(self, _busy: int) -> None:
        self.entered.release()
        assert self.passes.acquire(timeout=LIMIT)

    def wait(self) -> None:
        """Wait until a step has reached the gate."""
        assert self.entered.acquire(timeout=LIMIT)

    def open(self, steps: int = 100_000) -> None:
        self.passes.release(steps)


class Broken(WholeEngine):
    """An engine that raises `error` at every step once it is set."""

    error: BaseException | None = None

    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        if self.error is not None:
            self._failed.update([row.seq for row in plan.rows], [one.request.seq for one in plan.opened], plan.released)
            raise self.error
        return super().run(plan, inputs)

    def lose(self, stage: Stage) -> ModelSpec:
        raise EngineLost("the device is gone")


@contextmanager
def driver(engine: WholeEngine | None = None, **config: Any) -> Iterator[ClusterDriver]:
    """Run a driver of one inline device; fail if its shutdown takes longer than `LIMIT`."""
    one = inline(engine or WholeEngine([M], 4000), **config)
    try:
        yield one
    finally:
        assert one.shutdown(LIMIT)


def expected(one: SequenceRequest) -> list[int]:
    """Return the request's tokens as the model `M` gives them."""
    return answer(M, one.prompt, one.sampling)


def tokens(events: list[TokenEvent], seq: str) -> list[int]:
    return [event.token for event in events if event.seq == seq and event.token is not None]


def outcome(act: Callable[[], object]) -> str:
    """Return what a call returns or raises, as text."""
    try:
        return repr(act())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


async def collect(stream: Stream) -> list[TokenEvent]:
    async with asyncio.timeout(LIMIT), stream:
        return [event async for events in stream for event in events]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not condition():
            await asyncio.sleep(0.001)
