"""Each chain gets devices that hold it alone."""

from __future__ import annotations

from runtime.policy.residency.homes import homes

SIZES = {"base": 10, "other": 10, **{f"own{at}": 3 for at in range(8)}}


def test_all_models_are_at_home_on_one_device_though_together_they_do_not_fit() -> None:
    chains = [["base", f"own{at}"] for at in range(8)]
    assert homes(chains, SIZES, [0] * 8, [14]) == ((0, 0),) * 8


def test_a_chain_that_fits_nowhere_has_no_home() -> None:
    assert homes([["base", "own0"], ["base", "other"]], SIZES, [0, 0], [15]) == ((0, 0), None)
    assert homes([["base", "own0"]], SIZES, [3], [15]) == (None,), "adapters count"


def test_models_with_one_base_come_together_until_the_devices_are_evenly_full() -> None:
    chains = [["base", f"own{at}"] for at in range(8)]
    found = homes(chains, SIZES, [0] * 8, [20, 20])
    assert [each[0] for each in found if each] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert homes([["base", "own0"]], SIZES, [0], [20, 20], [set(), {"base"}]) == ((0, 0),)
    assert homes([["base", "own0"]], SIZES, [0], [20, 20], [{"other"}, {"base"}]) == ((1, 1),)


def test_a_chain_that_needs_two_devices_is_cut_over_neighbours() -> None:
    found = homes([["base", "other"], ["base", "own0"]], SIZES, [0, 0], [12, 12, 12, 12])
    assert found[0] == (0, 1) and found[1] in ((0, 1), (2, 3))


def test_a_block_that_comes_again_in_a_chain_costs_nothing() -> None:
    assert homes([["base", "own0", "base"]], SIZES, [0], [13]) == ((0, 0, 0),)


def test_a_single_device_holds_the_table_of_a_tied_head_once() -> None:
    assert homes([["base", "own0"]], SIZES, [0], [12], tied=[1]) == ((0, 0),)
    assert homes([["base", "own0"]], SIZES, [0], [11], tied=[1]) == (None,)
    assert homes([["base", "own0"]], SIZES, [0], [9, 9], tied=[1]) == (None,), "two devices hold it twice"
