"""The local driver: real threads and event loops around the fake engine. Nothing here may hang: every wait has a limit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from runtime.cluster import local
from runtime.cluster.jobs import Job
from runtime.cluster.local import LocalDriver
from runtime.cluster.streams import Stream
from runtime.config import BatchingConfig
from runtime.engine.fake import FakeEngine, answer
from runtime.types import EngineLost, ModelSpec, SequenceRequest, StepPlan, StepResult, TokenEvent
from tests.runtime.virtual import request, spec
from zoo.errors import InUse, NotFound, NotServable, Unavailable

M = spec(max_model_len=4096)
LIMIT = 20.0


class Gate:
    """Holds steps back until it is opened, so that a test can act in the middle of one."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.passes = threading.Semaphore(0)

    def __call__(self, _busy: int) -> None:
        self.entered.release()
        assert self.passes.acquire(timeout=LIMIT)

    def wait(self) -> None:
        """Until a step is in the middle."""
        assert self.entered.acquire(timeout=LIMIT)

    def open(self, steps: int = 100_000) -> None:
        self.passes.release(steps)


class Broken(FakeEngine):
    """Raises what it is told to, at every step."""

    error: Exception | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        if self.error is not None:
            self._failed = True
            raise self.error
        return super().execute(plan)

    def lose(self, _name: str = "") -> ModelSpec:
        raise EngineLost("the device is gone")


@contextmanager
def driver(engine: FakeEngine | None = None, **config: Any) -> Iterator[LocalDriver]:
    one = LocalDriver(engine or FakeEngine([M], 4000), BatchingConfig(**config))
    try:
        yield one
    finally:
        assert one.shutdown(LIMIT)


def expected(one: SequenceRequest) -> list[int]:
    return answer(M, one.prompt, one.sampling)


def tokens(events: list[TokenEvent], seq: str) -> list[int]:
    return [event.token for event in events if event.seq == seq and event.token is not None]


def outcome(act: Callable[[], object]) -> str:
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


def test_run_gives_every_token_in_order() -> None:
    requests = [request(f"s{index}", range(1, 4 + index), max_tokens=5 + index) for index in range(5)]
    with driver() as one:
        events = list(one.run(requests))
    for wanted in requests:
        assert tokens(events, wanted.seq) == expected(wanted)
        assert [event.index for event in events if event.seq == wanted.seq] == list(range(wanted.sampling.max_tokens))


def test_streams_of_many_clients_at_once() -> None:
    requests = [request(f"s{index}", range(1, 4 + index % 9), max_tokens=1 + index % 13) for index in range(120)]

    async def clients() -> list[list[TokenEvent]]:
        with driver(FakeEngine([M], 400), token_budget=32, max_sequences=16) as one:
            return await asyncio.gather(*(collect(one.open_stream([wanted])) for wanted in requests))

    for wanted, events in zip(requests, asyncio.run(clients()), strict=True):
        assert tokens(events, wanted.seq) == expected(wanted)
        assert [event.finish for event in events][-1] == "length"


def test_one_stream_over_several_sequences_and_a_refusal() -> None:
    async def client() -> list[TokenEvent]:
        with driver() as one:
            return await collect(one.open_stream([request("a"), request("b", max_tokens=9), request("bad", model="other")]))

    events = asyncio.run(client())
    assert tokens(events, "a") == expected(request("a"))
    assert tokens(events, "b") == expected(request("b", max_tokens=9))
    assert [(event.finish, event.error) for event in events if event.seq == "bad"] == [("error", "model 'other' is not loaded")]


def test_a_step_reaches_an_event_loop_in_one_call() -> None:
    async def client() -> tuple[int, int]:
        gate = Gate()
        with driver(FakeEngine([M], 4000, pace=gate)) as one:
            streams = [one.open_stream([request(f"s{index}", max_tokens=3)]) for index in range(20)]
            loop, calls = asyncio.get_running_loop(), 0
            original = loop.call_soon_threadsafe

            def counted(*args: Any, **values: Any) -> Any:
                nonlocal calls
                calls += threading.current_thread().name.startswith("zoo-engine")
                return original(*args, **values)

            loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
            gate.open()
            await asyncio.gather(*map(collect, streams))
            return calls, one.state().counters.steps

    calls, steps = asyncio.run(client())
    assert calls == steps <= 4


