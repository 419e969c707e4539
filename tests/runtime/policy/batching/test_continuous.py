"""The batching policy: hand-made cases, and properties over random devices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config import BatchingConfig
from runtime.kv.pages import groups_for, pages_for
from runtime.policy.batching.continuous import BatchDecision, DeviceSnapshot, Phase, SequenceView, decide
from runtime.types import ModelSpec
from tests.runtime.virtual import spec

M = spec("m", kv_layers=2, page_tokens=4)
N = spec("n", kv_layers=3, page_tokens=2)
CAPACITY = 40
CONFIG = BatchingConfig(max_num_batched_tokens=8, max_num_seqs=4, watermark=0.0)


def view(seq: str, tokens: int, computed: int = 0, phase: Phase = "prefill", model: ModelSpec = M) -> SequenceView:
    return SequenceView(seq, model, tokens, computed, groups_for(model, computed), phase)


def decoding(seq: str, tokens: int, model: ModelSpec = M) -> SequenceView:
    return view(seq, tokens, tokens - 1, "decode", model)


def device(
    running: Sequence[SequenceView] = (),
    waiting: Sequence[SequenceView] = (),
    capacity: int = CAPACITY,
) -> DeviceSnapshot:
    held = sum(one.groups * one.spec.kv_layers for one in running)
    return DeviceSnapshot(capacity, capacity - held, tuple(running), tuple(waiting))


def tokens_of(decision: BatchDecision) -> dict[str, int]:
    return {share.seq: share.tokens for share in decision.shares}


def test_an_idle_device_has_nothing_to_do() -> None:
    assert decide(device(), CONFIG) == BatchDecision(())


def test_an_idle_device_takes_what_comes_at_once() -> None:
    decision = decide(device(waiting=[view("a", 3)]), CONFIG)
    assert tokens_of(decision) == {"a": 3}
    assert decision.admitted == ("a",)


def test_decodes_come_before_prompts_and_a_long_prompt_comes_in_chunks() -> None:
    decision = decide(device([decoding("a", 5), view("b", 30, 4)], [view("c", 3)]), CONFIG)
    assert tokens_of(decision) == {"a": 1, "b": 7}
    assert decision.admitted == ()


def test_what_a_prompt_leaves_of_the_budget_goes_to_the_next() -> None:
    decision = decide(device([view("a", 6, 2)], [view("b", 3), view("c", 9)]), CONFIG)
    assert tokens_of(decision) == {"a": 4, "b": 3, "c": 1}


def test_the_first_in_rank_advances_even_when_decodes_fill_the_budget() -> None:
    running = [view("old", 20, 4), *(decoding(f"d{i}", 3) for i in range(8))]
    shares = tokens_of(decide(device(running), BatchingConfig(max_num_batched_tokens=3, max_num_seqs=9)))
    assert shares == {"old": 1, "d0": 1, "d1": 1}


def test_models_with_different_pages_share_a_step() -> None:
    decision = decide(device(waiting=[view("m", 4), view("n", 4, model=N)]), CONFIG)
    assert {share.seq: share.groups for share in decision.shares} == {"m": 1, "n": 2}


def test_no_more_sequences_than_allowed() -> None:
    decision = decide(device([decoding(f"d{i}", 2) for i in range(3)], [view("a", 1), view("b", 1)]), CONFIG)
    assert decision.admitted == ("a",)


def test_admission_is_in_order_and_nobody_overtakes_one_that_does_not_fit() -> None:
    decision = decide(device([decoding("d", 3)], [view("large", 60), view("small", 1)], capacity=12), CONFIG)
    assert decision.admitted == ()


def test_admission_leaves_what_running_prompts_still_need() -> None:
    running = [view("a", 16, 4)]  # holds one group of 2 pages, will need three more
    assert (
        decide(
            device(running, [view("b", 4)], capacity=8), BatchingConfig(max_num_batched_tokens=13, watermark=0)
        ).admitted
        == ()
    )
    assert decide(
        device(running, [view("b", 4)], capacity=10), BatchingConfig(max_num_batched_tokens=13, watermark=0)
    ).admitted == ("b",)


def test_the_watermark_holds_back_newcomers_but_not_on_an_empty_device() -> None:
    config = BatchingConfig(max_num_batched_tokens=8, watermark=0.5)
    assert decide(device([decoding("d", 3)], [view("a", 8)], capacity=8), config).admitted == ()
    assert decide(device([], [view("a", 16)], capacity=8), config).admitted == ("a",)


def test_a_decode_without_a_page_preempts_the_last_in_rank() -> None:
    running = [decoding("a", 5), decoding("b", 3), decoding("c", 3)]  # a begins its second group; capacity is used up
    decision = decide(device(running, [view("w", 1)], capacity=6), CONFIG)
    assert decision.preempted == ("c",)
    assert tokens_of(decision) == {"a": 1, "b": 1}
    assert decision.admitted == ()


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    running = [decoding("a", 5), decoding("b", 3), decoding("c", 7)]  # c leaves two groups, a takes one of them
    decision = decide(device(running, [view("w", 1)], capacity=8), CONFIG)
    assert (decision.preempted, decision.admitted) == (("c",), ())


def test_a_prompt_short_of_pages_lets_no_later_prompt_take_them() -> None:
    running = [
        decoding("a", 3),
        view("b", 20, 2, model=N),
        view("c", 20, 3),
    ]  # two pages are free: b needs three, c two
    shares = tokens_of(decide(device(running, capacity=9), CONFIG))
    assert shares == {"a": 1, "c": 1}


def test_the_last_in_rank_gives_way_itself() -> None:
    decision = decide(device([decoding("a", 3), decoding("b", 5)], capacity=4), CONFIG)
    assert decision.preempted == ("b",)
    assert tokens_of(decision) == {"a": 1}


def test_the_first_in_rank_is_never_preempted() -> None:
    decision = decide(device([decoding("a", 5)], capacity=2), CONFIG)
    assert decision.preempted == ()


def test_a_prompt_short_of_pages_takes_what_there_is_and_closes_admission() -> None:
    running = [decoding("a", 3), view("b", 20, 4)]
    decision = decide(device(running, [view("w", 1)], capacity=6), CONFIG)
    assert tokens_of(decision) == {"a": 1, "b": 4}
    assert decision.admitted == ()
    assert decision.preempted == ()


def test_one_that_resumes_is_labelled_so() -> None:
    (share,) = decide(device(waiting=[view("a", 5, phase="resume")]), CONFIG).shares
    assert share.phase == "resume"


@st.composite
def devices(draw: st.DrawFn) -> DeviceSnapshot:
    """Any device on which each sequence alone would fit."""
    capacity = draw(st.integers(6, 60))
    running: list[SequenceView] = []
    free = capacity
    for index in range(draw(st.integers(0, 8))):
        model = draw(st.sampled_from([M, N]))
        tokens = draw(st.integers(1, max(1, capacity // model.kv_layers * model.page_tokens - 1)))
        phase: Phase = draw(st.sampled_from(["prefill", "resume", "decode"]))
        computed = tokens - 1 if phase == "decode" else draw(st.integers(0, tokens - 1))
        one = view(f"r{index}", tokens, computed, phase, model)
        if one.groups * model.kv_layers <= free and (computed or phase != "decode"):
            free -= one.groups * model.kv_layers
            running.append(one)
    waiting = []
    for index in range(draw(st.integers(0, 6))):
        model = draw(st.sampled_from([M, N]))
        tokens = draw(st.integers(1, capacity // model.kv_layers * model.page_tokens))
        waiting.append(view(f"w{index}", tokens, 0, draw(st.sampled_from(["prefill", "resume"])), model))
    return DeviceSnapshot(capacity, free, tuple(running), tuple(waiting))


configs = st.builds(
    BatchingConfig,
    max_num_batched_tokens=st.integers(1, 40),
    max_num_seqs=st.integers(1, 10),
    watermark=st.sampled_from([0.0, 0.01, 0.3]),
)


@settings(max_examples=400, deadline=None)
@given(devices(), configs)
def test_no_decision_breaks_a_limit(snapshot: DeviceSnapshot, config: BatchingConfig) -> None:
    decision = decide(snapshot, config)
    views = {one.seq: one for one in (*snapshot.running, *snapshot.waiting)}
    named = [share.seq for share in decision.shares]
    assert len(set(named)) == len(named)
    assert sum(share.tokens for share in decision.shares) <= config.max_num_batched_tokens
    given_back = sum(views[seq].groups * views[seq].spec.kv_layers for seq in decision.preempted)
    assert (
        sum(share.groups * views[share.seq].spec.kv_layers for share in decision.shares) <= snapshot.free + given_back
    )
    assert not set(decision.preempted) & set(named)
    assert set(decision.admitted) <= set(named)
    if decision.admitted:
        assert len(snapshot.running) + len(decision.admitted) <= max(config.max_num_seqs, 1)
    for share in decision.shares:
        one = views[share.seq]
        assert 1 <= share.tokens <= one.tokens - one.computed
        assert one.groups + share.groups == max(one.groups, groups_for(one.spec, one.computed + share.tokens))


@settings(max_examples=400, deadline=None)
@given(devices(), configs)
def test_ranks_are_respected_and_the_first_always_advances(snapshot: DeviceSnapshot, config: BatchingConfig) -> None:
    decision = decide(snapshot, config)
    running = [one.seq for one in snapshot.running]
    waiting = [one.seq for one in snapshot.waiting]
    shares = tokens_of(decision)
    assert list(decision.preempted) == running[len(running) - len(decision.preempted) :][::-1]
    assert list(decision.admitted) == waiting[: len(decision.admitted)]
    if running:
        assert shares[running[0]] >= 1
    elif waiting:
        assert shares[waiting[0]] >= 1


@settings(max_examples=400, deadline=None)
@given(devices(), configs)
def test_whoever_is_admitted_finds_room_for_a_whole_context(snapshot: DeviceSnapshot, config: BatchingConfig) -> None:
    decision = decide(snapshot, config)
    if not decision.admitted:
        return
    assert not decision.preempted
    granted = {share.seq: share.groups for share in decision.shares}
    present = [
        one for one in (*snapshot.running, *snapshot.waiting) if one in snapshot.running or one.seq in decision.admitted
    ]
    free = snapshot.free - sum(granted.get(one.seq, 0) * one.spec.kv_layers for one in present)
    prompts = [one for one in present if one.phase != "decode"]
    owed = sum(
        pages_for(one.spec, one.tokens) - (one.groups + granted.get(one.seq, 0)) * one.spec.kv_layers for one in prompts
    )
    assert free - owed >= (0 if len(present) == 1 else math.ceil(config.watermark * snapshot.capacity))


@settings(max_examples=100, deadline=None)
@given(devices(), configs)
def test_the_same_device_gives_the_same_decision(snapshot: DeviceSnapshot, config: BatchingConfig) -> None:
    assert decide(snapshot, config) == decide(snapshot, config)


@pytest.mark.parametrize("values", [{"max_num_batched_tokens": 0}, {"max_num_seqs": 0}, {"watermark": 1.0}])
def test_limits_that_mean_nothing_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BatchingConfig(**values)  # type: ignore[arg-type]
