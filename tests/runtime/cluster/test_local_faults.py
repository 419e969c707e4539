"""The local driver when its engine, or its own agent, fails: nobody hangs, nothing leaks out."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from runtime.cluster.jobs import Job
from runtime.engine.fakes.fake import FakeEngine
from runtime.types import EngineLost, TokenEvent
from tests.runtime.cluster.helpers import LIMIT, Broken, Gate, M, collect, driver, expected, outcome, until
from tests.runtime.virtual import request, spec
from zoo.errors import Unavailable

# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_failed_step_ends_its_sequences_and_the_driver_goes_on() -> None:
    with driver(FakeEngine([M], 4000, fail_at=[2])) as one:
        events = list(one.run([request("a", max_tokens=5)]))
        assert [(event.finish, event.error) for event in events] == [
            (None, None),
            ("error", "the engine failed: FakeFault"),
        ]
        assert [event.token for event in one.run([request("b")])] == expected(request("b"))
        assert one.alive
        assert one.state().counters.failed_steps == 1


def test_three_failures_in_a_row_are_the_end() -> None:
    engine = FakeEngine([M], 4000, fail_at=range(1, 100))
    with driver(engine, max_num_seqs=1) as one:
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