def test_a_client_that_leaves_frees_its_pages_at_once() -> None:
    async def client() -> None:
        gate = Gate()
        with driver(FakeEngine([M], 4000, pace=gate)) as one:
            stream = one.open_stream([request("a", max_tokens=1000), request("b", max_tokens=1000)])
            gate.open(1)
            async with asyncio.timeout(LIMIT):
                assert [event.seq for event in await anext(stream)] == ["a", "b"]
            await stream.aclose()
            await stream.aclose()
            gate.open()
            await until(lambda: one.state().pages.free == 4000)
            assert one.state().counters.finished == {"abort": 2}
            assert one.drain(LIMIT)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    asyncio.run(client())


def test_a_client_that_leaves_a_waiting_sequence_or_a_run_early() -> None:
    gate = Gate()
    with driver(FakeEngine([M], 4000, pace=gate), max_sequences=1) as one:
        events = one.run([request("a", max_tokens=1000), request("b", max_tokens=1000)])
        gate.open(1)
        assert next(events).seq == "a"
        events.close()
        gate.open()
        assert one.drain(LIMIT)
        assert one.state().counters.finished == {"abort": 2}
        assert one.state().pages.free == 4000


def test_a_cancelled_wait_loses_nothing() -> None:
    async def client() -> list[TokenEvent]:
        gate = Gate()
        with driver(FakeEngine([M], 4000, pace=gate)) as one:
            stream = one.open_stream([request("a", max_tokens=5)])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(stream)
            gate.open()
            return await collect(stream)

    assert tokens(asyncio.run(client()), "a") == expected(request("a", max_tokens=5))


def test_requests_and_aborts_get_through_while_the_engine_works() -> None:
    gate = Gate()
    with driver(FakeEngine([M], 4000, pace=gate)) as one:
        first = one.run([request("a", max_tokens=50)])
        gate.wait()
        second = one.run([request("b", max_tokens=2)])
        assert one.state().waiting == 1
        one.abort(["a", "never"])
        assert next(first).finish == "abort"
        assert one.state().pages.reserved == 2  # the step still writes them
        gate.open()
        assert [event.token for event in second] == expected(request("b", max_tokens=2))
        assert one.drain(LIMIT)
        assert one.state().pages.free == 4000


def test_an_event_loop_that_was_closed_costs_nobody_else() -> None:
    gate = Gate()
    with driver(FakeEngine([M], 4000, pace=gate)) as one:

        async def forgetful() -> None:
            one.open_stream([request("lost", max_tokens=1000)])

        asyncio.run(forgetful())
        others = one.run([request("b", max_tokens=5)])
        gate.open()
        assert [event.token for event in others] == expected(request("b", max_tokens=5))
        assert one.drain(LIMIT)
        assert one.state().pages.free == 4000
        assert one.state().counters.finished == {"abort": 1, "length": 1}


def test_an_idle_driver_sleeps() -> None:
    ticks = 0

    def clock() -> int:
        nonlocal ticks
        ticks += 1
        return ticks

    one = LocalDriver(FakeEngine([M], 100), BatchingConfig(), clock=clock)
    list(one.run([request("a")]))
    before = ticks
    time.sleep(0.2)
    assert ticks - before <= 2
    one.shutdown(LIMIT)


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_failed_step_ends_its_sequences_and_the_driver_goes_on() -> None:
    with driver(FakeEngine([M], 4000, fail_at=[2])) as one:
        events = list(one.run([request("a", max_tokens=5)]))
        assert [(event.finish, event.error) for event in events] == [(None, None), ("error", "the engine failed: FakeFault")]
        assert [event.token for event in one.run([request("b")])] == expected(request("b"))
        assert one.alive
        assert one.state().counters.failed_steps == 1


