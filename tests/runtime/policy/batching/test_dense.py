"""Decisions of a dense batch: which rows run or wait, within slots and pages, in each of Baton's modes."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config import DenseConfig, DenseMode
from runtime.policy.batching.dense import LaneView, RowView, decide_lane

MODES = get_args(DenseMode)
PAGE, LAYERS = 4, 2


def view(
    *rows: RowView, finished: tuple[int, ...] = (), others: int = 0, capacity: int = 10_000, must: bool = True
) -> LaneView:
    return LaneView(rows, finished, LAYERS, PAGE, others, capacity, must)


def decode(seq: str, kept: int, *, seated: bool = False, priority: int = 0) -> RowView:
    return RowView(seq, kept, 1, kept if seated else 0, priority)


def prompt(seq: str, tokens: int, kept: int = 0) -> RowView:
    return RowView(seq, kept, tokens, prompt=True)


@st.composite
def lanes(draw: st.DrawFn) -> LaneView:
    rows = []
    for number in range(draw(st.integers(1, 8))):
        kept = draw(st.integers(0, 20))
        tokens = draw(st.sampled_from([0, 1, 1, 1, 7])) if kept else draw(st.integers(1, 12))
        holes = draw(st.integers(0, 6))
        span = kept + holes if kept and draw(st.booleans()) else 0
        prompt = tokens > 1 or (not kept and tokens > 0) or (tokens > 0 and draw(st.booleans()))
        rows.append(RowView(f"s{number}", kept, tokens, span, draw(st.integers(0, 2)), prompt))
    return view(
        *rows,
        finished=tuple(draw(st.lists(st.integers(1, 20), max_size=3))),
        others=draw(st.integers(0, 40)),
        capacity=draw(st.integers(10, 400)),
        must=draw(st.booleans()),
    )


@settings(max_examples=300, deadline=None)
@given(lanes(), st.sampled_from(MODES), st.integers(1, 6))
def test_whatever_comes_the_decision_holds_together(lane: LaneView, mode: DenseMode, slots: int) -> None:
    decision = decide_lane(lane, DenseConfig(mode, slots))
    rows = {row.seq: row for row in lane.rows}
    apart = [seq for batch in decision.apart for seq in batch]
    ran = [*decision.window, *apart]
    assert len(set(ran)) == len(ran) and set(ran) == decision.runs
    assert all(rows[seq].tokens for seq in ran), "nobody runs without a turn"
    assert all(rows[seq].span for seq in decision.leaving), "nobody leaves who is not there"
    seated = [row for row in lane.rows if row.span and row.seq not in decision.leaving]
    coming = [seq for seq in decision.window if not rows[seq].span or seq in decision.leaving]
    taken = len(seated) + len(coming) + (0 if decision.clear else len(lane.finished))
    here = sum(1 for row in lane.rows if row.span) + len(lane.finished)
    assert taken <= max(slots, here)
    if mode in ("baton", "run-to-completion"):
        assert not apart
    else:
        assert not any(rows[seq].prompt and not rows[seq].span for seq in decision.window)
        for batch in decision.apart:
            assert len({(rows[seq].tokens - 1).bit_length() for seq in batch}) == 1
    if lane.must and any(row.tokens for row in lane.rows):
        assert decision.runs, "somebody runs if anybody has a turn"
    newcomers = [seq for seq in coming if not rows[seq].span]
    if newcomers and len(decision.window) > 1:
        assert decision.pages <= lane.capacity


@pytest.mark.parametrize("mode", MODES)
def test_free_slots_are_filled_at_once_or_only_once_the_batch_is_done(mode: DenseMode) -> None:
    running, waiting = decode("old", 9, seated=True), decode("new", 5)
    decision = decide_lane(view(running, waiting, finished=(7,)), DenseConfig(mode, 4))
    assert decision.window == (("old", "new") if mode in ("baton", "baton-pd") else ("old",)) and not decision.clear
    over = decide_lane(view(waiting, finished=(7, 9)), DenseConfig(mode, 2))
    assert over.window == ("new",) and over.clear, "with its last sequence a batch is over"


@pytest.mark.parametrize(
    ("mode", "window"), [("baton", ("a", "p")), ("baton-pd", ("a",)), ("run-to-completion", ("a",)), ("pd", ("a",))]
)
def test_prompts_run_in_the_window_or_apart(mode: DenseMode, window: tuple[str, ...]) -> None:
    decision = decide_lane(view(decode("a", 5, seated=True), prompt("p", 9)), DenseConfig(mode, 4))
    assert decision.window == window and decision.apart == ((("p",),) if mode in ("pd", "baton-pd") else ())


def test_prompts_of_similar_length_share_a_batch() -> None:
    rows = [prompt(f"{n}", n) for n in (9, 100, 16, 2, 70, 15)]
    apart = decide_lane(view(*rows), DenseConfig("baton-pd", 2)).apart
    assert apart == (("9", "16", "15"), ("100", "70"), ("2",))
    tight = decide_lane(view(*rows[:3:2], rows[5], capacity=14 * LAYERS), DenseConfig("baton-pd", 2)).apart
    assert tight == (("9", "16"),), "two rows of sixteen columns are eight pages a layer of the ten up to low"


def test_a_better_priority_takes_the_worst_seat_and_gives_it_back() -> None:
    urgent = decode("urgent", 3, priority=-1)
    low, high = decode("low", 8, seated=True, priority=5), decode("high", 9, seated=True)
    decision = decide_lane(view(low, high, urgent), DenseConfig("baton-pd", 2))
    assert decision.window == ("urgent", "high") and decision.leaving == ("low",)
    back = decide_lane(view(decode("low", 8, priority=5), high), DenseConfig("baton-pd", 2))
    assert back.window == ("high", "low") and not back.leaving
    equal = decide_lane(view(high, decode("other", 9, seated=True), decode("late", 3)), DenseConfig("baton-pd", 2))
    assert "late" not in equal.window, "equals do not push each other out"


def test_memory_moves_rows_out_above_high_and_takes_them_in_below_low() -> None:
    """Ten rows of 40 tokens in pages of 4 take 11 groups of 2 pages each in the lane, and 10 groups outside it."""
    config = DenseConfig("baton-pd", 16, high=0.9, low=0.5)
    seated = [decode(f"{n}", 40, seated=True) for n in range(10)]
    full = 10 * 11 * LAYERS
    roomy = decide_lane(view(*seated, capacity=int(full / 0.9) + 1), config)
    assert not roomy.leaving and roomy.pages == full
    tight = decide_lane(view(*seated, others=12, capacity=int(full / 0.9) + 1), config)
    assert tight.leaving and tight.leaving == tuple(f"{n}" for n in range(10 - len(tight.leaving), 10)), (
        "the last in rank go first"
    )
    assert tight.pages <= 0.9 * (int(full / 0.9) + 1)
    waiting = [decode("w", 40)]
    between = decide_lane(view(*seated[:5], *waiting, capacity=full), config)
    assert "w" not in between.window, "between low and high nobody comes and nobody goes"
    assert not between.leaving
    assert "w" in decide_lane(view(*seated[:3], *waiting, capacity=full), config).window


def test_a_large_one_is_not_overtaken_by_small_ones() -> None:
    config = DenseConfig("baton-pd", 8, high=0.9, low=0.75)
    seated = decode("a", 30, seated=True)
    assert decide_lane(view(seated, decode("small", 2), others=30, capacity=84), config).window == ("a", "small")
    lane = view(seated, decode("large", 60), decode("small", 2), capacity=84)
    assert decide_lane(lane, config).window == ("a",)
    prompts = decide_lane(view(seated, prompt("large", 200), prompt("small", 2), capacity=70), config)
    assert prompts.window == ("a",) and not prompts.apart
    assert decide_lane(view(prompt("large", 200), prompt("small", 2), capacity=100), config).apart == (("large",),)


def test_finished_slots_go_before_anybody_who_lives() -> None:
    decision = decide_lane(view(decode("a", 20, seated=True), finished=(20, 20), capacity=30), DenseConfig("pd", 4))
    assert decision.clear and decision.window == ("a",) and not decision.leaving


def test_a_row_alone_sheds_its_holes_when_memory_is_short() -> None:
    holed = RowView("a", 8, 1, 30)
    decision = decide_lane(view(holed, capacity=8), DenseConfig("baton", 4))
    assert decision.window == ("a",) == decision.leaving and decision.pages == 3 * LAYERS


def test_rows_without_a_turn_give_way_when_nobody_there_has_one() -> None:
    for mode in MODES:
        decision = decide_lane(view(RowView("idle", 5, 0, 5), decode("a", 5)), DenseConfig(mode, 1))
        assert decision.window == ("a",) and decision.leaving == ("idle",)


def test_settings_that_mean_nothing_are_refused() -> None:
    for wrong in (
        {"slots": 0},
        {"low": 0.9, "high": 0.8},
        {"low": 0.0},
        {"high": 1.1},
        {"mode": "relay"},
        {"padding": "half"},
    ):
        with pytest.raises(ValueError, match=r"slots|mode|padding"):
            DenseConfig(**wrong)
