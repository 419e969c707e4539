"""Masks that were prepared are used for the output that they are of, and for no other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest

from runtime.engine.sampling.constraints import Constraint, prepare_masks, ready_within


class Counting:
    """A state of which the mask allows the tokens of the output."""

    def __init__(self) -> None:
        self.output: list[int] = []
        self.computed: list[tuple[int, ...]] = []

    def allowed(self, kept, new, slow=False):
        self.output = [*self.output[:kept], *new]
        self.computed.append(tuple(self.output))
        if 7 in self.output:
            raise ValueError("seven")
        return np.array([sum(1 << token for token in self.output)], np.uint32)


def tokens(words) -> list[int]:
    return [token for token in range(32) if int(words[0]) >> token & 1]


def test_a_prepared_mask_is_computed_once_and_used_for_its_output_only():
    state = Counting()
    with ThreadPoolExecutor(1) as thread:
        one = Constraint(lambda: state, thread, thread)
        prepare_masks([(one, 0, [3])])
        assert tokens(one.allowed(1)) == [3] and tokens(one.allowed(1)) == [3]
        assert state.computed == [(3,)]
        prepare_masks([(one, 1, [4])])
        prepare_masks([(one, 1, [5])])
        assert tokens(one.allowed(2)) == [3, 5]
        assert tokens(one.allowed(0)) == []
    assert state.computed == [(3,), (3, 4), (3, 5), ()]


def test_new_tokens_that_grow_behind_the_thread_do_not_change_its_mask():
    state, output = Counting(), [1]
    with ThreadPoolExecutor(1) as thread:
        held = Event()
        thread.submit(held.wait)
        one = Constraint(lambda: state, thread, thread)
        prepare_masks([(one, 0, output)])
        output.append(2)
        held.set()
        assert tokens(one.allowed(1)) == [1]
    assert state.computed == [(1,)]


def test_masks_of_a_step_are_one_piece_of_work_and_an_error_is_that_of_its_sequence():
    class Counted(ThreadPoolExecutor):
        pieces = 0

        def submit(self, *args, **kwargs):
            self.pieces += 1
            return super().submit(*args, **kwargs)

    states = [Counting() for _ in range(4)]
    with Counted(1) as thread:
        made = [Constraint(lambda state=state: state, thread, thread) for state in states]
        prepare_masks([(one, 0, [at + 5]) for at, one in enumerate(made)])
        assert [tokens(made[at].allowed(1)) for at in (0, 1, 3)] == [[5], [6], [8]]
        with pytest.raises(ValueError, match="seven"):
            made[2].allowed(1)
        assert thread.pieces == 1 and tokens(made[2].allowed(0)) == []


def test_a_first_mask_has_a_thread_of_its_own_and_holds_up_no_other_sequence():
    gate = Event()

    def slow():
        gate.wait()
        return Counting()

    with ThreadPoolExecutor(1) as opening, ThreadPoolExecutor(1) as thread:
        quick, late = Constraint(Counting, opening, thread), Constraint(slow, opening, thread)
        try:
            prepare_masks([(quick, 0, [1])])
            ready_within([quick], 60)
            prepare_masks([(late, 0, [1])])
            ready_within([quick, late], 0.001)
            assert (quick.is_ready, quick.late) == (True, False) and (late.is_ready, late.late) == (False, True)
            prepare_masks([(quick, 1, [2])])
            assert tokens(quick.allowed(2)) == [1, 2]
        finally:
            gate.set()
        ready_within([late], 60)
        assert late.is_ready and not late.late and tokens(late.allowed(1)) == [1]


def test_deferred_masks_start_by_hand_or_where_they_are_read_or_followed():
    states = [Counting() for _ in range(3)]
    with ThreadPoolExecutor(1) as opening, ThreadPoolExecutor(1) as thread:
        made = [Constraint(lambda state=state: state, opening, thread) for state in states]
        first = prepare_masks([(one, 0, [at]) for at, one in enumerate(made)], deferred=True)
        assert list(first) == [], "a first mask is not deferred"
        ready_within(made, 60)
        (work,) = prepare_masks([(one, 1, [3]) for one in made], deferred=True)
        assert all(one.is_ready for one in made) and not work.is_started
        assert [state.computed for state in states] == [[(0,)], [(1,)], [(2,)]]
        assert tokens(made[1].allowed(2)) == [1, 3] and work.is_started
        (work,) = prepare_masks([(one, 2, [4]) for one in made], deferred=True)
        assert work.start() is work.start() and tokens(made[0].allowed(3)) == [0, 3, 4]
        (work,) = prepare_masks([(one, 3, [5]) for one in made], deferred=True)
        (last,) = prepare_masks([(made[2], 4, [6])], deferred=True)
        assert work.is_started and not last.is_started
        assert tokens(made[2].allowed(5)) == [2, 3, 4, 5, 6]
    assert states[2].computed == [(2,), (2, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6)]


def test_deferred_masks_of_a_sequence_that_has_become_slow_are_waited_for():
    state = Counting()
    with ThreadPoolExecutor(1) as opening, ThreadPoolExecutor(1) as thread:
        one = Constraint(lambda: state, opening, thread)
        prepare_masks([(one, 0, [1])])
        ready_within([one], 60)
        (work,) = prepare_masks([(one, 1, [2])], deferred=True)
        one.slow = True
        assert not one.is_ready
        ready_within([one], 60)
        assert work.is_done and one.is_ready and not one.late
        assert list(prepare_masks([(one, 2, [3])], deferred=True)) == [], "slow ones begin at once"
