"""Times of moves: examples, comparison with brute force, and the two-ended move in virtual time (BL-16)."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from runtime.policy.migration.cost import Costs, MigrationStage, finish_time, next_stage
from runtime.policy.migration.two_ended import TwoEnded
from tests.runtime.recomputing import recompute_time

B = 4


def linear(per_token: float, per_context: float = 0.0) -> Costs:
    """Return costs of a constant time per token, plus a time per token of context before its chunk."""
    return Costs(B, B, lambda context, tokens: tokens * (per_token + per_context * context))


def moves(costs: Costs, copy: float) -> Costs:
    return replace(costs, copy_group=copy)


# -- examples ----------------------------------------------------------------------------------------------------------


def test_equal_rates_meet_in_the_middle() -> None:
    # A group takes 4 s to recompute and 4 s to copy; six groups: three each, 12 s.
    meeting = finish_time(6 * B, moves(linear(1.0), 4.0))
    assert (meeting.seconds, meeting.groups, meeting.tokens) == (12.0, 3, 12)


def test_the_formula_for_constant_rates() -> None:
    # r = 1/2 and c = 1/3 groups a second, 30 groups: P / (r + c) = 36 s, 18 of them recomputed.
    meeting = finish_time(30 * B, moves(linear(0.5), 3.0))
    assert (meeting.seconds, meeting.groups) == (36.0, 18)


def test_chunks_get_slower_with_their_context() -> None:
    # Groups cost 4, 4 + 16, 4 + 32, … s to recompute (a second per token and one per token of context for each of
    # four); 20 s to copy.
    meeting = finish_time(4 * B, moves(linear(1.0, 1.0), 20.0))
    assert (meeting.seconds, meeting.groups) == (40.0, 2)  # 4 + 20 = 24 beside 2 * 20 = 40; three would be 60, one 60


def test_a_large_chunk_is_cut_where_both_meet() -> None:
    # 0.1 s a chunk and 1 s a token: 16 groups, of which the back copies at 2 s each.
    costs = Costs(B, 16 * B, lambda context, tokens: 0.1 + tokens, 2.0)
    meeting = finish_time(16 * B, costs)
    assert (meeting.seconds, meeting.groups) == (pytest.approx(22.0), 5)  # 0.1 + 20 beside 11 * 2; six: 24.1


def test_a_partial_page_is_copied_whole_and_recomputed_in_part() -> None:
    assert finish_time(1, moves(linear(1.0), 4.0)).seconds == 1.0
    assert finish_time(1, moves(linear(9.0), 4.0)) == finish_time(B, moves(linear(9.0), 4.0))


def test_without_a_link_or_with_a_perfect_one() -> None:
    none, perfect = finish_time(10, linear(1.0)), finish_time(10, moves(linear(1.0), 0.0))
    assert (none.seconds, none.tokens) == (10.0, 10) and (perfect.seconds, perfect.tokens) == (0.0, 0)
    assert finish_time(0, linear(1.0)).seconds == 0.0
    assert math.isinf(finish_time(1, Costs(B, B, None)).seconds)


def test_a_block_in_the_middle_of_a_chain_pays_for_what_is_upstream() -> None:
    first = moves(linear(1.0), 12.0)
    middle = replace(first, upstream=lambda context, tokens: 2.0 * tokens)  # two equally slow blocks run before it
    kept = replace(first, upstream=lambda context, tokens: 0.5 * tokens)  # their output was kept, and is sent
    times = [finish_time(12 * B, costs) for costs in (first, kept, middle)]
    assert [(each.seconds, each.groups) for each in times] == [(36.0, 9), (48.0, 8), (72.0, 6)]
    assert recompute_time(12 * B, middle) == 3 * recompute_time(12 * B, first)


# -- against brute force -----------------------------------------------------------------------------------------------


def oracle(tokens: int, costs: Costs) -> float:
    """Return the minimum over m of max(front, back), with whole chunks and a shorter last one."""
    total = -(-tokens // costs.page_tokens)
    width = costs.chunk_groups * costs.page_tokens

    def front(groups: int) -> float:
        end = min(groups * costs.page_tokens, tokens)
        return sum(costs.chunk(lo, min(width, end - lo)) for lo in range(0, end, width))

    return min(max(front(m), (total - m) * costs.copy_group if m < total else 0.0) for m in range(total + 1))


_costs = st.builds(
    lambda page, chunk, fixed, token, context, copy, upstream: Costs(
        page,
        chunk,
        lambda before, tokens: fixed + tokens * (token + context * before),
        copy,
        (lambda before, tokens: upstream * tokens) if upstream else None,
    ),
    st.integers(1, 5),
    st.integers(1, 20),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.sampled_from([0.01, 0.3, 1.0]),
    st.sampled_from([0.0, 0.01, 0.1]),
    st.sampled_from([0.0, 0.1, 1.0, 7.0, 100.0, math.inf]),
    st.sampled_from([0.0, 0.2, 2.0]),
)


@given(st.integers(0, 120), _costs)
@settings(max_examples=400, deadline=None)
def test_no_place_to_meet_is_better(tokens: int, costs: Costs) -> None:
    meeting = finish_time(tokens, costs)
    assert meeting.seconds == pytest.approx(oracle(tokens, costs))
    groups = -(-tokens // costs.page_tokens)
    assert meeting.seconds <= min(costs.back(groups), recompute_time(tokens, costs)) * (1 + 1e-9)


def simulate(tokens: int, costs: Costs) -> tuple[float, TwoEnded]:
    """Run the move in virtual time, where each side takes its next groups as soon as it has finished the last.

    Returns the seconds and the move.
    """
    move = TwoEnded(tokens, costs.page_tokens, copy=not math.isinf(costs.copy_group))
    busy: dict[str, tuple[float, range]] = {}
    now = 0.0
    while not move.is_complete:
        if "front" not in busy and (span := _next_front(move, costs)) is not None:
            busy["front"] = (now + costs.chunk(span.start, len(span)), span)
        if "back" not in busy and (span := move.next_back(1)) is not None:
            busy["back"] = (now + costs.copy_group, span)
        side = min(busy, key=lambda each: busy[each][0])
        now, span = busy.pop(side)
        assert move.recomputed(span) if side == "front" else move.copied(span)
    return now, move


def _next_front(move: TwoEnded, costs: Costs) -> range | None:
    """Return the front's next span: a chunk, or less if both ends will meet inside it.

    Destinations that have both rates claim spans in this way.
    """
    lo, hi = move.gap
    share = min(costs.chunk_groups * costs.page_tokens, finish_time(hi - lo, costs, lo).tokens)
    return move.next_front(share) if share else None


@given(st.integers(0, 160), _costs)
@example(
    100, Costs(4, 20, lambda before, tokens: 0.1 * tokens, 100.0)
)  # a copy takes longer than to recompute everything
@settings(max_examples=300, deadline=None)
def test_in_virtual_time_a_move_ends_within_a_page_of_the_formula(tokens: int, costs: Costs) -> None:
    assume(costs.copy_group > 0)
    took, move = simulate(tokens, costs)
    page = max(
        costs.chunk(max(0, tokens - 1), costs.page_tokens), 0.0 if math.isinf(costs.copy_group) else costs.copy_group
    )
    best = finish_time(tokens, costs).seconds
    assert best * (1 - 1e-9) <= took <= best + page * (1 + 1e-9)
    groups = -(-tokens // costs.page_tokens)
    assert took <= min(costs.back(groups), recompute_time(tokens, costs)) + page * (1 + 1e-9)
    spans = sorted((*move.copied_spans, *move.recomputed_spans))
    assert all(a[1] == b[0] for a, b in pairwise(spans)) and (not tokens or (spans[0][0], spans[-1][1]) == (0, tokens))


def test_costs_that_make_no_sense_are_refused() -> None:
    for changed in ({"page_tokens": 0}, {"chunk_tokens": 0}, {"copy_group": -1.0}, {"copy_group": math.nan}):
        with pytest.raises(ValueError):
            replace(linear(1.0), **changed)


# -- stages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remaining", "stages", "then"),
    [
        (0, 1, MigrationStage.FINAL),
        (2, 1, MigrationStage.FINAL),
        (3, 1, MigrationStage.CONTINUE),
        (3, 3, MigrationStage.CONTINUE),
        (3, 4, MigrationStage.GIVE_UP),
        (2, 4, MigrationStage.FINAL),
    ],
)
def test_a_sequence_stops_only_for_little_and_not_after_too_many_stages(
    remaining: int, stages: int, then: MigrationStage
) -> None:
    assert next_stage(remaining, stages, limit_groups=2, max_stages=4) == then


@given(st.integers(0, 500), st.floats(0.0, 3.0), st.integers(0, 5), st.integers(1, 6))
def test_stages_come_to_an_end(groups: int, growth: float, limit: int, most: int) -> None:
    """A stage takes time in proportion to what it sends; meanwhile the sequence grows by `growth` times that."""
    remaining, stages = groups, 0
    while (then := next_stage(remaining, stages, limit, most)) is MigrationStage.CONTINUE:
        remaining, stages = int(remaining * growth), stages + 1
    assert stages <= most and (then is MigrationStage.FINAL) == (remaining <= limit)