def test_three_failures_in_a_row_are_the_end() -> None:
    engine = FakeEngine([M], 4000, fail_at=range(1, 100))
    with driver(engine, max_sequences=1) as one:
        requests = [request(f"s{index}") for index in range(5)]
        try:
            events = list(one.run(requests))
        except Unavailable:
            pytest.fail("the requests came before the death")
        assert [event.finish for event in events] == ["error"] * 5
        one._thread.join(LIMIT)
        assert not one.alive
        assert "3 steps in a row failed" in (one.death or "")
        assert one.drain(0)
        with pytest.raises(Unavailable, match="3 steps in a row"):
            one.run([request("late")])


def test_failures_that_are_not_in_a_row_are_survived() -> None:
    with driver(FakeEngine([M], 4000, fail_at=[1, 2, 4, 5, 7, 8])) as one:
        for index in range(9):
            list(one.run([request(f"s{index}", max_tokens=1)]))
        assert one.alive


@pytest.mark.parametrize("error", [EngineLost("the device is gone"), SystemExit()])
def test_a_lost_engine_ends_every_stream(error: BaseException) -> None:
    async def client() -> tuple[list[list[TokenEvent]], str | None]:
        gate = Gate()
        engine = Broken([M], 4000, pace=gate)
        with driver(engine, max_sequences=2) as one:
            streams = [one.open_stream([request(f"s{index}", max_tokens=50)]) for index in range(4)]
            gate.wait()
            engine.error = error  # type: ignore[assignment]
            gate.open()
            found = await asyncio.gather(*map(collect, streams))
            await until(lambda: not one.alive)
            return found, one.death

    found, death = asyncio.run(client())
    assert [events[-1].finish for events in found] == ["error"] * 4
    assert {events[-1].error for events in found} == {death}
    assert ("the device is gone" if isinstance(error, EngineLost) else "SystemExit") in (death or "")


@pytest.mark.parametrize("verb", ["next_step", "finish_step", "end_all"])
def test_a_defect_of_the_agent_hangs_nobody(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: object) -> None:
        raise KeyError("defect")

    gate = Gate()
    with driver(FakeEngine([M], 4000, pace=gate)) as one:
        events = one.run([request("a", max_tokens=50)])
        gate.wait()
        monkeypatch.setattr(one._agent, verb, defect)
        if verb == "end_all":
            monkeypatch.setattr(one._agent, "next_step", defect)
        gate.open()
        last = list(events)[-1]
        assert last.finish == "error"
        one._thread.join(LIMIT) if verb != "finish_step" else None
    assert not one.alive


def test_what_an_error_says_stays_inside() -> None:
    engine = Broken([M], 4000)
    engine.error = RuntimeError("at 0x7f1234 in /secret/path")
    with driver(engine) as one:
        (event,) = one.run([request("a")])
        assert event.error == "the engine failed: RuntimeError"


# -- models ------------------------------------------------------------------------------------------------------------


def test_models_are_loaded_and_unloaded_while_serving() -> None:
    late = spec("late", max_model_len=100_000)
    engine = FakeEngine([M], 4000, [late])
    with driver(engine) as one:
        assert one.load("late").max_model_len == 8000  # what 4000 pages hold
        assert one.load("late").name == "late"
        assert [found.name for found in one.models()] == ["m", "late"]
        assert one.memory().weights_unshared == 4000
        wanted = request("a", model="late")
        assert [event.token for event in one.run([wanted])] == answer(late, wanted.prompt, wanted.sampling)
        one.unload("late")
        assert [found.name for found in one.models()] == ["m"]
        assert one.memory().weights_unshared == 2000
        assert engine.sequences == 0
        assert next(one.run([request("b", model="late")])).finish == "error"
        with pytest.raises(NotFound):
            one.load("nowhere")
        with pytest.raises(NotFound):
            one.unload("late")


