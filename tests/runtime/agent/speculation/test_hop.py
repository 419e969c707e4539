"""Steps planned before the one under way is over: every sequence still gets its own tokens, once, and every page comes
back.

The fake engine refuses a row that awaits what it cannot, and any plan that is not consistent with what it holds.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings

from runtime.agent.local.agent import LocalAgent
from runtime.config import BatchingConfig
from runtime.engine.fakes.fake import FakeEngine, answer
from runtime.types import Finished, Launched, Row, Sampled, StepPlan, StepResult, StepSkipped
from tests.runtime.agent.test_runs import Load, check_quiet, fits, loads
from tests.runtime.agent.test_runs import requests as requests
from tests.runtime.virtual import ListTrace, Virtual, request, spec

M = spec()


class Late(FakeEngine):
    """Runs a step when its result is asked for; what was launched behind one that failed is skipped."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._queue: deque[Late._Waits] = deque()

    class _Waits:
        def __init__(self, engine: Late, plan: StepPlan) -> None:
            self.engine, self.plan, self.skipped = engine, plan, False

        def result(self) -> StepResult:
            assert self.engine._queue.popleft() is self, "in the order of launches"
            if self.skipped:
                raise StepSkipped
            try:
                return self.engine.execute(self.plan)
            except Exception:
                for behind in self.engine._queue:
                    behind.skipped = True
                raise

    def launch(self, plan: StepPlan) -> Launched:
        self._queue.append(Late._Waits(self, plan))
        return self._queue[-1]


def ahead_agent(
    *wanted: Any, pages: int = 200, trace: ListTrace | None = None, models: tuple[Any, ...] = (M,), **config: Any
) -> LocalAgent:
    agent = LocalAgent(models, pages, BatchingConfig(**config), trace, ahead=True)
    for one in wanted:
        assert agent.add(one, 0) == []
    return agent


def planned(agent: LocalAgent) -> tuple[Row, ...]:
    plan = agent.next_step(0)
    assert plan is not None
    return plan.rows


def told(agent: LocalAgent, step: int, **tokens: int) -> list[tuple[str, int | None, str | None]]:
    events = agent.finish_step(StepResult(step, tuple(Sampled(seq, token) for seq, token in tokens.items())), 0)
    agent.check()
    return [(event.seq, event.token, event.finish) for event in events]


# -- random schedules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [FakeEngine, Late])
def test_every_sequence_gets_exactly_its_tokens(made: type[FakeEngine]) -> None:
    looked_ahead: list[bool] = []

    @settings(max_examples=30, deadline=None)
    @given(loads(disturbed=False))
    def play(load: Load) -> None:
        virtual = load.play(made, ahead=True)
        for _, one in load.arrivals:
            heard = virtual.told[one.seq]
            if not fits(virtual, one):
                assert (heard.tokens, heard.last.finish) == ([], "error")
                continue
            assert heard.tokens == answer(virtual.agent.models[one.model], one.prompt, one.sampling)
            assert heard.last.finish in ("stop", "length")
            scores = [score for event in heard.events for score in event.prompt_logprobs]
            if one.sampling.prompt_logprobs is not None:
                assert tuple(found.token for score in scores for found in score.chosen) == one.prompt[1:]
        check_quiet(virtual)
        looked_ahead.append(any(row.awaits for plan in virtual.plans for row in plan.rows))

    play()
    assert any(looked_ahead), "or nothing of this was about looking ahead"


@pytest.mark.parametrize("made", [FakeEngine, Late])
def test_aborts_and_faults_cost_nobody_else_a_token(made: type[FakeEngine]) -> None:
    @settings(max_examples=50, deadline=None)
    @given(loads())
    def play(load: Load) -> None:
        virtual = load.play(made, ahead=True)
        aborted = {seq for _, seq in load.aborts}
        for _, one in load.arrivals:
            heard = virtual.told[one.seq]
            expected = answer(virtual.agent.models[one.model], one.prompt, one.sampling)
            if heard.last.finish in ("stop", "length"):
                assert heard.tokens == expected
            else:
                assert heard.tokens == expected[: len(heard.tokens)]
                assert (heard.last.finish == "abort" and one.seq in aborted) or heard.last.finish == "error"
        check_quiet(virtual)

    play()


