"""The two-ended move: corner cases of BL-16, and any order of answers, failures and ends by a state machine."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.policy.migration.two_ended import Spans, TwoEnded, met_at

B = 4


def drain(move: TwoEnded, chunk: int = B, window: int = 1) -> list[tuple[str, range]]:
    """Claim and complete spans for both sides in turn until neither gets one; return them in order."""
    given: list[tuple[str, range]] = []
    while True:
        front = move.next_front(chunk)
        back = move.next_back(window)
        if front is not None:
            assert move.recomputed(front)
            given.append(("front", front))
        if back is not None:
            assert move.copied(back)
            given.append(("back", back))
        if front is None and back is None:
            return given


def tokens_in(spans: Spans) -> list[int]:
    return [token for lo, hi in spans for token in range(lo, hi)]


def covered(move: TwoEnded) -> bool:
    """Return whether copied and recomputed spans are disjoint and cover the move."""
    return sorted(tokens_in(move.copied_spans) + tokens_in(move.recomputed_spans)) == list(range(move.tokens))


@pytest.mark.parametrize(
    ("tokens", "recomputed", "copied", "met"),
    [
        (0, (), (), 0),
        (1, ((0, 1),), (), 1),
        (B - 1, ((0, 3),), (), 3),
        (B, ((0, 4),), (), 4),
        (B + 1, ((0, 4),), ((4, 5),), 4),
        (3 * B, ((0, 8),), ((8, 12),), 8),
        (5 * B + 2, ((0, 12),), ((12, 22),), 12),
    ],
)
def test_both_ends_meet(tokens: int, recomputed: Spans, copied: Spans, met: int) -> None:
    move = TwoEnded(tokens, B)
    drain(move)
    assert move.is_complete and (move.recomputed_spans, move.copied_spans, met_at(move.recomputed_spans)) == (
        recomputed,
        copied,
        met,
    )


def test_nothing_to_move_is_done_at_once() -> None:
    move = TwoEnded(0, B)
    assert (
        move.is_complete
        and met_at(move.recomputed_spans) == 0
        and move.next_front(9) is None
        and move.next_back(9) is None
    )


def test_the_front_takes_whole_groups_and_at_least_one() -> None:
    move = TwoEnded(22, B)
    assert move.next_front(10) == range(8)
    assert move.next_front(10) is None  # the next chunk reads what this one writes
    assert move.recomputed(range(8))
    assert move.next_front(1) == range(8, 12)
    assert move.recomputed(range(8, 12)) and move.next_front(99) == range(12, 22)


def test_the_back_may_ask_for_more_before_it_has_what_it_asked_for() -> None:
    move = TwoEnded(22, B)
    assert (move.next_back(2), move.next_back(1), move.next_back(9), move.next_back(1)) == (
        range(16, 22),
        range(12, 16),
        range(12),
        None,
    )
    assert move.copying == 6 and not move.is_complete and not move.stuck


def test_the_last_group_has_one_winner() -> None:
    front_first, back_first = TwoEnded(B, B), TwoEnded(B, B)
    assert front_first.next_front(B) == range(B) and front_first.next_back(1) is None
    assert back_first.next_back(1) == range(B) and back_first.next_front(B) is None
    assert (
        not front_first.copied(range(B))
        and front_first.recomputed(range(B))
        and front_first.recomputed_spans == ((0, B),)
    )
    assert not back_first.recomputed(range(B)) and back_first.copied(range(B)) and back_first.copied_spans == ((0, B),)


def test_one_side_alone_does_all_of_it() -> None:
    copied, recomputed = TwoEnded(10, B, recompute=False), TwoEnded(10, B, copy=False)
    assert [side for side, _ in drain(copied)] == ["back"] * 3 and met_at(copied.recomputed_spans) == 0
    assert [side for side, _ in drain(recomputed)] == ["front"] * 3 and met_at(recomputed.recomputed_spans) == 10
    assert TwoEnded(10, B, recompute=False, copy=False).stuck


def test_when_the_source_dies_the_front_goes_on_to_the_end() -> None:
    move = TwoEnded(22, B)
    assert move.next_back(2) == range(16, 22) and move.copied(range(16, 22))
    assert move.next_back(2) == range(8, 16) and move.next_front(2 * B) == range(8)
    move.stop_copy()
    assert not move.awaits(range(8, 16)) and not move.copied(range(8, 16))  # a late answer changes nothing
    assert move.recomputed(range(8)) and not move.stuck
    drain(move)
    assert move.is_complete and move.recomputed_spans == ((0, 16),) and move.copied_spans == ((16, 22),)


def test_a_hole_behind_copied_groups_is_recomputed_once_all_before_it_is_here() -> None:
    move = TwoEnded(16, B)
    assert move.next_back(1) == range(12, 16) and move.next_back(1) == range(8, 12)
    assert move.next_front(8) == range(8)
    move.copy_failed(range(12, 16))
    move.stop_copy()
    assert move.next_front(B) is None and move.recomputed(range(8))
    assert move.next_front(99) == range(8, 16)
    assert move.recomputed(range(8, 16)) and move.is_complete


def test_a_copy_that_fails_may_be_asked_for_again_but_not_forever() -> None:
    move = TwoEnded(8, B, recompute=False, failures=2)
    for _ in range(2):
        assert not move.stuck
        span = move.next_back(1)
        assert span == range(4, 8) and move.copy_failed(span)
    assert move.stuck and move.next_back(1) is None and not move.copy_failed(range(4, 8))


def test_of_several_copies_under_way_the_first_may_fail() -> None:
    move = TwoEnded(12, B, recompute=False)
    assert move.next_back(1) == range(8, 12) and move.next_back(1) == range(4, 8)
    assert move.copy_failed(range(8, 12)) and move.copied(range(4, 8))
    assert move.next_back(1) == range(8, 12) and move.copied(range(8, 12))
    assert drain(move) == [("back", range(4))] and move.is_complete


def test_a_front_that_can_do_no_more_leaves_the_rest_to_the_back() -> None:
    move = TwoEnded(8, B)
    assert move.next_front(B) == range(B)
    move.stop_recompute()
    assert not move.recomputed(range(B))
    drain(move)
    assert move.is_complete and move.copied_spans == ((0, 8),) and met_at(move.recomputed_spans) == 0


def test_what_has_grown_is_copied_with_all_of_a_partial_group() -> None:
    move = TwoEnded(10, B)
    assert move.next_front(99) == range(10) and move.recomputed(range(10)) and met_at(move.recomputed_spans) == 10
    move.extend(13)
    assert not move.is_complete and move.next_front(99) is None
    assert move.next_back(9) == range(8, 13) and move.copied(range(8, 13))
    assert move.is_complete and move.recomputed_spans == ((0, 8),) and move.copied_spans == ((8, 13),)
    move.extend(13)
    assert move.is_complete
    move.extend(16)
    assert drain(move) == [("back", range(12, 16))] and covered(move)


def test_what_has_grown_behind_a_full_group_is_all_there_is_to_copy() -> None:
    move = TwoEnded(8, B)
    drain(move)
    move.extend(9)
    assert drain(move) == [("back", range(8, 9))] and covered(move)


def test_what_has_grown_is_recomputed_when_nothing_can_be_copied() -> None:
    alone, bereft = TwoEnded(6, B, copy=False), TwoEnded(6, B)
    drain(alone)
    alone.extend(9)
    assert drain(alone) == [("front", range(4, 8)), ("front", range(8, 9))] and met_at(alone.recomputed_spans) == 9
    drain(bereft)
    bereft.extend(9)
    assert bereft.next_back(1) == range(8, 9)
    bereft.stop_copy()
    drain(bereft)
    assert bereft.is_complete and covered(bereft)


def test_a_move_goes_on_only_from_where_it_is_done() -> None:
    move = TwoEnded(6, B)
    for tokens in (5, 9):
        with pytest.raises(ValueError, match="cannot go on"):
            move.extend(tokens)
    drain(move)
    with pytest.raises(ValueError, match="cannot go on"):
        move.extend(5)


@pytest.mark.parametrize(
    "span", [range(0), range(3), range(1, 4), range(4, 9), range(8, 12), range(-4, 4), range(8), range(0, 4, 2)]
)
def test_ranges_that_nobody_was_given_are_refused(span: range) -> None:
    move = TwoEnded(10, B)
    move.next_front(B)
    assert not move.copied(span) and not move.copy_failed(span) and not move.awaits(span) and not move.recomputed(span)
    assert move.recomputing == 1


def test_what_cannot_be_moved() -> None:
    for tokens, width in ((-1, 4), (4, 0)):
        with pytest.raises(ValueError):
            TwoEnded(tokens, width)


@pytest.mark.parametrize("present", [0, 1, 3, 5])
def test_what_is_present_is_brought_by_neither_end(present: int) -> None:
    move = TwoEnded(5 * B, B, present=present)
    front = move.next_front(B)
    assert move.is_complete == (present == 5) and (front or range(0)).start == (0 if present == 5 else present * B)
    assert not move.awaits(range(B)) and not move.copied(range(B)) and move.copied_spans == ()
    while (span := move.next_back(2)) is not None:
        assert span.start >= present * B and move.copied(span)
    if front is not None:
        assert move.recomputed(front)
    assert move.is_complete
    move.extend(6 * B)
    assert move.next_back(9) == range(5 * B, 6 * B)
    with pytest.raises(ValueError, match="cannot be there"):
        TwoEnded(B - 1, B, present=1)


class Moves(RuleBasedStateMachine):
    """Any order of claims, answers, failures, growth and ends.

    The model has the side that brought each token, and the spans claimed by each side.
    """

    @initialize(tokens=st.integers(0, 40), recompute=st.booleans(), copy=st.booleans(), failures=st.integers(1, 5),
                present=st.integers(0, 3))  # fmt: skip
    def begin(self, tokens: int, recompute: bool, copy: bool, failures: int, present: int) -> None:
        present = min(present, tokens // B)
        self.move = TwoEnded(tokens, B, recompute, copy, failures, present)
        self.here: dict[int, str] = dict.fromkeys(range(present * B), "present")
        self.front: list[range] = []
        self.back: list[range] = []
        self.late: list[range] = []
        self.sighted: Spans | None = None

    @rule(chunk=st.integers(1, 20))
    def claim_front(self, chunk: int) -> None:
        span = self.move.next_front(chunk)
        if span is not None:
            assert len(span) <= max(chunk, B) and self._is_new(span) and not any(self.blind(token) for token in span)
            assert set(range(span.start)) <= set(self.here), "it would read what is not here"
            self.front.append(span)

    @rule(window=st.integers(1, 3))
    def claim_back(self, window: int) -> None:
        span = self.move.next_back(window)
        if span is not None:
            assert -(-len(span) // B) <= window and self._is_new(span)
            self.back.append(span)

    def _is_new(self, span: range) -> bool:
        taken = set(self.here) | {token for each in (*self.front, *self.back) for token in each}
        return not taken & set(span)

    @rule(chunk=st.integers(1, 20))
    def claim_ahead(self, chunk: int) -> None:
        """A claim ahead of inputs: all missing tokens before the span are claimed by the front already."""
        span = self.move.next_front(chunk, ahead=True)
        if span is not None:
            assert self._is_new(span) and not any(self.blind(token) for token in span)
            assert set(range(span.start)) <= set(self.here) | {token for each in self.front for token in each}
            self.front.append(span)

    @rule(data=st.data())
    def inputs_are_known(self, data: st.DataObject) -> None:
        ends = sorted(data.draw(st.lists(st.integers(0, self.move.tokens), min_size=0, max_size=4, unique=True)))
        self.sighted = tuple(zip(ends[::2], ends[1::2], strict=False))
        self.move.inputs(self.sighted)

    def blind(self, token: int) -> bool:
        return self.sighted is not None and not any(lo <= token < hi for lo, hi in self.sighted)

    @precondition(lambda self: self.front)
    @rule(data=st.data())
    def front_fails(self, data: st.DataObject) -> None:
        span = self.front.pop(data.draw(st.integers(0, len(self.front) - 1)))
        assert self.move.recompute_failed(span)

    @precondition(lambda self: self.front)
    @rule()
    def front_is_through(self) -> None:
        span = min(self.front, key=lambda each: each.start)
        if not set(range(span.start)) <= set(self.here):
            return  # it waits for the failed span before it
        self.front.remove(span)
        assert self.move.recomputed(span)
        self.here.update(dict.fromkeys(span, "front"))

    @precondition(lambda self: self.back)
    @rule(data=st.data(), well=st.booleans())
    def back_answers(self, data: st.DataObject, well: bool) -> None:
        span = self.back.pop(data.draw(st.integers(0, len(self.back) - 1)))
        assert self.move.awaits(span)
        if well:
            assert self.move.copied(span)
            self.here.update(dict.fromkeys(span, "back"))
        else:
            assert self.move.copy_failed(span)
            self.back = [each for each in self.back if self.move.awaits(each)]

    @rule()
    def source_dies(self) -> None:
        self.late.extend(self.back)
        self.move.stop_copy()
        self.back = []

    @rule()
    def front_ends(self) -> None:
        late, self.front = self.front, []
        self.move.stop_recompute()
        assert not any(self.move.recomputed(span) for span in late) and self.move.front_rests

    @precondition(lambda self: self.late)
    @rule()
    def too_late(self) -> None:
        assert not self.move.copied(self.late.pop())

    @precondition(lambda self: self.move.is_complete)
    @rule(more=st.integers(0, 9))
    def grow(self, more: int) -> None:
        before = self.move.tokens
        self.move.extend(before + more)
        if more and self.sighted is not None:  # inputs of the new tokens are not limited yet
            self.sighted = (*self.sighted, (before // B * B, before + more))
        if more:
            self.here = {token: side for token, side in self.here.items() if token < before // B * B}

    @precondition(lambda self: not (self.front or self.back))
    @rule()
    def finish(self) -> None:
        """In the end the move is complete, or stuck with a reason."""
        drain(self.move)
        assert self.move.is_complete or self.move.stuck
        present = {token: side for token, side in self.here.items() if side == "present"}
        if self.move.is_complete:
            brought = {*tokens_in(self.move.recomputed_spans), *tokens_in(self.move.copied_spans)}
            assert brought == set(range(self.move.tokens)) - set(present)
        self.here = present | dict.fromkeys(tokens_in(self.move.recomputed_spans), "front")
        self.here.update(dict.fromkeys(tokens_in(self.move.copied_spans), "back"))

    @invariant()
    def each_token_has_the_winner_that_brought_it(self) -> None:
        if not hasattr(self, "move"):
            return
        assert tokens_in(self.move.recomputed_spans) == sorted(
            token for token, side in self.here.items() if side == "front"
        )
        assert tokens_in(self.move.copied_spans) == sorted(token for token, side in self.here.items() if side == "back")
        assert self.move.recomputing == sum(-(-len(span) // B) for span in self.front)
        assert self.move.copying == sum(-(-len(span) // B) for span in self.back)
        assert self.move.is_complete == (len(self.here) == self.move.tokens)


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


# -- a front that has inputs for some tokens only ----------------------------------------------------------------------


def test_groups_without_inputs_that_the_front_stands_before_are_copied_first() -> None:
    move = TwoEnded(24, B)
    move.inputs(((8, 24),))
    assert move.next_front(99) is None and move.front_rests
    assert move.next_back(1) == range(4) and move.next_back(9) == range(4, 8)
    assert move.next_back(1) == range(20, 24)  # no span before the front is left to copy
    assert (
        move.next_front(B) is None and move.copied(range(4)) and move.next_front(B) is None and move.copied(range(4, 8))
    )
    assert move.next_front(2 * B) == range(8, 16) and not move.front_rests
    assert move.recomputed(range(8, 16)) and move.copied(range(20, 24))
    drain(move)
    assert move.is_complete and covered(move) and move.recomputed_spans == ((8, 20),)


def test_spans_beyond_the_move_are_taken_for_what_of_them_is_in_it() -> None:
    move = TwoEnded(10, B, copy=False)
    move.inputs(((-9, 4), (8, 99)))
    assert drain(move) == [("front", range(4))] and move.stuck


def test_a_group_is_recomputed_only_if_all_of_it_has_inputs() -> None:
    move = TwoEnded(18, B)
    move.inputs(((0, 6), (9, 18)))
    assert move.next_front(99) == range(4) and move.recomputed(range(4))
    drain(move, window=9)
    assert covered(move) and all(not (lo < 12 and hi > 4) for lo, hi in move.recomputed_spans)


def test_the_next_span_may_be_given_while_one_is_at_work() -> None:
    move = TwoEnded(24, B)
    assert move.next_front(B) == range(4) and move.next_front(B) is None
    assert move.next_front(2 * B, ahead=True) == range(4, 12) and move.recomputing == 3
    assert move.recompute_failed(range(4, 12)) and not move.recompute_failed(range(4, 12))
    assert move.next_back(9) == range(4, 24) and move.next_front(B, ahead=True) is None


def test_without_inputs_and_without_copies_it_is_stuck() -> None:
    move = TwoEnded(12, B, copy=False)
    move.inputs(((0, 4),))
    assert not move.stuck and move.next_front(99) == range(4) and not move.stuck
    assert move.recomputed(range(4)) and move.stuck


def test_what_has_grown_may_have_inputs() -> None:
    move = TwoEnded(8, B, copy=False)
    move.inputs(((0, 8),))
    drain(move)
    move.extend(13)
    assert not move.stuck and drain(move) and move.is_complete
    move.extend(14)
    move.inputs(())
    assert move.stuck
