"""The choice for a hop: examples for each rule, and properties (BL-13, BL-19 to BL-21, BL-28, BL-29)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.policy.profiles import BlockProfile, Grid, Line
from runtime.policy.routing.latency import Candidate, RowWork, latency_of
from runtime.policy.routing.variants import Dispatch, DispatchLimits, Nowhere, Option, dispatch

ONE = RowWork(1, 50)


def option(name: str, seconds: float, **fields: object) -> Option:
    """Return an instance that takes so many seconds a row."""
    profile = BlockProfile("b", 100, Grid((1,), (1,), ((seconds,),)), Line((1,), (1.0,)), 7.0)
    return Option(Candidate(name, profile), **fields)  # type: ignore[arg-type]


def choose(options: list[Option], adaptive: bool = False, **limits: object) -> tuple[str, str]:
    made = dispatch(options, ONE, adaptive, DispatchLimits(**limits))  # type: ignore[arg-type]
    assert isinstance(made, Dispatch)
    return made.chosen.candidate.name, made.rule


OWNER = option("owner", 1.2, owner=True)
FAST = option("fast", 1.0)
NEAR = option("near", 0.5, kind="equivalent", score=0.99)
SEWN = option("sewn", 0.2, kind="stitched", score=0.96)


def test_the_owner_goes_first_while_it_is_not_much_slower() -> None:
    assert choose([OWNER, FAST]) == ("fast", "latency")
    assert choose([OWNER, FAST], margin=0.1) == ("fast", "latency")
    assert choose([FAST, OWNER], margin=0.2) == ("owner", "owner")
    assert choose([FAST, option("owner", 1.0, owner=True)]) == ("owner", "owner")  # of equal status
    assert choose([FAST, option("owner", 99.0, owner=True)], strict=True) == ("owner", "owner")


def test_an_owner_without_room_is_passed_by_even_by_the_strict_rule() -> None:
    full = replace(OWNER, room=False)
    made = dispatch([full, FAST], ONE, False, DispatchLimits(strict=True))
    assert isinstance(made, Dispatch) and made.chosen is FAST and [each.out for each in made.rated] == ["no room", ""]


def test_all_terms_are_shown_and_are_those_of_the_profile() -> None:
    there = replace(FAST, candidate=replace(FAST.candidate, queue=(ONE, ONE), transfer=0.25))
    made = dispatch([there, NEAR], ONE, True, DispatchLimits())
    assert [each.latency for each in made.rated] == [latency_of(each.candidate, ONE) for each in (there, NEAR)]
    assert made.rated[0].latency.total == 3.25


def test_equivalents_are_for_adaptive_requests_only_and_only_good_ones() -> None:
    assert choose([FAST, NEAR, SEWN]) == ("fast", "latency")
    assert choose([FAST, NEAR, SEWN], adaptive=True) == ("sewn", "latency")
    assert choose([FAST, NEAR, SEWN], adaptive=True, stitched=0.97) == ("near", "latency")
    assert choose([FAST, NEAR, SEWN], adaptive=True, stitched=0.97, equivalent=0.995) == ("fast", "latency")
    made = dispatch([NEAR, SEWN], ONE, False, DispatchLimits())
    assert isinstance(made, Nowhere) and {each.out for each in made.rated} == {"the request is exact"}
    assert isinstance(dispatch([replace(NEAR, score=float("nan"))], ONE, True, DispatchLimits()), Nowhere)


@pytest.mark.parametrize(
    ("limit", "chosen"), [(None, "fast"), (1.0, "fast"), (0.9, "near"), (0.4, "sewn"), (0.1, "sewn")]
)
def test_accuracy_is_given_up_only_as_far_as_the_limit_asks(limit: float | None, chosen: str) -> None:
    assert choose([SEWN, NEAR, FAST], adaptive=True, prefer="accuracy", limit=limit) == (chosen, "accuracy")


def _behind(each: Option, queued: int) -> Option:
    return replace(each, candidate=replace(each.candidate, queue=(ONE,) * queued))


def test_accuracy_falls_as_the_rate_rises() -> None:
    """Each request of a burst queues where earlier ones made the queue longer: a small model of Figure 16."""
    means = []
    for burst in (1, 2, 4, 8, 16):
        queues = dict.fromkeys(("fast", "near", "sewn"), 0)
        scores = []
        for _ in range(burst):
            options = [_behind(each, queues[each.candidate.name]) for each in (FAST, NEAR, SEWN)]
            made = dispatch(options, ONE, True, DispatchLimits(prefer="accuracy", limit=2.0))
            assert isinstance(made, Dispatch)
            queues[made.chosen.candidate.name] += 1
            scores.append(made.chosen.score)
        means.append(sum(scores) / burst)
    assert means == sorted(means, reverse=True) and means[0] == 1.0 > means[-1]


def test_an_owner_of_lower_accuracy_does_not_go_before_a_better_one() -> None:
    owner = replace(NEAR, owner=True)
    assert choose([FAST, owner], adaptive=True, prefer="accuracy") == ("fast", "accuracy")
    assert choose([FAST, owner], adaptive=True, prefer="accuracy", limit=0.9) == ("near", "owner")
    assert choose([FAST, owner], adaptive=True, prefer="accuracy", strict=True) == ("near", "owner")


def test_a_block_is_deployed_where_loading_it_is_less_than_waiting_for_it() -> None:
    waiting = replace(FAST, candidate=replace(FAST.candidate, queue=(ONE,) * 8))
    new = replace(FAST, candidate=replace(FAST.candidate, name="new", swap=7.0))
    assert choose([FAST, new]) == ("fast", "latency") and choose([waiting, new]) == ("new", "latency")  # 7 s to load


def test_of_none_there_is_none_to_choose() -> None:
    assert dispatch([], ONE, True, DispatchLimits()) == Nowhere(())


_options = st.lists(
    st.builds(
        lambda name, seconds, kind, score, owner, room: option(
            name, seconds, kind=kind, score=1.0 if kind == "own" else score, owner=owner, room=room
        ),
        st.sampled_from("abcdef"),
        st.sampled_from([0.1, 0.5, 1.0, 2.0]),
        st.sampled_from(["own", "equivalent", "stitched"]),
        st.sampled_from([0.9, 0.96, 0.99]),
        st.booleans(),
        st.booleans(),
    ),
    max_size=6,
)
_limits = st.builds(
    DispatchLimits,
    prefer=st.sampled_from(["latency", "accuracy"]),
    strict=st.booleans(),
    margin=st.sampled_from([0.0, 0.5]),
    limit=st.sampled_from([None, 0.2, 1.0]),
)


@given(_options, st.booleans(), _limits)
def test_what_holds_for_any_choice(options: list[Option], adaptive: bool, limits: DispatchLimits) -> None:
    made = dispatch(options, ONE, adaptive, limits)
    able = [each for each in made.rated if not each.out]
    assert [each.option for each in made.rated] == options and isinstance(made, Nowhere) == (not able)
    if isinstance(made, Nowhere):
        return
    assert made.chosen.room and (adaptive or made.exact)
    seconds = next(each.latency.total for each in able if each.option is made.chosen)
    least = min(each.latency.total for each in able)
    if made.rule == "latency":
        assert seconds == least
    if made.rule == "owner":
        assert made.chosen.owner and (limits.strict or limits.prefer == "accuracy" or seconds <= least + limits.margin)
    if limits.strict and any(each.option.owner for each in able):
        assert made.chosen.owner
    if made.rule == "accuracy":
        better = [each for each in able if each.option.score > made.chosen.score]
        assert not better or (limits.limit is not None and all(each.latency.total > limits.limit for each in better))