@settings(max_examples=25, deadline=None)
@given(loads(disturbed=False))
def test_nobody_hears_other_tokens_than_without(load: Load) -> None:
    one, other = load.play(ahead=False), load.play(ahead=True)
    assert {seq: heard.tokens for seq, heard in one.told.items()} == {
        seq: heard.tokens for seq, heard in other.told.items()
    }
    assert {seq: heard.last.finish for seq, heard in one.told.items()} == {
        seq: heard.last.finish for seq, heard in other.told.items()
    }


def test_a_crowd_on_a_tiny_device_is_preempted_again_and_again_and_still_right() -> None:
    virtual = Virtual(Late([M], 30, ahead=True), BatchingConfig(max_num_batched_tokens=16, watermark=0))
    crowd = [request(f"s{index}", range(1, 3 + index % 5), max_tokens=18) for index in range(30)]
    for index, one in enumerate(crowd):
        virtual.arrive(one, index * 1000)
    virtual.run()
    for one in crowd:
        assert virtual.told[one.seq].tokens == answer(M, one.prompt, one.sampling)
    assert virtual.agent.state().counters.preemptions > 10
    check_quiet(virtual)


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_a_row_awaits_the_token_that_the_step_under_way_samples() -> None:
    agent = ahead_agent(request("a", (5, 6, 7), max_tokens=9))
    assert planned(agent) == (Row("a", "m", (5, 6, 7), 0, ((0, 1),), True, 0, False),)
    assert planned(agent) == (Row("a", "m", (0,), 3, (), True, 1, True),)
    with pytest.raises(RuntimeError, match="step 1 is still under way"):
        agent.next_step(0)
    assert told(agent, 1, a=42) == [("a", 42, None)]
    assert planned(agent) == (Row("a", "m", (0,), 4, ((2, 3),), True, 2, True),)
    assert told(agent, 2, a=43) == [("a", 43, None)]
    assert told(agent, 3, a=44) == [("a", 44, None)]
    assert planned(agent) == (Row("a", "m", (44,), 5, (), True, 3, False),), "nothing was under way: the token is known"


def test_who_ends_by_number_gets_no_row_too_many() -> None:
    agent = ahead_agent(request("a", max_tokens=2), request("b", max_tokens=1))
    assert [row.seq for row in planned(agent)] == ["a", "b"]
    assert [row.seq for row in planned(agent)] == ["a"], "b ends with the first token"
    assert told(agent, 1, a=1, b=1) == [("a", 1, None), ("b", 1, "length")]
    assert agent.next_step(0) is None, "a ends with what is under way"
    assert agent.busy
    assert told(agent, 2, a=2) == [("a", 2, "length")]
    assert not agent.busy
    assert agent.state().pages.free == 200


def test_a_full_context_and_a_prompt_that_is_only_scored_are_known_in_time_too() -> None:
    agent = ahead_agent(
        request("a", (1, 2, 3), max_tokens=9), request("b", (1, 2), max_tokens=0), models=(spec(max_model_len=4),)
    )
    assert [row.seq for row in planned(agent)] == ["a", "b"]
    assert agent.next_step(0) is None
    assert told(agent, 1, a=1) == [("a", 1, "length"), ("b", None, "length")]


def test_who_ends_by_a_token_is_heard_of_at_once_and_its_last_row_is_dropped() -> None:
    agent = ahead_agent(request("a", (1, 2, 3, 4), max_tokens=9, stop_token_ids=(7,)), request("b", max_tokens=9))
    planned(agent)
    planned(agent)
    free = agent.state().pages.free
    assert told(agent, 1, a=7, b=1) == [("a", 7, "stop"), ("b", 1, None)]
    assert agent.state().pages.free == free, "its row under way still writes"
    with pytest.raises(ValueError, match="exists already"):
        agent.add(request("a"), 0)
    assert [row.seq for row in planned(agent)] == ["b"]
    free = agent.state().pages.free
    assert told(agent, 2, a=99, b=2) == [("b", 2, None)], "the token behind the end is nobody's"
    assert agent.state().pages.free == free + 4
    told(agent, 3, b=3)
    plan = agent.next_step(0)
    assert plan is not None and plan.released == ("a",)


