"""Which waiting rows run next: examples (BL-14, BL-22), and properties over random devices."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.policy.batching.step import Blocks, HopLimits, Return, WaitingRow, countdown, decide

#: Two models share block `s`; each has a block of its own after it.
BLOCKS = Blocks({"m": ("s", "m1"), "n": ("s", "n1"), "own": ("n1",)}, {"s": 4, "m1": 2, "n1": 3})
STAGES = st.sampled_from(["m", "n", "own", "twice"])
LIMITS = HopLimits(tokens=100, rows=64, patience=1000)


def row(name: str, stage: str = "m", tokens: int = 1, holds: bool = False, since: int = 0) -> WaitingRow:
    return WaitingRow(f"{name}@{stage}", stage, tokens, holds, since)


def chosen(rows: list[WaitingRow], returning: list[Return] = [], limits: HopLimits = LIMITS, now: int = 0) -> list[str]:  # noqa: B006
    return [rows[place].name.split("@")[0] for place in decide(rows, returning, BLOCKS, limits, now).rows]


def test_nothing_waits_and_one_that_waits_runs_at_once() -> None:
    assert decide([], [], BLOCKS, LIMITS, 0).rows == ()
    assert chosen([row("a")]) == ["a"]


def test_a_shared_block_takes_rows_of_all_its_models_up_to_its_own_limit() -> None:
    rows = [row(f"m{i}") for i in range(3)] + [row(f"n{i}", "n") for i in range(3)]
    decision = decide(rows, [], BLOCKS, LIMITS, 0)
    assert decision.rows == (0, 1, 3, 4)  # m1 takes two rows, s four in all: more than any model brings alone
    assert decision.full == 2


def test_a_full_block_does_not_delay_rows_of_others() -> None:
    rows = [*(row(f"m{i}") for i in range(9)), row("o", "own")]
    assert chosen(rows) == ["m0", "m1", "o"]


def test_who_has_pages_here_goes_first_and_else_first_in_first_out() -> None:
    rows = [row("new0"), row("new1"), row("back", holds=True)]
    assert chosen(rows) == ["back", "new0"]
    assert chosen([row("new0"), row("new1"), row("new2")]) == ["new0", "new1"]


def test_a_slot_is_kept_until_the_countdown_ends() -> None:
    rows = [row("here", holds=True), row("new")]
    expected = [Return("m", deadline=countdown(100, round_trip=40, slack=0.5))]
    assert expected[0].deadline == 160
    assert chosen(rows, expected, now=159) == ["here"]
    assert decide(rows, expected, BLOCKS, LIMITS, 159).kept == 1
    assert chosen(rows, expected, now=160) == ["here", "new"]


def test_a_slot_is_kept_from_prompts_that_are_divided_too_but_not_from_those_that_are_here() -> None:
    expected, divide = [Return("m", 500)], HopLimits(100, 64, 1000, divide=True)
    here, new = row("here", holds=True), WaitingRow("new@m", "m", 3, False, 0, True)
    assert chosen([here, new], expected, divide) == ["here"]
    assert decide([here, new], expected, BLOCKS, divide, 0).kept == 1
    assert chosen([here, new], expected, divide, now=500) == ["here", "new"]
    assert chosen([here, WaitingRow("back@m", "m", 3, True, 0, True)], expected, divide) == ["here", "back"]


def test_prompts_take_what_decodes_leave_and_in_their_order() -> None:
    """With a budget of 100, two decodes run, then as much of the first prompt as fits, and nothing of the second.

    Without chunked prompts, the first prompt runs alone.
    """
    rows = [
        WaitingRow("long@own", "own", 150, False, 0, True),
        WaitingRow("next@own", "own", 40, False, 0, True),
        row("a", "own"),
        row("b", "n"),
    ]
    divided = decide(rows, [], BLOCKS, HopLimits(100, 64, 1000, divide=True), 0)
    assert (divided.rows, divided.parts, divided.budget) == ((2, 3, 0), {0: 98}, 1)
    whole = decide(rows, [], BLOCKS, LIMITS, 0)
    assert whole.rows == (0,) and not whole.parts
    few = HopLimits(100, 64, 1000, divide=True)
    assert decide(rows[1:], [], BLOCKS, few, 0).parts == {}, "what fits is not divided"


def test_decodes_that_take_all_of_a_step_leave_prompts_their_turn_when_they_are_overdue() -> None:
    rows = [row("a", "own", since=5000), row("b", "n", since=5000), WaitingRow("p@own", "own", 9, False, 0, True)]
    tight = HopLimits(2, 64, 1000, divide=True)
    assert decide(rows, [], BLOCKS, tight, 500).rows == (0, 1)
    late = decide(rows, [], BLOCKS, tight, 5001)
    assert late.rows == (2,) and late.parts == {2: 2}


def test_an_idle_block_keeps_no_slots() -> None:
    expected = [Return("m", 500)] * 4
    assert chosen([row("new0"), row("new1"), row("new2")], expected) == ["new0", "new1"]
    # slots are kept on another block
    assert chosen([row("here", "own", holds=True), row("new", "own")], expected) == ["here", "new"]


def test_a_returning_row_takes_the_slot_that_was_kept() -> None:
    rows = [row("new"), row("here", holds=True), row("back", holds=True)]
    assert chosen(rows, [Return("m", 500)]) == ["here", "back"]


def test_the_budget_holds_but_one_row_always_runs() -> None:
    limits = HopLimits(tokens=8, rows=64, patience=1000)
    assert chosen([row("long", tokens=50), row("a")], limits=limits) == ["long"]
    assert chosen([row("a", tokens=3), row("long", tokens=6), row("b", "n", tokens=5)], limits=limits) == ["a", "b"]
    assert chosen([row(f"r{i}", "own") for i in range(3)], limits=HopLimits(tokens=8, rows=2)) == ["r0", "r1"]


def test_chunks_of_one_sequence_stay_in_order_and_apart() -> None:
    limits = HopLimits(tokens=8, rows=64, patience=1000)
    rows = [row("d", "own", holds=True), row("p", tokens=8), row("p", tokens=2)]
    decision = decide(rows, [], BLOCKS, limits, 0)
    assert decision.rows == (0,) and decision.behind == 1 and decision.budget == 1
    assert chosen(rows[1:], limits=limits) == ["p"]


def test_whom_the_budget_turned_away_comes_first_in_the_end() -> None:
    limits = HopLimits(tokens=8, rows=64, patience=1000)
    rows = [row("long", tokens=8, since=0), row("d", "own", holds=True, since=900)]
    assert chosen(rows, limits=limits, now=1000) == ["d"]
    assert chosen(rows, limits=limits, now=1001) == ["long"]


def test_a_stage_that_is_not_here_is_an_error() -> None:
    with pytest.raises(KeyError):
        decide([row("a", "gone")], [], BLOCKS, LIMITS, 0)


# -- properties --------------------------------------------------------------------------------------------------------

_rows = st.lists(
    st.builds(
        row,
        st.sampled_from("abcdefghij"),
        st.sampled_from(["m", "n", "own"]),
        st.integers(1, 9),
        st.booleans(),
        st.integers(0, 9),
    ),
    max_size=14,
).map(lambda rows: sorted(rows, key=lambda one: one.since))
_returns = st.lists(st.builds(Return, st.sampled_from(["m", "n", "own"]), st.integers(0, 9)), max_size=6)


@given(_rows, _returns, st.integers(1, 12), st.integers(1, 6), st.integers(0, 12), st.integers(0, 9))
@settings(max_examples=300, deadline=None)
def test_limits_hold_and_whoever_waits_has_a_reason(
    rows: list[WaitingRow], returning: list[Return], tokens: int, most: int, patience: int, now: int
) -> None:
    decision = decide(rows, returning, BLOCKS, HopLimits(tokens, most, patience), now)
    picked = [rows[place] for place in decision.rows]
    through = Counter(block for one in picked for block in BLOCKS.passes[one.stage])
    assert all(through[block] <= BLOCKS.limits[block] for block in BLOCKS.limits)
    assert len(picked) <= most and (len(picked) == 1 or sum(one.tokens for one in picked) <= tokens)
    assert bool(picked) == bool(rows)
    assert len({one.name for one in picked}) == len(picked)
    assert len(picked) + decision.behind + decision.full + decision.kept + decision.budget == len(rows)
    for place in decision.rows:  # no row runs before an earlier row of the same sequence
        assert all(one.name != rows[place].name for one in rows[:place])
    for name in {one.name for one in rows} - {one.name for one in picked}:
        assert _has_reason(next(one for one in rows if one.name == name), picked, through, tokens, most, returning, now)


def _has_reason(
    one: WaitingRow,
    picked: list[WaitingRow],
    through: Counter[str],
    tokens: int,
    most: int,
    returning: list[Return],
    now: int,
) -> bool:
    """Return whether the row does not fit beside the picked ones; a block without rows is never the reason."""
    if len(picked) == most or sum(other.tokens for other in picked) + one.tokens > tokens:
        return True
    for block in BLOCKS.passes[one.stage]:
        kept = sum(block in BLOCKS.passes[each.stage] for each in returning if each.deadline > now)
        if through[block] and through[block] + kept >= BLOCKS.limits[block]:
            return True
    return False


@given(_rows, st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_holders_are_not_turned_away_for_others(rows: list[WaitingRow], now: int) -> None:
    """The rows with pages here that run are the same as without the other rows."""
    limits = HopLimits(tokens=12, rows=6, patience=100)
    heads = {one.name: place for place, one in reversed(list(enumerate(rows)))}
    holders = [one for place, one in enumerate(rows) if one.holds and heads[one.name] == place]
    alone = [holders[place].name for place in decide(holders, [], BLOCKS, limits, now).rows]
    together = [rows[place] for place in decide(rows, [], BLOCKS, limits, now).rows]
    assert [one.name for one in together if one.holds] == alone


@given(
    st.lists(
        st.builds(row, st.sampled_from("abcdefgh"), STAGES, st.integers(1, 40), st.booleans(), st.integers(0, 9)),
        max_size=8,
    ),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(20, 300),
)
def test_where_all_fit_nothing_is_decided_otherwise(rows: list[WaitingRow], limit: int, most: int, tokens: int) -> None:
    """A countdown that is over keeps no slot, but makes the code count every block."""
    blocks = Blocks({**BLOCKS.passes, "twice": ("s", "s")}, dict.fromkeys(("s", "m1", "n1"), limit))
    limits = HopLimits(tokens, most, patience=4)
    assert decide(rows, [], blocks, limits, 9) == decide(rows, [Return("m", deadline=9)], blocks, limits, 9)
