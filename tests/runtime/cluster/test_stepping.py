"""What a device does between two steps, under a virtual clock in which control costs time; and the driver over engines
that look ahead.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

import pytest

from runtime.agent.local.agent import LocalAgent
from runtime.cluster.stepping import Stepping
from runtime.config import BatchingConfig
from runtime.engine.executors.background import Background
from runtime.engine.fakes.fake import FakeEngine, answer
from runtime.types import Launched, ModelSpec, StepPlan, StepResult, TokenEvent
from tests.runtime.cluster.helpers import LIMIT, Broken, Gate, M, collect, driver, expected, tokens, until
from tests.runtime.virtual import request, spec
from zoo.errors import Unavailable

STEP, CONTROL = 1000, 300


class Device(FakeEngine):
    """A device that takes STEP nanoseconds for a step, one after the other; `idle`: that it had none, between its first
    and its last.
    """

    def __init__(self, ahead: bool) -> None:
        super().__init__([M], 4000, ahead=ahead)
        self.now = self.free_at = self.idle = 0
        self.steps = 0

    def launch(self, plan: StepPlan) -> Launched:
        begin = max(self.now, self.free_at)
        self.idle += begin - self.free_at if self.steps else 0
        self.steps += 1
        self.free_at = begin + STEP
        return Timed(self, self.execute(plan), self.free_at)


@dataclass
class Timed:
    device: Device
    told: StepResult
    over: int

    def result(self) -> StepResult:
        """Waits: the clock goes on to the step's end."""
        self.device.now = max(self.device.now, self.over)
        return self.told


class Slow(LocalAgent):
    """An agent whose every decision takes CONTROL nanoseconds of the device's clock."""

    device: Device

    def next_step(self, now: int) -> StepPlan | None:
        self.device.now += CONTROL
        return super().next_step(now)

    def finish_step(self, result: StepResult, now: int) -> list[TokenEvent]:
        self.device.now += CONTROL
        return super().finish_step(result, now)


def played(ahead: bool, count: int) -> tuple[Device, list[int]]:
    device = Device(ahead)
    agent = Slow(device.models(), device.page_capacity, BatchingConfig(), ahead=device.ahead)
    agent.device = device
    events: list[TokenEvent] = []
    steps = Stepping(device, agent, threading.Condition(), lambda: device.now, events.extend)
    agent.add(request("a", max_tokens=count), 0)
    while agent.busy:
        steps.turn()
        agent.check()
    return device, [event.token for event in events if event.token is not None]


def test_the_device_waits_for_control_between_any_two_steps_and_not_at_all_looking_ahead() -> None:
    count = 50
    one, plain = played(False, count)
    other, ahead = played(True, count)
    assert plain == ahead == answer(M, (1, 2, 3), request("a").sampling.__class__(max_tokens=count))
    assert one.steps == other.steps == count, "nothing was computed in vain"
    assert one.idle == (count - 1) * 2 * CONTROL
    assert other.idle == 0
    assert (one.free_at, other.free_at) == (CONTROL + count * STEP + (count - 1) * 2 * CONTROL, CONTROL + count * STEP)


def test_an_end_by_a_token_costs_one_row_at_most() -> None:
    wanted = request("a", max_tokens=50, stop_token_ids=(answer(M, (1, 2, 3), request("x", max_tokens=9).sampling)[4],))
    device = Device(True)
    agent = LocalAgent(device.models(), device.page_capacity, BatchingConfig(), ahead=True)
    events: list[TokenEvent] = []
    steps = Stepping(device, agent, threading.Condition(), lambda: device.now, events.extend)
    agent.add(wanted, 0)
    while agent.busy:
        steps.turn()
        agent.check()
    assert [event.token for event in events] == answer(M, wanted.prompt, wanted.sampling)
    assert events[-1].finish == "stop"
    assert device.steps == len(events) + 1
    assert agent.state().pages.free == 4000


# -- the driver --------------------------------------------------------------------------------------------------------


class Threaded(Broken):
    """The fake engine with its steps on a thread of their own, as a CPU's are."""

    def __init__(self, models: list[ModelSpec], pages: int, *args: object, **options: object) -> None:
        super().__init__(models, pages, *args, ahead=True, **options)  # type: ignore[arg-type]
        self.background = Background(self.execute)

    def launch(self, plan: StepPlan) -> Launched:
        return self.background.launch(plan)


