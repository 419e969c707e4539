"""Masks that were prepared are used for the output that they are of, and for no other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest

from runtime.engine.sampling.constraints import Constraint, prepare_masks


class Counting:
    """A state of which the mask allows the tokens of the output."""

    def __init__(self) -> None:
        self.computed: list[tuple[int, ...]] = []

    def allowed(self, output):
        self.computed.append(tuple(output))
        if 7 in output:
            raise ValueError("seven")
        return np.array([sum(1 << token for token in output)], np.uint32)


def tokens(words) -> list[int]:
    return [token for token in range(32) if int(words[0]) >> token & 1]


def test_a_prepared_mask_is_computed_once_and_used_for_its_output_only():
    state = Counting()
    with ThreadPoolExecutor(1) as thread:
        one = Constraint(lambda: state, thread)
        prepare_masks([(one, [3])])
        assert tokens(one.allowed([3])) == [3] and tokens(one.allowed([3])) == [3]
        assert state.computed == [(3,)]
        prepare_masks([(one, [3, 4])])
        assert tokens(one.allowed([3, 5])) == [3, 5]
        assert tokens(one.allowed([])) == []
    assert state.computed == [(3,), (3, 4), (3, 5), ()]


def test_an_output_that_grows_behind_the_thread_does_not_change_its_mask():
    state, output = Counting(), [1]
    with ThreadPoolExecutor(1) as thread:
        held = Event()
        thread.submit(held.wait)
        one = Constraint(lambda: state, thread)
        prepare_masks([(one, output)])
        output.append(2)
        held.set()
        assert tokens(one.allowed([1])) == [1] and tokens(one.allowed(output)) == [1, 2]
    assert state.computed == [(1,), (1, 2)]


def test_masks_of_a_step_are_one_piece_of_work_and_an_error_is_that_of_its_sequence():
    class Counted(ThreadPoolExecutor):
        pieces = 0

        def submit(self, *args, **kwargs):
            self.pieces += 1
            return super().submit(*args, **kwargs)

    states = [Counting() for _ in range(4)]
    with Counted(1) as thread:
        made = [Constraint(lambda state=state: state, thread) for state in states]
        prepare_masks([(one, [at + 5]) for at, one in enumerate(made)])
        assert [tokens(made[at].allowed([at + 5])) for at in (0, 1, 3)] == [[5], [6], [8]]
        with pytest.raises(ValueError, match="seven"):
            made[2].allowed([7])
        assert thread.pieces == 1 and tokens(made[2].allowed([1])) == [1]
