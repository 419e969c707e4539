"""Lanes of an agent's steps: stand-ins run beside other rows, neither lane waits, and one thread handles results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from runtime.agent.steps.queue import Lane
from runtime.chains import StageResult, Surrogate
from runtime.cluster.agent_process.lanes import OneLane, TwoLanes, lanes_for
from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.launch.threads import ThreadLauncher
from runtime.config import ClusterConfig, SpeculationConfig
from runtime.control.agent_io import AgentCommand, Send, StageStep
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.engine.fakes.integer_model import surrogate_of
from runtime.messages import PeerDown
from runtime.types import EngineLost, StepPlan, StepResult
from tests.runtime.cluster.agent_programs import LIMIT
from tests.runtime.cluster.clusters import CUTS, DEVICES, MODELS, Load, at_rest, blocks, eventually


@dataclass
class Steps:
    """A fake of an agent with so many steps for each lane.

    Fields:
        told: What was reported to it, with the lane.
        threads: Identifiers of the threads that called it.
    """

    left: dict[Lane, int]
    told: list[tuple[str, Lane]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    number: int = 0
    ahead: Send | None = None

    def next_step(self, now: int, lane: Lane = "all") -> StageStep | None:
        self.threads.add(threading.get_ident())
        if not self.left.get(lane):
            return None
        self.left[lane] -= 1
        self.number += 1
        return StageStep(StepPlan(self.number, ()), {}, {})

    def finish_step(self, result: StageResult, now: int, lane: Lane = "all") -> list[AgentCommand]:
        return self._told("finished", lane)

    def fail_step(self, reason: str, now: int, lane: Lane = "all") -> list[AgentCommand]:
        return self._told(reason, lane)

    def first(self, result: StageResult, now: int) -> Send | None:
        return self.ahead

    def _told(self, what: str, lane: Lane) -> list[AgentCommand]:
        self.threads.add(threading.get_ident())
        self.told.append((what, lane))
        return [Send("d", PeerDown(lane))]


class Runner:
    """An engine whose steps wait until `go` is set, or fail with `error`."""

    def __init__(self, error: Exception | None = None, *, held: bool = False) -> None:
        self.go, self.ran, self._error = threading.Event(), 0, error
        if not held:
            self.go.set()

    def run(self, plan: StepPlan, inputs: object) -> StageResult:
        assert self.go.wait(LIMIT)
        self.ran += 1
        if self._error is not None:
            raise self._error
        return StageResult(StepResult(plan.step, (), (), (), 1), {})


def turns(lanes: TwoLanes | OneLane, until: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT
    while not until():
        assert time.monotonic() < end
        if lanes.turn() is None:
            time.sleep(0.001)


def two(real: Runner, ahead: Runner, steps: Steps, wake: Callable[[], None] = lambda: None) -> TwoLanes:
    return TwoLanes({"real": real, "ahead": ahead}, steps, time.monotonic_ns, wake)


@pytest.mark.parametrize(("held", "free"), [("real", "ahead"), ("ahead", "real")])
def test_neither_lane_waits_for_the_other(held: Lane, free: Lane) -> None:
    steps, runners = Steps({"real": 5, "ahead": 5}), {"real": Runner(), "ahead": Runner()}
    runners[held] = slow = Runner(held=True)
    woken = threading.Event()
    lanes = two(runners["real"], runners["ahead"], steps, woken.set)
    try:
        turns(lanes, lambda: len(steps.told) == 5)
        assert {lane for _, lane in steps.told} == {free} and slow.ran == 0 and woken.is_set()
        assert steps.left[held] == 4, "a lane has one step at a time"
        since = lanes.since()
        assert since is not None and since <= time.monotonic_ns()
        slow.go.set()
        turns(lanes, lambda: len(steps.told) == 10)
        assert lanes.since() is None and steps.threads == {threading.get_ident()}
    finally:
        lanes.close()


def test_a_failing_lane_fails_its_own_steps_and_three_in_a_row_end_it() -> None:
    steps = Steps({"real": 9, "ahead": 9})
    lanes = two(Runner(), Runner(ValueError("no")), steps)
    try:
        with pytest.raises(EngineLost, match="3 steps in a row failed"):
            turns(lanes, lambda: False)
        assert [what for what, lane in steps.told if lane == "ahead"] == ["the engine failed: ValueError"] * 3
        assert all(what == "finished" for what, lane in steps.told if lane == "real")
    finally:
        lanes.close()


def test_a_lost_engine_is_lost_in_either_lane() -> None:
    lanes = two(Runner(), Runner(EngineLost("gone")), Steps({"ahead": 1}))
    try:
        with pytest.raises(EngineLost, match="gone"):
            turns(lanes, lambda: False)
    finally:
        lanes.close()


def test_where_nothing_is_beside_there_is_one_lane() -> None:
    steps, sent = Steps({"all": 2}), []
    lanes = lanes_for(Runner(), None, steps, time.monotonic_ns, lambda: None, sent.append)
    assert isinstance(lanes, OneLane)
    turns(lanes, lambda: len(steps.told) == 2)
    assert steps.told == [("finished", "all")] * 2 and lanes.since() is None and lanes.turn() is None and not sent


def test_what_another_device_waits_for_is_sent_before_the_step_is_taken() -> None:
    said: list[object] = []
    steps = Steps({"all": 1}, ahead=Send("d", PeerDown("x")))
    lanes = lanes_for(
        Runner(), None, steps, time.monotonic_ns, lambda: None, lambda send: said.append((send, list(steps.told)))
    )
    turns(lanes, lambda: steps.told)
    assert said == [(steps.ahead, [])]


@dataclass
class Under:
    """The steps of a device that run at the moment, by thread, and how often two ran at once."""

    now: set[str] = field(default_factory=set)
    together: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, seconds: float) -> None:
        name = threading.current_thread().name
        with self.lock:
            self.now.add(name)
            self.together += len(self.now) > 1
        time.sleep(seconds)
        with self.lock:
            self.now.discard(name)


@pytest.mark.parametrize("own", [True, False])
def test_tokens_are_the_chains_own_in_either_way(own: bool) -> None:
    """Real agents with counting engines, one hop of which is speculated.

    A stand-in runs at the same time as its hop only with a lane of its own.
    """
    stand_in, under = surrogate_of(MODELS[0], "org/m~", 4, 3), {device: Under() for device in DEVICES}

    def engine(device: str) -> IntegerEngine:
        return IntegerEngine([*MODELS, stand_in], 400, rewrites=True, pace=lambda ns: under[device].take(0.002))

    settings = AgentSettings(report_seconds=0.02, own_lane=own)
    engines = ThreadLauncher(lambda device: lambda: engine(device), settings=settings, beat_seconds=0.1)
    config = ClusterConfig(placement="partition", speculation=SpeculationConfig("exact", top=0.5))
    known = {"org/m": [Surrogate("org/m~", 4, 5, 1)]}
    with ClusterDriver(
        [model.chain(*CUTS) for model in MODELS], blocks(), DEVICES, engines, config, surrogates=known
    ) as driver:
        with driver._changed:
            driver._scheduler.speculation.pin([(MODELS[0].chain(*CUTS).uses[1].block, device) for device in DEVICES])
        with Load(driver, clients=5, max_tokens=10) as load:
            assert eventually(lambda: driver.view.speculation().hits > 5 and driver.view.speculation().misses > 5, 20.0)
        assert not load.wrong and load.done
        assert any(each.together for each in under.values()) == own
        assert eventually(lambda: at_rest(driver))
