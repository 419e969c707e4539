"""Table 1 and Figure 5 from the simulated family."""

from __future__ import annotations

from benchmarks.simulated.redundancy import _loaded, figure5, redundant, shared_weights, switched


def test_table_1_has_the_papers_shares():
    assert ["lora", "99.94 %"] in shared_weights()


def test_models_without_a_common_foundation_have_nothing_in_common():
    assert redundant(3) == 0.0 and switched(3, 0) == 1.0


def test_more_models_of_a_foundation_are_more_redundant_and_switch_with_less():
    assert 0.9 < redundant(12) < 1.0 and switched(12, 0) < 0.05
    assert redundant(15) < redundant(12), "two of 15 are full fine-tunes"
    assert len(figure5(1)) == 8


def test_pieces_that_stay_are_not_loaded_again():
    models = [{"base": 30 * 10**9, "a": 5}, {"base": 30 * 10**9, "b": 7}, {"other": 60 * 10**9}]
    assert _loaded(models, [0, 1, 0]) == 30 * 10**9 + 12
    assert _loaded(models, [0, 2, 0]) == 120 * 10**9 + 5, "the base has left, its adapter has not"
