"""The agent's verbs when something comes between: aborts in every phase, preemption, faults."""

from __future__ import annotations

import pytest

from runtime.config import BatchingConfig
from runtime.engine.fakes.fake import FakeEngine, answer
from runtime.types import Sampled, StepResult
from tests.runtime.agent.helpers import M, agent_with, played, step
from tests.runtime.virtual import Virtual, request

# -- aborts ------------------------------------------------------------------------------------------------------------


def test_abort_while_waiting() -> None:
    agent = agent_with(request("a"))
    (event,) = agent.abort("a", 0)
    assert (event.finish, event.index) == ("abort", 0)
    assert agent.next_step(0) is None
    agent.check()


def test_abort_between_steps_frees_pages_and_tells_the_engine() -> None:
    engine = FakeEngine([M], 200)
    agent = agent_with(request("a"), request("b"))
    step(agent, engine)
    (event,) = agent.abort("a", 0)
    assert (event.finish, event.index) == ("abort", 1)
    assert agent.state().pages.free == 198
    plan = agent.next_step(0)
    assert plan is not None
    assert plan.released == ("a",)
    agent.check()


def test_abort_during_its_step_keeps_the_pages_until_the_step_is_over() -> None:
    engine = FakeEngine([M], 200)
    agent = agent_with(request("a"), request("b"))
    plan = agent.next_step(0)
    assert plan is not None
    (event,) = agent.abort("a", 0)
    assert event.finish == "abort"
    assert agent.state().pages.free == 196
    assert agent.in_use("m")
    with pytest.raises(ValueError, match="exists already"):
        agent.add(request("a"), 0)
    agent.check()
    assert [one.seq for one in agent.finish_step(engine.execute(plan), 0)] == ["b"]
    assert agent.state().pages.free == 198
    agent.check()


def test_abort_of_a_preempted_sequence() -> None:
    engine = FakeEngine([M], 10)
    agent = agent_with(request("a", range(6), max_tokens=10), request("b", range(6), max_tokens=10), pages=10)
    while not agent.state().counters.preemptions:
        step(agent, engine)
    assert agent.state().waiting == 1
    (event,) = agent.abort("b", 0)
    assert event.finish == "abort"
    assert agent.state().waiting == 0
    agent.check()


def test_aborting_what_is_gone_or_never_was_is_nothing_to_do() -> None:
    virtual = played(request("a"))
    assert virtual.agent.abort("a", 0) == []
    assert virtual.agent.abort("never", 0) == []


# -- preemption --------------------------------------------------------------------------------------------------------


def test_a_preempted_sequence_resumes_where_it_was() -> None:
    requests = [request(seq, range(6), max_tokens=10) for seq in "ab"]
    virtual = played(*requests, pages=10, watermark=0)
    for one in requests:
        assert virtual.told[one.seq].tokens == answer(virtual.agent.models["m"], one.prompt, one.sampling)
    (preempted,) = virtual.trace.named("batch.preempt")
    (resumed,) = virtual.trace.named("batch.resume")
    assert (preempted.seq, resumed.seq) == ("b", "b")
    assert preempted.n is not None
    assert resumed.n == 6 + preempted.n
    # One prefill of prompt and output together, labelled by its reason (QL-09, UN-17).
    assert sum(chunk.n or 0 for chunk in virtual.trace.named("prefill.chunk") if chunk.cause == "resume") == resumed.n
    counters = virtual.agent.state().counters
    assert (counters.preemptions, counters.resumed_tokens, counters.prompt_tokens) == (1, resumed.n, 12)


def test_scores_of_a_prompt_are_told_once_in_spite_of_preemption() -> None:
    requests = [request("a", range(6), max_tokens=10), request("b", range(6), max_tokens=10, prompt_logprobs=0)]
    virtual = played(*requests, pages=10, watermark=0)
    assert virtual.trace.named("batch.preempt")
    assert [len(event.prompt_logprobs) for event in virtual.told["b"].events] == [1] + [0] * 9


def test_scores_come_whole_after_a_preemption_in_the_middle_of_a_prompt() -> None:
    requests = [request("a", range(4), max_tokens=14), request("b", range(12), max_tokens=1, prompt_logprobs=0)]
    virtual = played(*requests, pages=10, max_num_batched_tokens=2, watermark=0)
    assert [(event.seq, event.n) for event in virtual.trace.named("batch.preempt")] == [("b", 0)]
    chunks = [event.extra["start"] for event in virtual.trace.named("prefill.chunk") if event.seq == "b"]
    assert chunks.count(0) == 2
    (event,) = virtual.told["b"].events
    assert [one.token for score in event.prompt_logprobs for one in score.chosen] == list(range(1, 12))
    assert virtual.agent.state().counters.prompt_tokens == 16


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_failed_step_ends_its_own_sequences_only() -> None:
    virtual = Virtual(FakeEngine([M], 200, fail_at=[2]), BatchingConfig())
    for seq in "ab":
        virtual.arrive(request(seq))
    virtual.arrive(request("later"), at=1_500_000)
    virtual.run()
    for seq in "ab":
        assert (virtual.told[seq].last.finish, virtual.told[seq].last.error) == ("error", "step 2 was to fail")
        assert len(virtual.told[seq].tokens) == 1
    assert virtual.told["later"].last.finish == "length"
    assert virtual.agent.state().pages.free == 200
    assert virtual.agent.state().counters.failed_steps == 1
    assert len(virtual.trace.named("fault")) == 1


def test_an_abort_during_a_step_that_fails_is_an_abort() -> None:
    agent = agent_with(request("a"), request("b"))
    plan = agent.next_step(0)
    assert plan is not None
    agent.abort("a", 0)
    assert [(event.seq, event.finish) for event in agent.fail_step("broken", 0)] == [("b", "error")]
    agent.check()
    assert agent.state().pages.free == 200


def test_a_result_that_does_not_answer_the_plan_changes_nothing() -> None:
    agent = agent_with(request("a"), request("b"))
    plan = agent.next_step(0)
    assert plan is not None
    both = (Sampled("a", 1), Sampled("b", 1))
    for wrong in (
        StepResult(plan.step + 1, both),
        StepResult(plan.step, both[:1]),
        StepResult(plan.step, (*both, both[0])),
    ):
        with pytest.raises(ValueError, match="the engine"):
            agent.finish_step(wrong, 0)
    assert len(agent.finish_step(StepResult(plan.step, both), 0)) == 2


def test_the_end_of_the_engine_ends_everything() -> None:
    agent = agent_with(request("a"), request("b"), request("c"), max_num_seqs=2)
    agent.next_step(0)
    agent.abort("a", 0)
    events = agent.end_all("gone", 0)
    assert [(event.seq, event.finish, event.error) for event in events] == [
        ("b", "error", "gone"),
        ("c", "error", "gone"),
    ]
    assert not agent.busy
    assert agent.state().pages.free == 200
    agent.check()


def test_steps_are_taken_one_at_a_time() -> None:
    agent = agent_with(request("a"))
    with pytest.raises(RuntimeError, match="no step"):
        agent.fail_step("x", 0)
    agent.next_step(0)
    with pytest.raises(RuntimeError, match="still under way"):
        agent.next_step(0)
