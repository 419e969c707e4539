"""Checksums of tensors: which changes they detect, and that they do not depend on where a tensor lies."""

from __future__ import annotations

import pytest
import torch

from runtime.engine.tensors.checksum import checksum

MASK = (1 << 64) - 1


def by_hand(data: bytes) -> str:
    """Compute the two sums that the module defines, in Python's integers."""
    words = [int.from_bytes(data[at : at + 8].ljust(8, b"\0"), "little") for at in range(0, len(data), 8)]
    first = sum(word * (2 * at + 1) for at, word in enumerate(words))
    second = len(data)
    for at, word in enumerate(words):
        x = (word + (at + 1) * 0x9E3779B97F4A7C15) & MASK
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            signed = x - (1 << 64) if x >> 63 else x
            x = ((x ^ (signed >> shift)) * factor) & MASK
        second += x
    return f"{first & MASK:016x}{second & MASK:016x}"


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 64, 1000, 4096])
def test_it_is_what_it_is_said_to_be(nbytes: int) -> None:
    data = bytes((at * 131 + 7) % 256 for at in range(nbytes))
    assert checksum(torch.tensor(list(data), dtype=torch.uint8)) == by_hand(data)


def test_where_it_lies_makes_no_difference() -> None:
    whole = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    for lo, hi in ((0, 4096), (8, 800), (3, 803), (1, 2)):
        assert checksum(whole[lo:hi]) == checksum(whole[lo:hi].clone())


def test_every_change_of_one_byte_is_found() -> None:
    data = torch.randint(0, 256, (96,), dtype=torch.uint8)
    seen = {checksum(data)}
    for at in range(96):
        for bit in range(8):
            changed = data.clone()
            changed[at] ^= 1 << bit
            seen.add(checksum(changed))
    assert len(seen) == 1 + 96 * 8


def test_words_that_change_places_and_zeros_at_the_end_are_found() -> None:
    words = torch.tensor([5, 5 + (1 << 62), 9, 5 - (1 << 62), 0], dtype=torch.int64)
    seen = {
        checksum(words[torch.tensor(order)].view(torch.uint8))
        for order in ([0, 1, 2, 3, 4], [1, 0, 2, 3, 4], [3, 1, 2, 0, 4])
    }
    assert len(seen) == 3
    assert len({checksum(torch.zeros(n, dtype=torch.uint8)) for n in range(20)}) == 20
