"""The choice of a decode cell by interference (TI-14)."""

from __future__ import annotations

import random
from collections import Counter
from itertools import permutations

import pytest

from runtime.policy.roles.decode_choice import DecodeCell, choose_cell, two_of

#: 99.9 % of the values of a chi-square variable with so many degrees of freedom are below this.
CHI_SQUARE = {19: 43.8, 55: 93.2}


def cells(*loads: tuple[int, int], free: float = 0.5) -> list[DecodeCell]:
    return [DecodeCell(heavy, light, free, True) for heavy, light in loads]


@pytest.mark.parametrize(("count", "degrees"), [(5, 19), (8, 55)])
def test_all_pairs_are_drawn_equally_often(count: int, degrees: int) -> None:
    draw, draws = random.Random(4), 20_000
    seen = Counter(two_of(count, draw.getrandbits(64)) for _ in range(draws))
    pairs = list(permutations(range(count), 2))
    assert set(seen) == set(pairs) and len(pairs) == degrees + 1
    expected = draws / len(pairs)
    assert sum((seen[pair] - expected) ** 2 / expected for pair in pairs) < CHI_SQUARE[degrees]


def test_the_better_of_two_is_taken() -> None:
    loads = cells((5, 1), (1, 5), (3, 3), (0, 6))
    draw = random.Random(5)
    for _ in range(200):
        found = choose_cell(loads, True, "po2", draw.getrandbits(64))
        assert len(set(found.drawn)) == 2 and found.chosen in found.drawn
        assert found.ratios[found.chosen] == min(found.ratios[at] for at in found.drawn)


def test_each_rule_takes_its_cell() -> None:
    loads = cells((5, 1), (1, 5), (3, 3))
    assert choose_cell(loads, True, "least", 0).chosen == 1
    assert choose_cell(loads, True, "worst", 0).chosen == 0
    taken = {choose_cell(loads, True, "random", number).chosen for number in range(9)}
    assert taken == {0, 1, 2}


def test_the_ratio_counts_the_sequence_itself_and_no_light_ones_are_no_trouble() -> None:
    assert cells((1, 2))[0].ratio(True) == 2 / 4 and cells((1, 2))[0].ratio(False) == 1 / 4
    assert choose_cell(cells((0, 0), (2, 0)), True, "least", 0).chosen == 0  # both would be all heavy but for one
    assert cells((2, 0))[0].ratio(True) == 1.0


def test_of_equal_ratios_the_freer_cell_is_taken() -> None:
    one, two = DecodeCell(0, 3, 0.2, True), DecodeCell(0, 3, 0.7, True)
    assert choose_cell([one, two], False, "po2", 0).chosen == 1


def test_cells_without_room_are_left_out_and_none_is_chosen_without_any() -> None:
    loads = [DecodeCell(0, 0, 0.9, False), DecodeCell(9, 0, 0.1, True), DecodeCell(0, 1, 0.5, False)]
    found = choose_cell(loads, True, "po2", 7)
    assert (found.chosen, found.alpha, found.beta, found.drawn) == (1, (1,), (0, 2), (1,))
    empty = choose_cell([cell._replace(lasts=False) for cell in loads], True, "least", 7)
    assert empty.chosen is None and empty.beta == (0, 1, 2)
