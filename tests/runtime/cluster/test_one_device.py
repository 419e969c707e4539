"""One device under the scheduler, on its thread: streams, clients that leave, models, shutdown.

Every wait has a limit.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from runtime.cluster import errors
from runtime.types import TokenEvent
from tests.runtime.cluster.helpers import LIMIT, Gate, M, collect, driver, expected, tokens, until
from tests.runtime.cluster.whole import WholeEngine, answer, inline
from tests.runtime.virtual import request, spec
from zoo.errors import NotFound, NotServable, Unavailable


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
        with driver(WholeEngine([M], 400), max_num_batched_tokens=32, max_num_seqs=16) as one:
            return await asyncio.gather(*(collect(one.open_stream([wanted])) for wanted in requests))

    for wanted, events in zip(requests, asyncio.run(clients()), strict=True):
        assert tokens(events, wanted.seq) == expected(wanted)
        assert [event.finish for event in events][-1] == "length"


def test_one_stream_over_several_sequences_and_a_refusal() -> None:
    async def client() -> list[TokenEvent]:
        with driver() as one:
            return await collect(
                one.open_stream([request("a"), request("b", max_tokens=9), request("bad", model="other")])
            )

    events = asyncio.run(client())
    assert tokens(events, "a") == expected(request("a"))
    assert tokens(events, "b") == expected(request("b", max_tokens=9))
    assert [(event.finish, event.error) for event in events if event.seq == "bad"] == [
        ("error", "model 'other' is not loaded")
    ]


def test_a_step_reaches_an_event_loop_in_one_call() -> None:
    async def client() -> tuple[int, int]:
        gate = Gate()
        with driver(WholeEngine([M], 4000, pace=gate), max_num_seqs=32) as one:
            streams = [one.open_stream([request(f"s{index}", max_tokens=3)]) for index in range(20)]
            loop, calls = asyncio.get_running_loop(), 0
            original = loop.call_soon_threadsafe

            def counted(*args: Any, **values: Any) -> Any:
                nonlocal calls
                calls += threading.current_thread().name.startswith("zoo-scheduler")
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
        with driver(WholeEngine([M], 4000, pace=gate)) as one:
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
    with driver(WholeEngine([M], 4000, pace=gate), max_num_seqs=1) as one:
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
        with driver(WholeEngine([M], 4000, pace=gate)) as one:
            stream = one.open_stream([request("a", max_tokens=5)])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(stream)
            gate.open()
            return await collect(stream)

    assert tokens(asyncio.run(client()), "a") == expected(request("a", max_tokens=5))


def test_requests_and_aborts_get_through_while_the_engine_works() -> None:
    gate = Gate()
    with driver(WholeEngine([M], 4000, pace=gate)) as one:
        first = one.run([request("a", max_tokens=50)])
        gate.wait()
        second = one.run([request("b", max_tokens=2)])
        one.abort(["a", "never"])
        assert one.state().running + one.state().waiting <= 2, "whoever looks waits for no step"
        gate.open()
        assert [event.finish for event in first][-1] == "abort"
        assert [event.token for event in second] == expected(request("b", max_tokens=2))
        assert one.drain(LIMIT)
        assert one.state().pages.free == 4000


def test_an_event_loop_that_was_closed_costs_nobody_else() -> None:
    gate = Gate()
    with driver(WholeEngine([M], 4000, pace=gate)) as one:

        async def forgetful() -> None:
            one.open_stream([request("lost", max_tokens=1000)])

        asyncio.run(forgetful())
        others = one.run([request("b", max_tokens=5)])
        gate.open()
        assert [event.token for event in others] == expected(request("b", max_tokens=5))
        assert one.drain(LIMIT)
        assert one.state().pages.free == 4000
        assert one.state().counters.finished == {"abort": 1, "length": 1}


# -- models ------------------------------------------------------------------------------------------------------------


def test_models_are_loaded_and_unloaded_while_serving() -> None:
    late = spec("late", max_model_len=100_000)
    engine = WholeEngine([M], 4000, [late])
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
    engine = WholeEngine([M], 10, [spec("huge", kv_layers=11)])
    with driver(engine) as one:
        with pytest.raises(NotServable):
            one.load("huge")
        assert [found.name for found in engine.models()] == ["m"]


# -- drain and shutdown ------------------------------------------------------------------------------------------------


def test_drain_waits_for_what_runs_and_refuses_what_comes() -> None:
    gate = Gate()
    with driver(WholeEngine([M], 4000, pace=gate)) as one:
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
    one = inline(WholeEngine([M], 4000, pace=gate), max_num_seqs=1)
    events = one.run([request("a", max_tokens=1000), request("b")])
    gate.wait()
    assert not one.shutdown(0.01)  # the step is still running
    gate.open()
    assert one.shutdown(LIMIT)
    assert one.shutdown(LIMIT)
    assert {event.seq: event.error for event in events if event.finish} == dict.fromkeys(
        "ab", "the driver was shut down"
    )
    with pytest.raises(Unavailable):
        one.run([request("late")])


def test_two_sequences_cannot_have_one_name() -> None:
    gate = Gate()
    with driver(WholeEngine([M], 4000, pace=gate)) as one:
        with pytest.raises(ValueError, match="same name"):
            one.run([request("a"), request("a")])
        first = one.run([request("a")])
        with pytest.raises(ValueError, match="same name"):
            one.run([request("b"), request("a")])
        gate.open()
        assert len(list(first)) == 4
        assert len(list(one.run([request("a"), request("b")]))) == 8


def test_a_driver_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    for _ in range(3):
        with inline(WholeEngine([M], 100)) as one:
            list(one.run([request("a")]))
    assert not set(threading.enumerate()) - before
    assert errors.MAX_FAILURES == 3
