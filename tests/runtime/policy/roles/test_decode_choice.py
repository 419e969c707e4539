"""The choice of a decode cell by interference (TI-14)."""

from __future__ import annotations

import random
from collections import Counter
from itertools import permutations

import pytest

from runtime.decode_config import DecodeRule
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


# -- what is present ---------------------------------------------------------------------------------------------------


def test_of_equal_cells_the_one_that_has_more_is_taken_unless_it_does_not_count() -> None:
    plain = cells((1, 3), (1, 3), (1, 3))
    loads = [cell._replace(present=share) for cell, share in zip(plain, (0.0, 0.9, 0.4), strict=True)]
    for rule in ("po2", "least"):
        for number in range(9):
            assert choose_cell(loads, True, rule, number, 0.1).chosen == 1
        assert choose_cell(loads, True, rule, 0, 0.0).chosen == choose_cell(plain, True, rule, 0).chosen


def test_baselines_do_not_look_at_what_is_present() -> None:
    plain = cells((5, 1), (1, 5), (3, 3))
    loads = [cell._replace(present=share) for cell, share in zip(plain, (0.0, 1.0, 1.0), strict=True)]
    assert choose_cell(loads, True, "worst", 0, 1.0).chosen == 0
    assert {choose_cell(loads, True, "random", number, 1.0).chosen for number in range(9)} == {0, 1, 2}


@pytest.mark.parametrize("rule", ["po2", "least"])
def test_never_at_the_price_of_more_interference_than_the_margin(rule: DecodeRule) -> None:
    """Nor of fewer free pages; the margin counts in full only for all of the K and V."""
    best = DecodeCell(1, 9, 0.5, True)
    for heavy, free, present, margin, taken in (
        (2, 0.5, 1.0, 0.1, True), (3, 0.5, 1.0, 0.1, False), (3, 0.5, 1.0, 0.2, True), (2, 0.5, 0.5, 0.1, False),
        (1, 0.41, 1.0, 0.1, True), (1, 0.39, 1.0, 0.1, False), (1, 0.41, 0.5, 0.1, False),
    ):  # fmt: skip
        other = DecodeCell(heavy, 10 - heavy, free, True, present)
        assert choose_cell([best, other], False, rule, 0, margin).chosen == int(taken), (heavy, free, present, margin)
        assert choose_cell([best, other._replace(lasts=False)], False, rule, 0, margin).chosen == 0


def test_the_cell_with_the_most_is_a_candidate_beside_the_two_that_are_drawn() -> None:
    draw = random.Random(6)
    loads = cells(*[(2, 4)] * 5, (9, 1))
    near, far = [*loads], [*loads]
    near[3], far[5] = near[3]._replace(present=0.5), far[5]._replace(present=0.5)
    for _ in range(50):
        number = draw.getrandbits(64)
        assert choose_cell(near, True, "po2", number, 0.1).chosen == 3
        assert choose_cell(far, True, "po2", number, 0.1).chosen == choose_cell(loads, True, "po2", number).chosen


def test_at_random_no_worse_than_the_margin_allows_and_never_less_present() -> None:
    draw = random.Random(7)
    for _ in range(3000):
        loads = [
            DecodeCell(
                draw.randrange(6),
                draw.randrange(6),
                draw.random(),
                draw.random() < 0.8,
                draw.choice((0, draw.random())),
            )
            for _ in range(draw.randrange(1, 7))
        ]
        rule, heavy, number = draw.choice(("po2", "least")), draw.random() < 0.5, draw.getrandbits(64)
        margin = draw.random()
        plain, found = (choose_cell(loads, heavy, rule, number, each) for each in (0.0, margin))
        if plain.chosen is None or found.chosen is None:
            assert plain == found and not plain.alpha
            continue
        gain = loads[found.chosen].present - loads[plain.chosen].present
        assert found.chosen in found.alpha and gain >= 0 and found.drawn == plain.drawn
        assert found.ratios[found.chosen] <= plain.ratios[plain.chosen] + margin * gain
        assert loads[found.chosen].free >= loads[plain.chosen].free - margin * gain
