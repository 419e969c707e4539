"""How often the back of a move waits for an answer, beside the pace that the destination keeps (BL-16)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.policy.migration.pace import MigrationPace, copy_turns


@pytest.mark.parametrize(
    ("groups", "most", "turns"), [(0, 8, 0), (1, 8, 1), (2, 8, 2), (16, 8, 5), (16, 1, 16), (40, 8, 8), (40, 1000, 7)]
)
def test_examples(groups: int, most: int, turns: int) -> None:
    assert copy_turns(groups, most) == turns


@given(st.integers(1, 400), st.integers(1, 64))
def test_more_page_sets_never_take_fewer_turns(groups: int, most: int) -> None:
    assert copy_turns(groups, most) <= copy_turns(groups + 1, most) <= copy_turns(groups, most) + 1


@given(st.integers(1, 200), st.integers(1, 16), st.floats(0.5, 20.0))
def test_the_destination_takes_about_as_many_turns(total: int, most: int, front: float) -> None:
    """The front takes its share meanwhile; both paces are known."""
    pace, left, copied, turns = MigrationPace(front, 1.0), float(total), 0, 0
    while left > 0:
        some = min(pace.ahead(max(int(left), 1), most), max(int(left), 1))
        copied, turns, left = copied + some, turns + 1, left - some - some / front
    assert abs(copy_turns(copied, most) - turns) <= 3
