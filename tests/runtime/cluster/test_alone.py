"""A cluster of one device on the scheduler's own thread: the same driver, the same answers, and the ends that a driver owes its clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from runtime.cluster.alone import Alone
from runtime.cluster.driver import ClusterDriver
from runtime.cluster.process import AgentSettings
from runtime.config import ClusterConfig
from runtime.engine.counting import CountingEngine
from runtime.stages import Array, StageResult
from runtime.types import EngineLost, StepPlan
from tests.runtime.cluster.clusters import CUTS, LIMIT, MODELS, Load, answered, blocks, eventually, request, verify
from zoo.errors import NotServable, Unavailable


def alone(make: Callable[[], CountingEngine] = lambda: CountingEngine(MODELS, 400)) -> ClusterDriver:
    chains = [model.chain(*CUTS) for model in MODELS]
    only = Alone(make, settings=AgentSettings(report_seconds=0.05))
    return ClusterDriver(chains, blocks(), [only.device], only, ClusterConfig())


def test_tokens_are_the_models_own_and_pages_come_back() -> None:
    with alone() as driver:
        with Load(driver) as load:
            assert eventually(lambda: load.done > 20)
        assert not load.wrong, load.wrong
        state = driver.state()
        assert state.running == state.waiting == 0 and state.pages.free == state.pages.capacity
        assert driver.health()["status"] == "ok" and driver.agents()[0].phase == "up"
        assert eventually(lambda: driver.sight.reports()["agent-0"].steps > 20)
        with pytest.raises(NotServable):
            driver.load("org/other")


def test_a_step_that_fails_ends_its_own_sequences_only() -> None:
    with alone(lambda: CountingEngine(MODELS, 400, fail_at=(3,))) as driver:
        one, two = request("one", range(1, 9)), request("two", range(2, 12))
        assert answered(driver, [one])["one"][-1].finish == "error"
        verify(two, answered(driver, [two])["two"])


class _Lost(CountingEngine):
    """Is lost on its third step."""

    def run(self, plan: StepPlan, inputs: dict[str, Array]) -> StageResult:  # type: ignore[override]
        if plan.step == 3:
            raise EngineLost("the device has gone")
        return super().run(plan, inputs)


def test_an_engine_that_is_lost_is_the_end_and_says_why() -> None:
    with alone(lambda: _Lost(MODELS, 400)) as driver:
        events = answered(driver, [request("one", range(1, 9))])["one"]
        assert events[-1].finish == "error" and "the device has gone" in (events[-1].error or "")
        assert eventually(lambda: not driver.alive) and "the device has gone" in (driver.death or "")
        with pytest.raises(Unavailable):
            driver.run([request("two", range(1, 9))])


def test_an_engine_that_cannot_be_made_is_told_at_once() -> None:
    def make() -> CountingEngine:
        raise EngineLost("no such device")

    with pytest.raises(Unavailable, match="no such device"):
        alone(make)


def test_another_engine_takes_over_and_nothing_is_lost() -> None:
    made: list[CountingEngine] = []

    def make() -> CountingEngine:
        made.append(CountingEngine(MODELS, 400))
        return made[-1]

    with alone(make) as driver:
        with Load(driver, clients=2) as load:
            assert eventually(lambda: load.done > 3) and driver.roll(LIMIT)
            after = load.done
            assert eventually(lambda: load.done > after + 3)
        assert not load.wrong, load.wrong
        assert len(made) == 2 and driver.agents()[0].incarnation == 2


def test_requests_and_aborts_come_while_a_step_runs() -> None:
    """Nobody who asks waits for the engine."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow(CountingEngine):
        def run(self, plan: StepPlan, inputs: dict[str, Array]) -> StageResult:  # type: ignore[override]
            inside.set()
            assert go_on.wait(LIMIT)
            return super().run(plan, inputs)

    with alone(lambda: Slow(MODELS, 400)) as driver:
        try:
            first = driver.run([request("one", range(1, 9), max_tokens=300)])
            assert inside.wait(LIMIT)
            second = driver.run([request("two", range(1, 9), max_tokens=3)])
            driver.abort(["one"])
            assert driver.state().running + driver.state().waiting <= 2
        finally:
            go_on.set()
        assert _ends(first) == "abort" and _ends(second) == "length"


def _ends(events: Sequence[object] | object) -> str | None:
    return [event.finish for event in events][-1]  # type: ignore[attr-defined]
