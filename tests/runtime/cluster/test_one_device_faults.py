"""One device under the scheduler, when its engine or its agent fails: no request hangs, and no detail leaks out."""

from __future__ import annotations

import asyncio

import pytest

from runtime.agent.agent import Agent
from runtime.types import EngineLost, TokenEvent
from tests.runtime.cluster.helpers import LIMIT, Broken, Gate, M, collect, driver, expected, until
from tests.runtime.cluster.whole import WholeEngine
from tests.runtime.virtual import request, spec
from zoo.errors import Unavailable


def test_a_failed_step_ends_its_sequences_and_the_driver_goes_on() -> None:
    with driver(WholeEngine([M], 4000, fail_at=[2])) as one:
        events = list(one.run([request("a", max_tokens=5)]))
        assert [(event.finish, event.error) for event in events] == [
            (None, None),
            ("error", "the engine failed: FakeFault"),
        ]
        assert [event.token for event in one.run([request("b")])] == expected(request("b"))
        assert one.alive
        assert one.state().counters.failed_steps == 1


def test_three_failures_in_a_row_are_the_end() -> None:
    engine = WholeEngine([M], 4000, fail_at=range(1, 100))
    with driver(engine, max_num_seqs=1) as one:
        requests = [request(f"s{index}") for index in range(5)]
        try:
            events = list(one.run(requests))
        except Unavailable:
            pytest.fail("the requests came before the death")
        assert [event.finish for event in events] == ["error"] * 5
        one._scheduler_loop.join(LIMIT)
        assert not one.alive
        assert "3 steps in a row failed" in (one.death or "")
        assert one.drain(0)
        with pytest.raises(Unavailable, match="3 steps in a row"):
            one.run([request("late")])


def test_failures_that_are_not_in_a_row_are_survived() -> None:
    with driver(WholeEngine([M], 4000, fail_at=[1, 2, 4, 5, 7, 8])) as one:
        for index in range(9):
            list(one.run([request(f"s{index}", max_tokens=1)]))
        assert one.alive


@pytest.mark.parametrize("error", [EngineLost("the device is gone"), SystemExit()])
def test_a_lost_engine_ends_every_stream(error: BaseException) -> None:
    async def client() -> tuple[list[list[TokenEvent]], str | None]:
        gate = Gate()
        engine = Broken([M], 4000, pace=gate)
        with driver(engine, max_num_seqs=2) as one:
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


@pytest.mark.parametrize("verb", ["next_step", "finish_step"])
def test_a_defect_of_the_agent_hangs_nobody(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: object) -> None:
        raise KeyError("defect")

    gate = Gate()
    with driver(WholeEngine([M], 4000, pace=gate)) as one:
        events = one.run([request("a", max_tokens=50)])
        gate.wait()
        monkeypatch.setattr(Agent, verb, defect)
        gate.open()
        assert list(events)[-1].finish == "error"


def test_what_an_error_says_stays_inside() -> None:
    engine = Broken([M], 4000)
    engine.error = RuntimeError("at 0x7f1234 in /secret/path")
    with driver(engine) as one:
        (event,) = one.run([request("a")])
        assert event.error == "the engine failed: RuntimeError"


def test_an_engine_lost_while_loading_is_lost() -> None:
    engine = Broken([M], 4000, [spec("late")])
    with driver(engine) as one:
        engine.load = engine.lose  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match="the device is gone"):
            one.load("late")
        one._scheduler_loop.join(LIMIT)
        assert "the device is gone" in (one.death or "")
