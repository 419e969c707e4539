"""A grammar that takes long to be ready holds up its own answer, and no other row."""

from __future__ import annotations

import time
from threading import Event
from typing import Any

import pytest

from runtime.config import EngineConfig
from runtime.control.scheduler_io import AbortSequence
from runtime.engine.executors import stage_step
from runtime.engine.sampling import output
from runtime.engine.sampling.constraints import Constraints
from runtime.grammars.sources import from_regex
from runtime.grammars.state import GrammarState
from tests import checkpoints
from tests.runtime.engine.drive import Driven, Limits, PagedDevice, drive
from tests.runtime.engine.test_constrained import JSON, PROMPT, ask

LONG = tuple(range(40, 70))
OTHER = from_regex("[ab]{3}")


@pytest.fixture(scope="module")
def model(bench) -> str:
    return bench.add("late", checkpoints.make("llama", bench.root / "hf" / "late"))


def device(bench, model: str, **options: Any) -> PagedDevice:
    return PagedDevice(bench.store, EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4, **options), [model])


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Grammars are compiled once this is set."""
    gate, compiled = Event(), Constraints._compiled

    def late(*args: Any) -> Any:
        assert gate.wait(60)
        return compiled(*args)

    monkeypatch.setattr(Constraints, "_compiled", late)
    monkeypatch.setattr(output, "PATIENCE", 0.001)
    yield gate
    gate.set()


def started(bench: Any, asked: list[Any], model: str, steps: int, **options: Any) -> Driven:
    made = Driven(device(bench, model), **options)
    for one in asked:
        made.arrive(one)
    for _ in range(steps):
        assert made.step()
    return made


def finish(made: Driven) -> Any:
    while made.busy:
        assert made.step()
    return made.end()


@pytest.mark.parametrize("credit", [1, 4])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "logprobs": 2}])
def test_free_rows_go_on_and_all_tokens_are_the_same(bench, model, gate, params, credit) -> None:
    free = [ask(model, f"{i}", prompt=PROMPT[i:], max_tokens=20, ignore_eos=True, **params) for i in range(2)]
    bound = [ask(model, "10", JSON, LONG, prompt_logprobs=1, **params), ask(model, "11", OTHER, **params)]
    made = started(bench, [*free, *bound], model, 8, credit=credit)
    ran = made.out.steps
    assert {one.seq for one in ran[0].sampled} == {"0", "1"} and set(ran[0].deferred) == {"10", "11"}
    assert all({one.seq for one in step.sampled} == {"0", "1"} for step in ran)
    assert not any(step.prompt_logprobs for step in ran), "what has no token has no scores either"
    gate.set()
    late = finish(made)
    calm = drive(device(bench, model), {0: [*free, *bound]}, credit=credit)
    for one in [*free, *bound]:
        assert [(e.token, e.logprob, e.top) for e in late.events[one.seq]] == [
            (e.token, e.logprob, e.top) for e in calm.events[one.seq]
        ]
    scores = [part for event in late.events["10"] for part in event.prompt_logprobs]
    assert scores == [part for event in calm.events["10"] for part in event.prompt_logprobs] != []


def test_a_row_that_is_late_is_not_computed_again_before_its_grammar_is_ready(bench, model, gate, monkeypatch) -> None:
    tokens, laid = list[int](), stage_step.laid

    def counted(models: Any, plan: Any, before: Any) -> Any:
        tokens.append(plan.tokens)
        return laid(models, plan, before)

    monkeypatch.setattr(stage_step, "laid", counted)
    made = started(bench, [ask(model, "1", max_tokens=12, ignore_eos=True), ask(model, "2", JSON, LONG)], model, 5)
    assert tokens[0] == len(PROMPT) + len(LONG) and set(tokens[1:]) == {1}
    gate.set()
    finish(made)
    assert sum(count >= len(LONG) for count in tokens) == 2


def test_a_step_of_late_rows_alone_waits(bench, model, gate) -> None:
    made = Driven(device(bench, model))
    made.arrive(ask(model, "1", JSON))
    gate.set()
    out = finish(made)
    assert out.tokens("1") and not any(step.deferred for step in out.steps)


def test_rows_of_a_full_step_that_are_late_leave_room_for_those_that_come(bench, model, gate) -> None:
    made = started(bench, [ask(model, "1", JSON), ask(model, "2", max_tokens=3, ignore_eos=True)], model, 2,
                   config=Limits(max_num_seqs=3))  # fmt: skip
    made.arrive(ask(model, "3", max_tokens=3, ignore_eos=True))
    made.arrive(ask(model, "4", max_tokens=3, ignore_eos=True))
    for _ in range(4):
        made.step()
    assert [event.finish for event in made.out.events["2"]][-1] == "length"
    assert "1" not in made.out.events and made.out.tokens("3")
    gate.set()
    assert finish(made).tokens("4")


def test_an_aborted_late_row_leaves_nothing(bench, model, gate) -> None:
    made = started(bench, [ask(model, "1", JSON), ask(model, "2", max_tokens=6, ignore_eos=True)], model, 3)
    made.tell(AbortSequence("1"))
    out = finish(made)
    assert len(out.tokens("2")) == 6 and out.tokens("1") == []
    gate.set()


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "logprobs": 2}])
def test_free_rows_do_not_wait_for_masks_that_are_slow(bench, model, monkeypatch, params) -> None:
    """In the midst of answers, too: their rows come back once the masks are there."""
    asked = [
        ask(model, "0", prompt=PROMPT[1:], max_tokens=200, ignore_eos=True, **params),
        ask(model, "1", JSON, **params),
    ]
    calm = drive(device(bench, model), {0: asked})
    allowed, said = GrammarState.allowed, list[bool]()

    def slow(state: GrammarState, kept: int, new: Any = (), slowly: bool = False) -> Any:
        said.append(slowly)
        mask = allowed(state, kept, new, slowly)
        end = time.thread_time() + 0.03
        while time.thread_time() < end and len(state._output) > 3:  # once steps repeat the call of the one before
            pass
        return mask

    monkeypatch.setattr(GrammarState, "allowed", slow)
    late = drive(device(bench, model), {0: asked})
    assert [late.tokens(one.seq) for one in asked] == [calm.tokens(one.seq) for one in asked]
    assert [late.events[one.seq][-1].logprob for one in asked] == [calm.events[one.seq][-1].logprob for one in asked]
    begun = next(at for at, step in enumerate(late.steps) if any(one.seq == "1" for one in step.sampled))
    put_off = [step for step in late.steps[begun:] if step.deferred]
    assert put_off and all("0" not in step.deferred for step in put_off)
    assert not said[0] and said[-1], "what is slow is followed without the lock"
    alone = drive(device(bench, model), {0: asked[1:]})
    assert [alone.tokens(one.seq) for one in asked[1:]] == [calm.tokens(one.seq) for one in asked[1:]]


def test_engines_that_launch_ahead_wait_as_before(bench, model, gate) -> None:
    gate.set()
    made = device(bench, model, async_scheduling="on")
    out = drive(made, {0: [ask(model, "1", JSON), ask(model, "2", max_tokens=6)]})
    assert not any(step.deferred for step in out.steps) and not any(plan.defers for plan in out.plans)
    assert out.tokens("1") == drive(device(bench, model), {0: [ask(model, "1", JSON)]}).tokens("1")
