"""Cells: a partition of the devices in which every chain fits into one."""

from __future__ import annotations

import random

from runtime.policy.slo.cells import cells_of


def parts(devices: str, *chains: list[str]) -> list[str]:
    """Return the cells' devices; a chain is given by the devices of each block, as letters."""
    found = cells_of(list(devices), [[list(holders) for holders in chain] for chain in chains])
    assert all(cell.name in cell.devices for cell in found)
    return sorted("".join(sorted(cell.devices)) for cell in found)


def test_devices_that_hold_whole_chains_are_cells_of_their_own() -> None:
    assert parts("ab", ["ab", "ab"]) == ["a", "b"]
    assert parts("ab", ["a", "a"], ["b", "b"]) == ["a", "b"]
    assert parts("abc", ["a", "ab"]) == ["a", "b", "c"]
    assert parts("ab") == ["a", "b"]


def test_a_chain_that_is_cut_joins_the_devices_of_each_copy() -> None:
    assert parts("ab", ["a", "b"]) == ["ab"]
    assert parts("abcd", ["ac", "bd"]) == ["ab", "cd"]
    assert parts("abcde", ["ac", "bd"], ["a", "b"], ["e"]) == ["ab", "cd", "e"]
    assert parts("abc", ["a", "bc"]) == ["abc"]


def test_every_chain_fits_in_one_cell_and_every_device_is_in_one() -> None:
    rng = random.Random(0)
    for _ in range(300):
        devices = "abcdefgh"[: rng.randrange(1, 9)]
        chains = [
            ["".join(rng.sample(devices, rng.randrange(1, len(devices) + 1))) for _ in range(rng.randrange(1, 5))]
            for _ in range(rng.randrange(4))
        ]
        found = parts(devices, *chains)
        assert sorted("".join(found)) == list(devices)
        for chain in chains:
            assert any(all(set(holders) & set(cell) for holders in chain) for cell in found), (found, chain)
