"""When requests are sent, tested on a virtual clock that advances only when all tasks wait."""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass, field

import pytest

from runtime.bench.answers import Answer, TokenTimes
from runtime.bench.arrivals import Arrivals
from runtime.bench.drive import drive
from runtime.bench.workload import Workload, WorkloadRequest, WorkloadSettings, build


@dataclass
class VirtualClock:
    """A clock that wakes waiting tasks in order of time, once no task can run."""

    time: float = 100.0
    waiting: list[tuple[float, int, asyncio.Future[None]]] = field(default_factory=list)
    order: int = 0

    def now(self) -> float:
        return self.time

    async def until(self, moment: float) -> None:
        if moment <= self.time:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.order += 1
        heapq.heappush(self.waiting, (moment, self.order, future))
        await future

    async def pass_time(self) -> None:
        while True:
            for _ in range(20):
                await asyncio.sleep(0)
            if self.waiting:
                self.time, _, future = heapq.heappop(self.waiting)
                future.set_result(None)


@dataclass
class OneServer:
    """A server that answers one request after the other, `seconds` each, in two tokens."""

    clock: VirtualClock
    seconds: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    inside: int = 0
    most: int = 0

    async def send_request(self, ask: WorkloadRequest) -> TokenTimes:
        self.inside += 1
        self.most = max(self.most, self.inside)
        async with self.lock:
            stamps = []
            for _ in range(2):
                await self.clock.until(self.clock.now() + self.seconds / 2)
                stamps.append(self.clock.now())
        self.inside -= 1
        return TokenTimes(tuple(stamps), (1, 1), 2, len(ask.prompt))


class LateClock(VirtualClock):
    """A clock that wakes tasks half a second late."""

    async def until(self, moment: float) -> None:
        await super().until(moment + 0.5)


def run(workload: Workload, seconds: float, kind: type[VirtualClock] = VirtualClock) -> tuple[list[Answer], OneServer]:
    """Drive a workload against `OneServer` in virtual time; return the answers and the server."""

    async def all_of_it() -> tuple[list[Answer], OneServer]:
        clock = kind()
        server = OneServer(clock, seconds)
        passing = asyncio.ensure_future(clock.pass_time())
        try:
            return await asyncio.wait_for(drive(workload, server, clock), 20), server
        finally:
            passing.cancel()

    return asyncio.run(all_of_it())


def asks(*at: float) -> tuple[WorkloadRequest, ...]:
    return tuple(WorkloadRequest(number, time, "m", (1, 2), 2) for number, time in enumerate(at))


def test_an_open_loop_sends_when_due_and_latencies_hold_the_queue() -> None:
    answers, server = run(Workload(asks(1.0, 2.0, 2.0)), seconds=4.0)
    assert [answer.sent for answer in answers] == [1.0, 2.0, 2.0]
    assert [(answer.ttft, answer.e2e) for answer in answers] == [(2.0, 4.0), (5.0, 7.0), (9.0, 11.0)]
    assert [answer.ended for answer in answers] == [5.0, 9.0, 13.0] and server.most == 3


def test_a_closed_loop_never_has_more_requests_than_clients() -> None:
    answers, server = run(Workload(asks(*[99.0] * 7), clients=2), seconds=1.0)
    assert server.most == 2 and len(answers) == 7
    assert [answer.due for answer in answers] == [0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert all(answer.sent == answer.due for answer in answers)


def test_a_client_that_is_late_hides_no_delay() -> None:
    (answer,), _ = run(Workload(asks(1.0)), seconds=4.0, kind=LateClock)
    assert (answer.due, answer.sent, answer.ended) == (1.0, 1.5, 6.5)
    assert (answer.ttft, answer.e2e) == (3.0, 5.5)


def test_poisson_arrivals_are_sent_at_their_times() -> None:
    workload = build(WorkloadSettings(40, 3, Arrivals(5.0)), ("m",))
    answers, _ = run(workload, seconds=0.1)
    assert [answer.sent for answer in answers] == pytest.approx([ask.at for ask in workload.asks])


def test_a_defect_of_the_client_ends_the_run_and_leaves_no_task() -> None:
    class Broken:
        async def send_request(self, ask: WorkloadRequest) -> TokenTimes:
            if ask.number == 1:
                raise RuntimeError("a defect")
            await asyncio.Event().wait()
            raise AssertionError

    async def all_of_it() -> int:
        with pytest.raises(RuntimeError, match="a defect"):
            await drive(Workload(asks(0.0, 0.0)), Broken(), VirtualClock())
        return len(asyncio.all_tasks())

    assert asyncio.run(all_of_it()) == 1
