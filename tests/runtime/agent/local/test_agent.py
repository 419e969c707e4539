"""The agent's verbs when nothing goes wrong: ends, refusals, order, models, what it tells of itself."""

from __future__ import annotations

import re

import pytest

from runtime.agent.local.agent import LocalAgent
from runtime.config import BatchingConfig
from runtime.control.counters import BlockLoad, ModelLoad
from runtime.engine.fakes.fake import FakeEngine, answer
from runtime.types import Sampled, SequenceRequest, StepResult
from tests.runtime.agent.helpers import M, agent_with, only, played, step
from tests.runtime.virtual import Virtual, request, spec
from zoo.errors import InUse, NotFound, NotServable

# -- ends --------------------------------------------------------------------------------------------------------------


def test_max_tokens_ends_with_length() -> None:
    told = only(request("a", max_tokens=4))
    assert (len(told.tokens), told.last.finish, told.last.token is not None) == (4, "length", True)


def test_eos_ends_with_stop_and_is_told() -> None:
    assert answer(M, (1, 2, 3), request("a").sampling)[0] == 21
    told = only(request("a"), models=(spec(eos_token_ids=(21,)),))
    assert (told.tokens, told.last.finish) == ([21], "stop")


def test_ignore_eos_goes_on_but_stop_token_ids_still_stop() -> None:
    models = (spec(eos_token_ids=(21,)),)
    assert len(only(request("a", ignore_eos=True), models=models).tokens) == 4
    told = only(request("a", ignore_eos=True, stop_token_ids=(21,)), models=models)
    assert (told.tokens, told.last.finish) == ([21], "stop")


def test_no_stop_before_min_tokens() -> None:
    agent = agent_with(request("a", max_tokens=9, min_tokens=3, stop_token_ids=(5,)))
    ends = []
    while (plan := agent.next_step(0)) is not None:
        ends += [event.finish for event in agent.finish_step(StepResult(plan.step, (Sampled("a", 5),)), 0)]
    assert ends == [None, None, "stop"]


def test_the_context_ends_with_length() -> None:
    told = only(request("a", range(60), max_tokens=50))
    assert (len(told.tokens), told.last.finish) == (4, "length")


def test_a_device_smaller_than_the_context_caps_it() -> None:
    virtual = played(request("a", max_tokens=50), pages=7)  # three groups of two pages hold 12 tokens
    assert [one.max_model_len for one in virtual.agent.models] == [12]
    assert len(virtual.told["a"].tokens) == 9
    assert virtual.told["a"].last.finish == "length"


def test_virtual_tokens_take_pages_and_positions_but_are_nobodys_tokens() -> None:
    model = spec(virtual_tokens=5)
    virtual = played(
        request("a", (8, 9), max_tokens=50, prompt_logprobs=0), models=(model,), pages=7, max_num_batched_tokens=4
    )
    assert [one.max_model_len for one in virtual.agent.models] == [7]  # of the 12 tokens that the device holds
    told = virtual.told["a"]
    assert len(told.tokens) == 5 and told.last.finish == "length"
    assert [score.start for event in told.events for score in event.prompt_logprobs] == [1]
    assert virtual.agent.state().counters.prompt_tokens == 2
    agent = LocalAgent([model], 7, BatchingConfig(max_num_batched_tokens=6))
    agent.add(request("b", (8, 9)), 0)
    plan = agent.next_step(0)
    assert plan is not None and (plan.rows[0].tokens, plan.rows[0].start, plan.rows[0].sample) == (
        (0, 0, 0, 0, 0, 8),
        0,
        False,
    )


def test_a_device_too_small_for_virtual_tokens_and_one_more_refuses_the_model() -> None:
    with pytest.raises(NotServable, match="6 pages"):
        LocalAgent([spec(virtual_tokens=8)], 5, BatchingConfig())


def test_scoring_a_prompt_needs_no_token() -> None:
    virtual = played(request("a", range(1, 11), max_tokens=0, prompt_logprobs=0), max_num_batched_tokens=4)
    (event,) = virtual.told["a"].events
    assert (event.token, event.index, event.finish) == (None, 0, "length")
    assert [score.start for score in event.prompt_logprobs] == [1, 4, 8]
    assert [one.token for score in event.prompt_logprobs for one in score.chosen] == list(range(2, 11))
    assert virtual.agent.state().pages.free == 200


def test_scores_of_a_prompt_come_with_the_first_token_only() -> None:
    told = only(request("a", range(1, 11), max_tokens=3, prompt_logprobs=1, logprobs=1), max_num_batched_tokens=4)
    assert [len(event.prompt_logprobs) for event in told.events] == [3, 0, 0]
    assert all(event.logprob == -1.0 and len(event.top) == 1 for event in told.events)