def engines(**options: object) -> list[FakeEngine]:
    return [Broken([M], 4000, ahead=True, **options), Threaded([M], 4000, **options)]  # type: ignore[arg-type]


@pytest.mark.parametrize("made", engines())
def test_streams_of_many_clients(made: FakeEngine) -> None:
    requests = [request(f"s{index}", range(1, 4 + index % 9), max_tokens=1 + index % 13) for index in range(60)]

    async def clients() -> list[list[TokenEvent]]:
        with driver(made, max_num_batched_tokens=32, max_num_seqs=16) as one:
            return await asyncio.gather(*(collect(one.open_stream([wanted])) for wanted in requests))

    for wanted, events in zip(requests, asyncio.run(clients()), strict=True):
        assert tokens(events, wanted.seq) == expected(wanted)


@pytest.mark.parametrize("made", engines(fail_at=[3]))
def test_a_failed_step_ends_its_sequences_and_the_driver_goes_on(made: FakeEngine) -> None:
    with driver(made) as one:
        events = list(one.run([request("a", max_tokens=9)]))
        assert [event.token for event in events[:-1]] == expected(request("a", max_tokens=9))[:2]
        assert (events[-1].finish, events[-1].error) == ("error", "the engine failed: FakeFault")
        assert [event.token for event in one.run([request("b")])] == expected(request("b"))
        assert one.drain(LIMIT)
        assert (one.state().counters.failed_steps, one.state().pages.free) == (1, 4000)


@pytest.mark.parametrize("made", engines(fail_at=range(1, 100)))
def test_three_failures_in_a_row_are_the_end(made: FakeEngine) -> None:
    with driver(made, max_num_seqs=1) as one:
        try:
            events = list(one.run([request(f"s{index}") for index in range(5)]))
        except Unavailable:
            pytest.fail("the requests came before the death")
        assert [event.finish for event in events] == ["error"] * 5
        one._thread.join(LIMIT)
        assert "3 steps in a row failed" in (one.death or "")


def test_a_lost_engine_ends_every_stream_and_a_job_that_waits() -> None:
    gate = Gate()
    made = Threaded([M], 4000, [spec("late")], pace=gate)
    with driver(made) as one:
        events = one.run([request("a", max_tokens=50)])
        gate.wait()
        asyncio.run(until(lambda: len(one._agent._under_way) == 2))
        refused: list[str] = []

        def load() -> None:
            try:
                one.load("late")
            except Exception as error:
                refused.append(str(error))

        loading = threading.Thread(target=load, daemon=True)
        loading.start()
        asyncio.run(until(lambda: bool(one._jobs)))
        made.execute = made.lose  # type: ignore[assignment, method-assign]
        made.background._execute = made.lose  # type: ignore[assignment]
        gate.open()
        last = list(events)[-1]
        loading.join(LIMIT)
        assert last.finish == "error"
        assert refused == ["the engine is lost: the device is gone"]


@pytest.mark.parametrize("made", engines())
def test_models_come_and_go_between_steps(made: FakeEngine) -> None:
    made._available["late"] = spec("late")
    with driver(made) as one:
        running = one.run([request("a", max_tokens=3000)])
        assert next(running).token is not None
        assert one.load("late").name == "late"
        wanted = request("b", model="late", stop_token_ids=(answer(spec("late"), (1, 2, 3), request("x").sampling)[1],))
        assert [event.token for event in one.run([wanted])] == answer(spec("late"), wanted.prompt, wanted.sampling)
        one.unload("late")
        one.abort(["a"])
        assert list(running)[-1].finish == "abort"
        assert one.drain(LIMIT)
        assert one.state().pages.free == 4000


def test_shutdown_hears_of_what_was_launched() -> None:
    gate = Gate()
    made = Threaded([M], 4000, pace=gate)
    with driver(made) as one:
        events = one.run([request("a", max_tokens=1000)])
        gate.wait()
        assert not one.shutdown(0.01)
        gate.open()
        assert one.shutdown(LIMIT)
        heard = list(events)
    assert heard[-1].error == "the driver was shut down"
    assert [event.token for event in heard[:-1]] == expected(request("a", max_tokens=1000))[: len(heard) - 1]
