"""`AgentLifecycles`: when agents are restarted and when not any more, with a clock that the test sets."""

from __future__ import annotations

import pytest

from runtime.cluster.agents.lifecycle import AgentLifecycles, LateAgent, LifeConfig
from runtime.cluster.driver.unavailable_models import UnavailableModels, stranded
from runtime.engine.fakes.integer_model import counting_model

SECOND = 1_000_000_000
CONFIG = LifeConfig(
    starts=4,
    steady_seconds=10,
    backoff_seconds=1,
    backoff_most=3,
    silent_seconds=5,
    stalled_seconds=60,
    ready_seconds=20,
)


def started() -> AgentLifecycles:
    lifecycles = AgentLifecycles(["a", "b"], CONFIG)
    assert lifecycles.due(0) == [("a", 1), ("b", 1)] and lifecycles.due(0) == []
    assert lifecycles.ready("a", 1, 0) and lifecycles.ready("b", 1, 0) and lifecycles.all_up()
    return lifecycles


def test_the_first_death_is_answered_at_once_the_next_ones_later_and_the_last_one_never() -> None:
    lifecycles, now, waits = started(), SECOND, []
    for incarnation in (1, 2, 3):
        assert lifecycles.died("a", incarnation, "it fell", now)
        before = now
        while not lifecycles.due(now):
            now += SECOND // 4
        waits.append((now - before) / SECOND)
        assert lifecycles.ready("a", incarnation + 1, now)
    assert waits == [0, 1, 2]
    assert lifecycles.died("a", 4, "it fell again", now)
    assert lifecycles.failed() == ["a"] and lifecycles.due(now + 1000 * SECOND) == []
    assert lifecycles.facts()[0].reason == "it fell again" and lifecycles.facts()[0].deaths == 4


def test_a_death_after_a_steady_while_counts_from_the_beginning() -> None:
    lifecycles, now = started(), 0
    for incarnation in range(1, 9):
        now += 11 * SECOND
        assert lifecycles.died("a", incarnation, "it fell", now)
        assert lifecycles.due(now) == [("a", incarnation + 1)]
        assert lifecycles.ready("a", incarnation + 1, now)
    assert lifecycles.failed() == []


def test_one_that_dies_every_few_seconds_is_not_started_for_ever() -> None:
    """An agent whose incarnations last half of `steady_seconds` is restarted later and later, then not any more.

    `/health` reports its strikes.
    """
    lifecycles, now, waits, strikes = started(), 0, [], []
    for incarnation in range(1, 100):
        now += 5 * SECOND
        assert lifecycles.died("a", incarnation, "it fell", now)
        facts = lifecycles.facts()[0]
        strikes.append(facts.strikes)
        if facts.phase == "failed":
            break
        before = now
        while not lifecycles.due(now):
            now += SECOND // 4
        waits.append((now - before) / SECOND)
        assert waits[-1] == facts.backoff and facts.most == 4
        assert lifecycles.ready("a", incarnation + 1, now)
    assert strikes == [1, 1.5, 2, 2.5, 3, 3.5, 4]
    assert waits == [0, 0, 1, 1, 2, 2] and lifecycles.failed() == ["a"]


def test_what_earlier_lives_do_is_not_listened_to() -> None:
    lifecycles = started()
    assert lifecycles.died("a", 1, "gone", 0) and not lifecycles.died("a", 1, "gone", 0)
    assert not lifecycles.ready("a", 1, 0) and not lifecycles.up("a", 1)
    lifecycles.due(0)
    assert not lifecycles.ready("a", 1, 0) and not lifecycles.died("a", 1, "late", 0)
    assert lifecycles.ready("a", 2, 0) and lifecycles.up("a", 2) and not lifecycles.up("a", 1)
    assert not lifecycles.died("nobody", 1, "gone", 0) and not lifecycles.ready("nobody", 1, 0)


def test_a_refused_agent_is_not_tried_again_and_a_planned_end_is_no_death() -> None:
    lifecycles = started()
    assert lifecycles.died("a", 1, "another version", 0, final=True)
    assert lifecycles.failed() == ["a"]
    assert lifecycles.died("b", 1, "it was told to", 0, planned=True)
    assert lifecycles.due(0) == [("b", 2)] and lifecycles.facts()[1].deaths == 0


def test_silence_stalls_and_slow_starts_are_noticed() -> None:
    lifecycles = started()
    assert lifecycles.overdue(5 * SECOND) == []
    lifecycles.beat("a", 1, 0, 4 * SECOND)
    assert lifecycles.overdue(6 * SECOND) == [LateAgent("b", 1, "it has not been heard of for 5 s")]
    lifecycles.beat("b", 1, 61_000, 6 * SECOND)
    assert lifecycles.overdue(7 * SECOND) == [LateAgent("b", 1, "it has been at one step for 60 s")]
    lifecycles.died("b", 1, "hung", 7 * SECOND)
    lifecycles.due(7 * SECOND)
    lifecycles.beat("a", 1, 0, 28 * SECOND)
    assert lifecycles.overdue(28 * SECOND) == [LateAgent("b", 2, "it was not ready within 20 s")]


@pytest.mark.parametrize("wrong", [{"starts": 0}, {"backoff_seconds": 0}, {"silent_seconds": -1}])
def test_times_must_be_times(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        LifeConfig(**wrong)  # type: ignore[arg-type]


def test_a_model_is_stranded_when_the_last_instance_of_one_of_its_blocks_is() -> None:
    one, other = counting_model("m", "1 2* 3 4"), counting_model("n", "1 2* 3 5")
    chains = [one.chain(2), other.chain(2)]
    where = {chains[0].uses[0].block: ["a", "b"], chains[0].uses[1].block: ["b"], chains[1].uses[1].block: ["c"]}
    assert stranded(chains, where, []) == {} and stranded(chains, where, ["a"]) == {}
    assert stranded(chains, where, ["b"]) == {"m": "b"}
    assert set(stranded(chains, where, ["a", "b"])) == {"m", "n"}
    assert stranded(chains, {}, ["a"]) == {}


def test_a_model_is_stranded_no_more_when_its_next_version_is_elsewhere() -> None:
    first, second = counting_model("m", "1 2* 3 4"), counting_model("m", "1 2* 3 5")
    unavailable_models, where = (
        UnavailableModels(),
        {first.chain(2).uses[0].block: ["a"], first.chain(2).uses[1].block: ["b"]},
    )
    unavailable_models.look([first.chain(2)], where, ["b"], {"b": "it fell"})
    assert unavailable_models.reason("m") == "m cannot run any more: the agent of b does not come back (it fell)"
    unavailable_models.look([second.chain(2)], where | {second.chain(2).uses[1].block: ["a"]}, ["b"], {"b": "it fell"})
    assert unavailable_models.reason("m") is None and unavailable_models.reasons() == {}
