"""The share of predictions that must be right, by examples and for any times, and when speculation ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.policy.speculation.payoff import Times, judge


@pytest.mark.parametrize(
    ("times", "needed"),
    [
        (Times(1.0, 0.1, 0.0, 2.0), 0.5),  # a right one gains 0.9, a wrong one loses as much
        (Times(1.0, 0.1, 0.1, 1.0), 1.0 / 1.9),  # a check costs time where the prediction is wrong
        (Times(1.0, 0.0, 0.1, 0.25), 0.35 / 0.5),  # at most the time of the later hops can be gained
        (Times(1.0, 0.1, 0.0, 1.0, shared=True), 1.0 / 1.8),  # on the hop's own stream it costs time always
        (Times(1.0, 1.0, 0.0, 1.0), 2.0),  # not cheaper, so it cannot gain
        (Times(1.0, 0.6, 0.0, 1.0, shared=True), 2.0),
    ],
)
def test_by_hand(times: Times, needed: float) -> None:
    assert times.needed == pytest.approx(needed)


seconds = st.floats(1e-4, 10.0)


@given(seconds, st.floats(0.0, 1.0), seconds, st.floats(0.0, 1.0), st.booleans())
def test_at_the_share_that_is_needed_gains_are_costs(
    hop: float, cheap: float, behind: float, rate: float, shared: bool
) -> None:
    times = Times(hop, cheap * hop, 0.0, behind, shared)
    own = Times(hop, cheap * hop, 0.0, behind)
    assert times.needed > 0 and times.needed >= own.needed - 1e-9, "a lane of its own never makes it harder"
    always = cheap * hop if shared else 0.0
    saved = hop + behind - max(cheap * hop + behind, hop) - always
    if times.needed <= 1.0:
        balance = rate * saved - (1 - rate) * (min(behind, hop - cheap * hop) + always)
        assert (balance > 1e-9) <= (rate >= times.needed - 1e-9) and (balance < -1e-9) <= (rate <= times.needed + 1e-9)


def test_a_window_that_is_not_full_ends_nothing_and_old_outcomes_do_not_count() -> None:
    assert not judge([False] * 3, 0.5, 4).ends
    assert judge([False] * 4, 0.5, 4).ends
    assert judge([False] * 9 + [True, True, False, True], 0.5, 4) == judge([True, True, False, True], 0.5, 4)
    assert not judge([False] * 9 + [True, True, False, True], 0.5, 4).ends
    assert not judge([True, False], 0.5, 2).ends, "what is needed is enough"
    assert not judge([False] * 99, 2.0, 0).ends and judge([True] * 4, 2.0, 4).ends
