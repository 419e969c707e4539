"""The fake engine: figures worked out by hand, and every kind of wrong plan caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from runtime.engine.fakes.fake import FakeEngine, FakeFault, PlanViolation, answer, next_token
from runtime.types import EngineMemory, Logprob, Opened, PromptLogprobs, Row, Sampled, SamplingParams, StepPlan
from tests.runtime.virtual import request, spec

M = spec("m", kv_layers=2, page_tokens=4, vocab_size=97, max_model_len=16)  # "m" is 109
A = request("a", (1, 2, 3), max_tokens=4)
FIRST = Row("a", "m", (1, 2, 3), 0, ((0, 1),))
#: 1 + 2 + 3 + 3 tokens + 109 = 118 = 97 + 21
FIRST_TOKEN = 21
#: 6 + 21 + 4 tokens + 109 = 140 = 97 + 43
SECOND_TOKEN = 43


def engine(**values: object) -> FakeEngine:
    return FakeEngine([M], 8, **values)  # type: ignore[arg-type]


def started() -> FakeEngine:
    one = engine()
    one.execute(StepPlan(1, (FIRST,), (Opened(A),)))
    return one


def test_tokens_can_be_worked_out_by_hand() -> None:
    one = engine()
    assert one.execute(StepPlan(1, (FIRST,), (Opened(A),))).sampled == (Sampled("a", FIRST_TOKEN),)
    assert one.execute(StepPlan(2, (Row("a", "m", (FIRST_TOKEN,), 3, (), generated=1),))).sampled == (
        Sampled("a", SECOND_TOKEN),
    )
    assert next_token(M, (1, 2, 3, FIRST_TOKEN)) == SECOND_TOKEN
    assert answer(M, (1, 2, 3), A.sampling)[:2] == [FIRST_TOKEN, SECOND_TOKEN]


def test_a_step_costs_what_its_tokens_cost() -> None:
    result = engine(alpha=100, beta=7).execute(StepPlan(1, (FIRST,), (Opened(A),)))
    assert result.busy == 100 + 3 * 7


def test_pace_spends_the_time() -> None:
    spent: list[int] = []
    engine(alpha=100, beta=7, pace=spent.append).execute(StepPlan(1, (FIRST,), (Opened(A),)))
    assert spent == [121]


def test_logprobs_can_be_worked_out_by_hand() -> None:
    asked = replace(A, sampling=SamplingParams(4, logprobs=2, prompt_logprobs=1))
    result = engine().execute(StepPlan(1, (FIRST,), (Opened(asked),)))
    assert result.sampled == (Sampled("a", 21, -1.0, (Logprob(21, -1.0), Logprob(22, -2.0))),)
    chosen = (Logprob(2, -1.0), Logprob(3, -1.0))
    assert result.prompt_logprobs == (PromptLogprobs("a", 1, chosen, ((chosen[0],), (chosen[1],))),)


def test_min_tokens_moves_on_from_ends() -> None:
    eos = replace(M, eos_token_ids=(21, 22))
    assert answer(eos, (1, 2, 3), SamplingParams(4)) == [21]
    assert answer(eos, (1, 2, 3), SamplingParams(4, ignore_eos=True))[0] == 21
    assert answer(eos, (1, 2, 3), SamplingParams(4, min_tokens=2))[0] == 23
    assert answer(eos, (1, 2, 3), SamplingParams(4, min_tokens=1)) == [21]
    assert answer(M, (1, 2, 3), SamplingParams(4, stop_token_ids=(43,))) == [21, 43]


def test_answers_end_with_the_context() -> None:
    assert len(answer(M, range(10), SamplingParams(50))) == 6


def test_a_resumed_sequence_continues() -> None:
    one = started()
    resumed = Opened(A, (FIRST_TOKEN,))
    row = Row("a", "m", (1, 2, 3, FIRST_TOKEN), 0, ((4, 5),), generated=1)
    assert one.execute(StepPlan(2, (), (), ("a",))).sampled == ()
    assert one.execute(StepPlan(3, (row,), (resumed,))).sampled == (Sampled("a", SECOND_TOKEN),)


def test_a_shared_block_runs_once_over_the_rows_of_all_models() -> None:
    other = spec("o", blocks=("b0", "own"))
    one = FakeEngine([M, other], 8, segments=True)
    rows = (FIRST, Row("b", "o", (5,), 0, ((2, 3),)))
    result = one.execute(StepPlan(1, rows, (Opened(A), Opened(request("b", (5,), "o")))))
    ran = {run.components[0]: (run.models, run.seqs, run.tokens) for run in result.segments}
    assert ran == {"b0": (("m", "o"), 2, 4), "b1": (("m",), 1, 3), "own": (("o",), 1, 1)}


def test_memory_counts_shared_blocks_once() -> None:
    both = FakeEngine([M, spec("o", blocks=("b0", "own"))], 8)
    assert both.memory() == EngineMemory(weights=3000, weights_unshared=4000, kv_pool=80)


NEXT = Row("a", "m", (FIRST_TOKEN,), 3, (), generated=1)


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        (StepPlan(1, (NEXT,)), "comes after"),
        (StepPlan(2, (NEXT, NEXT)), "two rows"),
        (StepPlan(2, (structs.replace(NEXT, seq="b"),)), "unknown"),
        (StepPlan(2, (structs.replace(NEXT, model="n"),)), "belongs to m"),
        (StepPlan(2, (structs.replace(NEXT, start=2),)), "starts at 2"),
        (StepPlan(2, (structs.replace(NEXT, tokens=(22,)),)), "not its tokens"),
        (StepPlan(2, (structs.replace(NEXT, tokens=()),)), "no tokens"),
        (StepPlan(2, (structs.replace(NEXT, sample=False),)), "samples exactly when"),
        (StepPlan(2, (structs.replace(NEXT, generated=0),)), "has produced 1"),
        (StepPlan(2, (structs.replace(NEXT, new_pages=((2, 3),)),)), "2 groups for 4 tokens"),
        (StepPlan(2, (structs.replace(NEXT, new_pages=((2,),)),)), "one page per layer"),
        (StepPlan(2, (structs.replace(NEXT, new_pages=((2, 2),)),)), "given twice"),
        (StepPlan(2, (structs.replace(NEXT, new_pages=((2, 8),)),)), "out of range"),
        (StepPlan(2, (structs.replace(NEXT, new_pages=((1, 2),)),)), "belongs to a"),
        (StepPlan(2, (NEXT,), (Opened(A),)), "opened twice"),
        (StepPlan(2, (NEXT,), (Opened(request("z", model="z")),)), "z is not loaded"),
        (StepPlan(2, (NEXT,), (), ("b",)), "b is unknown"),
        (StepPlan(2, (NEXT,), (), ("a",)), "a is unknown"),
    ],
)
def test_wrong_plans_are_caught(plan: StepPlan, what: str) -> None:
    with pytest.raises(PlanViolation, match=what):
        started().execute(plan)


def test_too_few_pages_are_caught() -> None:
    with pytest.raises(PlanViolation, match="0 groups for 3 tokens"):
        engine().execute(StepPlan(1, (structs.replace(FIRST, new_pages=()),), (Opened(A),)))


def test_a_context_cannot_be_overrun() -> None:
    long = request("a", range(16), max_tokens=4)
    pages = tuple((2 * index, 2 * index + 1) for index in range(4))
    with pytest.raises(PlanViolation, match="no room"):
        engine().execute(StepPlan(1, (Row("a", "m", tuple(range(16)), 0, pages),), (Opened(long),)))


def test_a_fault_leaves_the_sequences_known_and_lets_them_be_released_again() -> None:
    one = engine(fail_at=[1])
    with pytest.raises(FakeFault):
        one.execute(StepPlan(1, (FIRST,), (Opened(A),)))
    assert one.sequences == 1
    one.execute(StepPlan(2, (), (), ("a", "never-learned")))
    assert one.sequences == 0
    with pytest.raises(PlanViolation, match="unknown"):
        one.execute(StepPlan(3, (), (), ("a",)))


def test_models_come_and_go() -> None:
    one = FakeEngine([M], 8, [spec("late")])
    assert one.load("late").name == "late"
    assert [found.name for found in one.models()] == ["m", "late"]
    one.unload("late")
    assert [found.name for found in one.models()] == ["m"]
    with pytest.raises(PlanViolation, match="not loaded"):
        one.unload("late")
    with pytest.raises(PlanViolation, match="still has sequences"):
        started().unload("m")