def test_a_model_that_does_not_fit_is_not_left_in_the_engine() -> None:
    engine = FakeEngine([M], 10, [spec("huge", kv_layers=11)])
    with driver(engine) as one:
        with pytest.raises(NotServable):
            one.load("huge")
        assert [found.name for found in engine.models()] == ["m"]


def test_unload_waits_for_running_sequences_and_takes_no_new_ones() -> None:
    gate = Gate()
    with driver(FakeEngine([M, spec("other")], 4000, pace=gate)) as one:
        events = one.run([request("a", max_tokens=3)])
        gate.wait()
        with pytest.raises(InUse, match="still run after 0 s"):
            one.unload("m", timeout=0)
        assert len(one.models()) == 2
        waiter = threading.Thread(target=one.unload, args=("m",))
        waiter.start()
        while len(one.models()) == 2:
            time.sleep(0.001)
        assert next(one.run([request("b")])).error == "model 'm' is not loaded"
        gate.open()
        assert [event.token for event in events] == expected(request("a", max_tokens=3))
        waiter.join(LIMIT)
        assert not waiter.is_alive()


def test_a_load_that_waits_when_the_engine_dies_is_told() -> None:
    gate = Gate()
    engine = Broken([M], 4000, [spec("late")], pace=gate)
    with driver(engine) as one:
        one.run([request("a", max_tokens=50)])
        gate.wait()
        refused: list[str] = []
        loading = threading.Thread(target=lambda: refused.append(outcome(lambda: one.load("late"))), daemon=True)
        loading.start()
        while not one._jobs:
            time.sleep(0.001)
        one._jobs.appendleft(Job(engine.lose))
        gate.open()
        loading.join(LIMIT)
        assert refused == ["Unavailable: the engine is lost: the device is gone"]


def test_an_engine_lost_while_loading_is_lost() -> None:
    engine = Broken([M], 4000, [spec("late")])
    engine.load = engine.lose  # type: ignore[assignment, method-assign]
    with driver(engine) as one:
        with pytest.raises(EngineLost):
            one.load("late")
        one._thread.join(LIMIT)
        assert one.death == "the engine is lost: the device is gone"


# -- ends --------------------------------------------------------------------------------------------------------------


def test_drain_waits_for_what_runs_and_refuses_what_comes() -> None:
    gate = Gate()
    with driver(FakeEngine([M], 4000, pace=gate)) as one:
        events = one.run([request("a", max_tokens=3)])
        assert not one.drain(0.01)
        assert one.draining
        with pytest.raises(Unavailable, match="shutting down"):
            one.run([request("b")])
        gate.open()
        assert one.drain(LIMIT)
        assert [event.token for event in events] == expected(request("a", max_tokens=3))


def test_shutdown_ends_what_is_unfinished() -> None:
    gate = Gate()
    one = LocalDriver(FakeEngine([M], 4000, pace=gate), BatchingConfig(max_sequences=1))
    events = one.run([request("a", max_tokens=1000), request("b")])
    gate.wait()
    assert not one.shutdown(0.01)  # the step is still under way
    gate.open()
    assert one.shutdown(LIMIT)
    assert one.shutdown(LIMIT)
    assert {event.seq: event.error for event in events if event.finish} == dict.fromkeys("ab", "the driver was shut down")
    with pytest.raises(Unavailable):
        one.load("m")


def test_two_sequences_cannot_have_one_name() -> None:
    gate = Gate()
    with driver(FakeEngine([M], 4000, pace=gate)) as one:
        with pytest.raises(ValueError, match="same name"):
            one.run([request("a"), request("a")])
        first = one.run([request("a")])
        with pytest.raises(ValueError, match="same name"):
            one.run([request("b"), request("a")])
        gate.open()
        assert len(list(first)) == 4
        assert len(list(one.run([request("a"), request("b")]))) == 8


def test_a_driver_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    for _ in range(3):
        with LocalDriver(FakeEngine([M], 100), BatchingConfig()) as one:
            list(one.run([request("a")]))
    assert threading.active_count() == before
    assert local.MAX_FAILURES == 3