def test_a_prompt_as_long_as_the_context_can_be_scored_but_not_continued() -> None:
    assert only(request("a", range(64), max_tokens=0)).last.finish == "length"
    refused = only(request("a", range(64), max_tokens=1)).last
    assert refused.finish == "error"
    assert "leaves no room" in (refused.error or "")


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (request("a", model="other"), "not loaded"),
        (request("a", ()), "empty"),
        (request("a", range(65)), "leaves no room"),
        (request("a", (1, 97)), r"prompt token ids must lie in \[0, 97\)"),
        (request("a", (-1,)), "prompt token ids"),
        (request("a", stop_token_ids=(97,)), "stop_token_ids"),
        (request("a", logit_bias=((97, 1.0),)), "logit_bias"),
        (request("a", max_tokens=-1), "negative"),
        (request("a", max_tokens=2, min_tokens=3), "exceeds max_tokens"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(bad: SequenceRequest, why: str) -> None:
    agent = LocalAgent([M], 200, BatchingConfig())
    (event,) = agent.add(bad, 0)
    assert (event.seq, event.request, event.finish, event.token) == ("a", "r-a", "error", None)
    assert re.search(why, event.error or "")
    assert agent.next_step(0) is None
    assert agent.state().counters.finished == {"error": 1}


def test_a_name_in_use_is_the_callers_mistake() -> None:
    agent = agent_with(request("a"))
    with pytest.raises(ValueError, match="exists already"):
        agent.add(request("a"), 0)


# -- order -------------------------------------------------------------------------------------------------------------


def test_lower_priority_numbers_go_first_then_arrival_then_order_of_coming() -> None:
    agent = agent_with(
        request("late", arrival=9),
        request("early", arrival=1),
        request("same", arrival=1),
        request("urgent", priority=-1, arrival=99),
        max_num_seqs=4,
    )
    plan = agent.next_step(0)
    assert plan is not None
    assert [row.seq for row in plan.rows] == ["urgent", "early", "same", "late"]


def test_a_newcomer_joins_the_very_next_step() -> None:
    engine = FakeEngine([M], 200)
    agent = agent_with(request("a", max_tokens=9))
    step(agent, engine)
    agent.add(request("b"), 0)
    plan = agent.next_step(0)
    assert plan is not None
    assert {row.seq for row in plan.rows} == {"a", "b"}


# -- models ------------------------------------------------------------------------------------------------------------


def test_models_come_and_go() -> None:
    agent = agent_with(request("a"))
    agent.load_model(spec("late"), 0)
    assert agent.add(request("b", model="late"), 0) == []
    with pytest.raises(ValueError, match="already"):
        agent.load_model(spec("late"), 0)
    with pytest.raises(InUse):
        agent.unload_model("late", 0)
    agent.abort("b", 0)
    agent.unload_model("late", 0)
    assert "not loaded" in (agent.add(request("c", model="late"), 0)[0].error or "")
    with pytest.raises(NotFound):
        agent.unload_model("late", 0)


def test_a_closed_model_takes_nothing_new_until_reopened() -> None:
    agent = agent_with(request("a"))
    agent.models.close("m")
    assert agent.add(request("b"), 0)[0].finish == "error"
    assert agent.next_step(0) is not None
    agent.models.reopen("m")
    assert agent.add(request("c"), 0) == []


def test_a_model_too_large_for_the_device_is_refused() -> None:
    with pytest.raises(NotServable, match="needs 2 pages for its first token, the device has 1"):
        LocalAgent([M], 1, BatchingConfig())


def test_flush_lets_the_engine_forget() -> None:
    engine = FakeEngine([M], 200)
    agent = agent_with(request("a", max_tokens=1))
    assert agent.flush() is None
    step(agent, engine)
    plan = agent.flush()
    assert plan is not None
    assert (plan.rows, plan.released) == ((), ("a",))
    agent.finish_step(engine.execute(plan), 0)
    assert engine.sequences == 0
    assert agent.flush() is None
    assert agent.state().counters.steps == 1


# -- what it tells of itself -------------------------------------------------------------------------------------------


def test_state_counts_by_model_and_by_block() -> None:
    tuned = spec("tuned", blocks=("b0", "own"))
    agent = LocalAgent([M, tuned], 200, BatchingConfig(max_num_seqs=2))
    for seq, model in (("a", "m"), ("b", "tuned"), ("c", "tuned")):
        agent.add(request(seq, model=model), 0)
    agent.next_step(0)
    state = agent.state()
    assert (state.running, state.waiting) == (2, 1)
    assert state.models == (ModelLoad("m", 1, 0), ModelLoad("tuned", 1, 1))
    assert state.instances == (BlockLoad("b0", 1, 2, 2), BlockLoad("b1", 0, 1, 2), BlockLoad("own", 1, 1, 2))
    assert (state.pages.capacity, state.pages.free, state.pages.reserved) == (200, 196, 4)


def test_counters() -> None:
    tuned = spec("tuned", blocks=("b0", "own"))
    virtual = Virtual(FakeEngine([M, tuned], 200, segments=True, alpha=10, beta=1))
    virtual.arrive(request("a", range(5), max_tokens=2))
    virtual.arrive(request("b", range(7), "tuned", max_tokens=2))
    virtual.run()
    counters = virtual.agent.state().counters
    assert (counters.prompt_tokens, counters.generated_tokens, counters.steps) == (12, 4, 2)
    assert counters.segments == 6
    assert counters.busy == 2 * 10 + 12 + 2
    assert counters.finished == {"length": 2}


def test_the_trace_tells_the_whole_life_of_a_sequence() -> None:
    virtual = Virtual(FakeEngine([M], 200, segments=True), BatchingConfig(max_num_batched_tokens=4))
    virtual.arrive(request("a", range(6), max_tokens=2))
    virtual.run()
    own = [event.ev for event in virtual.trace.events if event.seq == "a"]
    assert own == [
        "arrive", "batch.insert", "kv.alloc", "prefill.chunk", "kv.alloc", "prefill.chunk", "token", "token",
        "batch.remove", "kv.free", "finish",
    ]  # fmt: skip
    assert [event.n for event in virtual.trace.named("prefill.chunk")] == [4, 2]
    assert {event.req for event in virtual.trace.events if event.seq == "a"} == {"r-a"}
    assert next(event.ev for event in virtual.trace.events) == "model.load"
    runs = virtual.trace.named("segment.run")
    assert [(run.n, run.extra["components"], run.extra["seqs"]) for run in runs[:2]] == [
        (4, ("b0",), 1),
        (4, ("b1",), 1),
    ]
