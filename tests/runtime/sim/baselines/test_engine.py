"""One engine: prompts first, one token of every running request per step, a reserve that is never exceeded."""

from __future__ import annotations

from runtime.sim.baselines.engine import EngineRequest, EngineSettings, ModelEngine
from runtime.types import SamplingParams, SequenceRequest


def engine(capacity: int = 1000, **settings: object) -> ModelEngine:
    return ModelEngine("m", "d0", capacity, 1, EngineSettings(**settings), up=True)  # type: ignore[arg-type]


def asked(name: str, prompt: int, answer: int) -> EngineRequest:
    sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
    return EngineRequest(SequenceRequest(name, name, "m", (0,) * prompt, sampling))


def finished(one: ModelEngine) -> list[str]:
    """Run until nothing is left; return the requests in the order of their ends."""
    ended: list[str] = []
    while one.next_step():
        assert one.used <= one.capacity
        ended += [each.request.seq for each in one.finish_step() if each.complete]
    assert not one.load
    return ended


def test_prompts_run_in_a_step_of_their_own_before_decodes():
    one = engine()
    one.waiting.append(asked("a", 10, 3))
    assert len(one.next_step()) == 1 and one.work()["m"].chunk == 10
    one.finish_step()
    one.waiting.append(asked("b", 20, 2))
    assert [each.request.seq for each in one.next_step()] == ["b"]
    one.finish_step()
    assert len(one.next_step()) == 2
    assert (one.work()["m"].rows, one.work()["m"].context) == (2, 11 + 21)
    one.finish_step()
    assert finished(one) == ["a"]


def test_a_full_reserve_preempts_the_latest_request_and_all_end():
    one = engine(capacity=60)
    for name in "abc":
        one.waiting.append(asked(name, 10, 20))
    assert finished(one)[0] == "a"
    assert one.preemptions > 0


def test_a_batch_that_runs_to_completion_takes_no_request_meanwhile():
    batched, joined = engine(run_to_completion=True), engine()
    for one in (batched, joined):
        one.waiting.append(asked("long", 10, 8))
        one.next_step()
        one.finish_step()
        one.waiting.append(asked("short", 10, 1))
    assert finished(batched) == ["long", "short"]
    assert finished(joined) == ["short", "long"]


def test_an_engine_that_starts_runs_nothing():
    one = engine()
    one.up = False
    one.waiting.append(asked("a", 10, 3))
    assert not one.next_step() and not one.idle
