"""Masks that were prepared are used for the output that they are of, and for no other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from runtime.engine.sampling.constraints import Constraint


class Counting:
    """A state of which the mask blocks the tokens of the output."""

    def __init__(self) -> None:
        self.computed: list[tuple[int, ...]] = []

    def blocked(self, output):
        self.computed.append(tuple(output))
        mask = np.zeros(8, np.bool_)
        mask[list(output)] = True
        return mask


def test_a_prepared_mask_is_computed_once_and_used_for_its_output_only():
    state = Counting()
    with ThreadPoolExecutor(1) as thread:
        one = Constraint(lambda: state, thread)
        one.prepare([3])
        assert one.blocked([3]).nonzero()[0].tolist() == [3] and one.blocked([3])[3]
        assert state.computed == [(3,)]
        one.prepare([3, 4])
        assert one.blocked([3, 5]).nonzero()[0].tolist() == [3, 5]
        assert one.blocked([]).sum() == 0
    assert state.computed == [(3,), (3, 4), (3, 5), ()]


def test_an_output_that_grows_behind_the_thread_does_not_change_its_mask():
    state, output = Counting(), [1]
    with ThreadPoolExecutor(1) as thread:
        one = Constraint(lambda: state, thread)
        mask = one.prepare(output)
        output.append(2)
        assert mask.result().nonzero()[0].tolist() == [1]
        assert one.blocked(output).nonzero()[0].tolist() == [1, 2]