def test_an_abort_waits_for_both_of_its_rows() -> None:
    agent = ahead_agent(request("a", max_tokens=9), request("b", max_tokens=9))
    planned(agent)
    planned(agent)
    (event,) = agent.abort("a", 0)
    assert event.finish == "abort"
    free = agent.state().pages.free
    assert told(agent, 1, a=1, b=1) == [("b", 1, None)]
    assert agent.state().pages.free == free and agent.in_use("m")
    assert told(agent, 2, a=2, b=2) == [("b", 2, None)]
    assert agent.state().pages.free == free + 2


def test_a_newcomer_joins_while_a_step_is_under_way() -> None:
    agent = ahead_agent(request("a", max_tokens=9))
    planned(agent)
    agent.add(request("b", (9, 9), max_tokens=9), 0)
    assert [(row.seq, row.awaits) for row in planned(agent)] == [("a", True), ("b", False)]
    told(agent, 1, a=1)
    assert [(row.seq, row.awaits) for row in planned(agent)] == [("a", True), ("b", True)]


def test_chunks_of_a_prompt_follow_each_other_without_waiting() -> None:
    agent = ahead_agent(request("a", range(10), max_tokens=2), max_num_batched_tokens=4)
    assert [planned(agent)[0].tokens for _ in range(2)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert told(agent, 1) == []
    (last,) = planned(agent)
    assert (last.tokens, last.start, last.sample, last.awaits) == ((8, 9), 8, True, False)
    told(agent, 2)
    (decode,) = planned(agent)
    assert (decode.start, decode.generated, decode.awaits) == (10, 1, True)


def test_whoever_is_to_be_preempted_must_be_at_rest() -> None:
    agent = ahead_agent(
        request("a", (1, 2, 3), max_tokens=9), request("b", (1, 2, 3), max_tokens=9), pages=6, watermark=0
    )
    planned(agent)
    assert len(planned(agent)) == 2
    told(agent, 1, a=1, b=1)
    assert agent.next_step(0) is None, "one page group is left for two"
    assert agent.state().counters.preemptions == 0
    told(agent, 2, a=2, b=2)
    assert [(row.seq, row.awaits) for row in planned(agent)] == [("a", False)]
    assert agent.state().counters.preemptions == 1
    agent.check()


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_skipped_step_is_run_again_for_who_was_not_in_the_failed_one() -> None:
    agent = ahead_agent(request("a", max_tokens=9))
    planned(agent)
    agent.add(request("new", (4, 5), max_tokens=9), 0)
    assert [row.seq for row in planned(agent)] == ["a", "new"]
    assert [(event.seq, event.finish) for event in agent.fail_step("broken", 0)] == [("a", "error")]
    agent.check()
    agent.skip_step(0)
    agent.check()
    plan = agent.next_step(0)
    assert plan is not None
    assert sorted(plan.released) == ["a", "new"]
    assert [(one.request.seq, one.output) for one in plan.opened] == [("new", ())]
    assert [(row.seq, row.tokens, row.start) for row in plan.rows] == [("new", (4, 5), 0)]
    assert agent.state().counters.preemptions == 0


def test_nothing_is_planned_behind_a_failed_step_until_what_was_under_way_is_back() -> None:
    agent = ahead_agent(request("a", max_tokens=9))
    planned(agent)
    agent.add(request("new", (4, 5), max_tokens=9), 0)
    assert [row.seq for row in planned(agent)] == ["a", "new"]
    agent.fail_step("broken", 0)
    assert agent.next_step(0) is None, (
        "the step under way may not run: the engine would not know whom the next row is of"
    )
    agent.skip_step(0)
    plan = agent.next_step(0)
    assert plan is not None and [one.request.seq for one in plan.opened] == ["new"]
    assert [(row.seq, row.start, row.awaits) for row in plan.rows] == [("new", 0, False)]
    assert [row.seq for row in planned(agent)] == ["new"], "it looks ahead again"
    agent.check()


def test_a_failed_step_with_nothing_behind_it_holds_nobody_up() -> None:
    agent = ahead_agent(request("a", max_tokens=9))
    planned(agent)
    agent.fail_step("broken", 0)
    agent.add(request("b", (4, 5), max_tokens=9), 0)
    assert [row.seq for row in planned(agent)] == ["b"]
    assert [row.seq for row in planned(agent)] == ["b"]


def test_who_joined_behind_a_step_that_fails_has_all_its_tokens() -> None:
    """The third step, which it joins, is launched before it is known that the second one fails, and is skipped."""
    engine = Late([M], 200, alpha=100, beta=10, fail_at=(2,), ahead=True)
    virtual, new = Virtual(engine), request("new", (4, 5), max_tokens=6)
    virtual.arrive(request("a", max_tokens=6))
    virtual.arrive(new, 1)
    virtual.run()
    assert [[row.seq for row in plan.rows] for plan in virtual.plans[:3]] == [["a"], ["a"], ["a", "new"]]
    assert virtual.told["a"].last.finish == "error"
    assert (virtual.told["new"].tokens, virtual.told["new"].last.finish) == (
        answer(M, new.prompt, new.sampling),
        "length",
    )
    check_quiet(virtual)


def test_what_a_failed_step_released_is_released_again_unless_somebody_has_the_name_by_now() -> None:
    agent = ahead_agent(request("a", max_tokens=1), request("b", max_tokens=1), request("c", max_tokens=9))
    planned(agent)
    told(agent, 1, a=1, b=1, c=1)
    first = agent.next_step(0)
    assert first is not None and set(first.released) == {"a", "b"}
    agent.add(request("a", (8, 8), max_tokens=9), 0)
    second = agent.next_step(0)
    assert second is not None and [one.request.seq for one in second.opened] == ["a"]
    agent.fail_step("broken", 0)
    assert told(agent, 3, a=5, c=5) == [("a", 5, None)], "the engine ran it all the same"
    third = agent.next_step(0)
    assert third is not None and set(third.released) == {"b", "c"}
    assert [(row.seq, row.tokens) for row in third.rows] == [("a", (5,))]


def test_the_end_of_the_engine_ends_everything() -> None:
    agent = ahead_agent(*(request(seq, max_tokens=9) for seq in "abc"))
    planned(agent)
    planned(agent)
    agent.abort("a", 0)
    assert [(event.seq, event.error) for event in agent.end_all("gone", 0)] == [("b", "gone"), ("c", "gone")]
    assert not agent.busy
    assert agent.state().pages.free == 200
    agent.check()


def test_a_result_of_the_wrong_step_changes_nothing() -> None:
    agent = ahead_agent(request("a", max_tokens=9))
    planned(agent)
    planned(agent)
    with pytest.raises(ValueError, match="step 2 instead of 1"):
        agent.finish_step(StepResult(2, (Sampled("a", 1),)), 0)
    assert told(agent, 1, a=1) == [("a", 1, None)]
    assert told(agent, 2, a=2) == [("a", 2, None)]


def test_the_fake_engine_refuses_what_cannot_be_awaited() -> None:
    for change, ahead in ((dict(tokens=(3,)), True), (dict(), False)):
        engine, agent = FakeEngine([M], 200, ahead=ahead), ahead_agent(request("a", max_tokens=9))
        first, second = agent.next_step(0), agent.next_step(0)
        assert first is not None and second is not None
        assert isinstance(engine.launch(first), Finished)
        row = Row(**({name: getattr(second.rows[0], name) for name in second.rows[0].__struct_fields__} | change))
        with pytest.raises(Exception, match="cannot be awaited"):
            engine.launch(StepPlan(second.step, (row,)))
