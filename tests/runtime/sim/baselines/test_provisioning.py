"""Where engines start, and which ones stop for them."""

from __future__ import annotations

from runtime.sim.baselines.engine import EngineRequest, EngineSettings, ModelEngine
from runtime.sim.baselines.provisioning import engine_for, plan_start, to_drain
from runtime.types import SamplingParams, SequenceRequest

MEMORY = {"d0": 100, "d1": 100}


def engine(group: str, device: str, nbytes: int = 60, since: int = 0, load: int = 0) -> ModelEngine:
    made = ModelEngine(group, device, 1000, nbytes, EngineSettings(), up=True, since=since)
    for number in range(load):
        name = f"{group}{number}"
        made.waiting.append(EngineRequest(SequenceRequest(name, name, group, (0,), SamplingParams(max_tokens=1))))
    return made


def test_free_memory_first_then_the_engine_that_was_idle_longest():
    first, second = engine("a", "d0", since=5), engine("b", "d1", since=3)
    free = plan_start([first], MEMORY, 60, 10, 0)
    assert free is not None and (free.device, free.stops) == ("d1", ())
    taken = plan_start([first, second], MEMORY, 60, 10, 0)
    assert taken is not None and (taken.device, taken.stops) == ("d1", (second,))
    assert plan_start([first, second], MEMORY, 60, 10, 8) is None, "not idle for long enough"


def test_engines_with_requests_do_not_stop():
    busy = [engine("a", "d0", load=1), engine("b", "d1", load=2)]
    assert plan_start(busy, MEMORY, 60, 10, 0) is None
    assert to_drain(busy, MEMORY, 60) == (busy[0],)
    busy[0].draining = True
    assert to_drain(busy, MEMORY, 60) == (), "one after the other"


def test_requests_go_to_the_engine_with_the_fewest():
    engines = [engine("a", "d0", load=2), engine("a", "d1", load=1), engine("b", "d1")]
    assert engine_for(engines, "a") is engines[1]
    engines[1].draining = True
    assert engine_for(engines, "a") is engines[0]
    assert engine_for(engines, "c") is None
