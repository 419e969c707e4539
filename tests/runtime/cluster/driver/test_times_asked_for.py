"""The scheduler's loop: events that are asked for at a time."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

from runtime.cluster.agents.lifecycle import AgentLifecycles
from runtime.cluster.agents.pool import AgentPool
from runtime.cluster.driver.scheduler_loop import TICK, SchedulerLoop
from runtime.cluster.streams.router import StreamRouter
from runtime.config import ClusterConfig
from runtime.control.scheduler_io import Tick, TimeReached, WakeAt
from runtime.engine.fakes.integer_model import counting_model
from runtime.scheduler.scheduler import Scheduler

MS = 1_000_000


class NoAgents:
    """A pool without agents: `receive` waits as long as it may."""

    def __init__(self) -> None:
        self._woken = threading.Event()
        self.timeouts: list[float] = []
        self.lifecycles = AgentLifecycles([])

    def receive(self, timeout: float) -> list[Any]:
        self.timeouts.append(timeout)
        self._woken.wait(timeout)
        self._woken.clear()
        return []

    def look(self) -> list[Any]:
        return []

    def wake(self) -> None:
        self._woken.set()


class Asking:
    """Handles events in the scheduler's place: asks for TimeReached after each of `waits` ns, at the first tick."""

    def __init__(self, waits: list[int]) -> None:
        self._waits = waits
        self.asked: list[int] = []
        self.reached: list[int] = []

    def handle(self, event: object, now: int) -> list[Any]:
        if isinstance(event, Tick) and not self.asked:
            self.asked = [now + wait for wait in self._waits]
            return [WakeAt(at) for at in self.asked]
        if isinstance(event, TimeReached):
            self.reached.append(now)
        return []


def test_times_are_reached_in_their_order_and_no_earlier() -> None:
    """The last one is reached with the one before it, which is due when the loop looks."""
    handler, model = Asking([30 * MS, 4 * MS, 30 * MS + 1]), counting_model("m", "1* 2")
    scheduler = Scheduler([model.chain()], model.blocks(), ClusterConfig())
    pool = NoAgents()
    loop = SchedulerLoop(
        scheduler,
        cast(AgentPool, pool),
        threading.Condition(),
        StreamRouter(),
        time.monotonic_ns,
        lambda reason: None,
        handler,
    )
    loop.start()
    end = time.monotonic() + 60
    while len(handler.reached) < 2 and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(2 * TICK)
    loop.stop()
    first, second, last = sorted(handler.asked)
    assert handler.reached[0] >= first and second <= handler.reached[1]
    assert handler.reached[-1] >= last and len(handler.reached) <= 3
    assert max(pool.timeouts) == TICK and any(0.0 < each <= 0.004 for each in pool.timeouts)
