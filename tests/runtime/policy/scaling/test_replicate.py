"""Which device gets a copy of a part, by each measure of load."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runtime.policy.scaling.replicate import ByBytes, BySequences, Replica, ReplicaSpot, replicate


def widen(load: float, share: int, spots: Sequence[ReplicaSpot], margin: int) -> Replica | None:
    return replicate(spots, BySequences(load, share, margin))


def relieve(load: float, reads: float, share: tuple[int, float, int], spots: Sequence[ReplicaSpot]) -> Replica | None:
    return replicate(spots, ByBytes(load, reads, *share))


def test_by_sequences_half_the_difference_goes_to_the_device_with_the_fewest() -> None:
    spots = [ReplicaSpot("few", 2, 10, 5), ReplicaSpot("none", 0, 10, 10), ReplicaSpot("full", 0, 4, 5)]
    found = widen(12, 9, spots, 4)
    assert found is not None and (found.device, found.moves) == ("none", 6)
    assert widen(12, 3, spots, 4) == Replica("none", 3, (0, 10, "none")), "never more than the part has"


def test_of_equal_devices_that_with_most_of_the_blocks_gets_the_copy() -> None:
    found = widen(8, 8, [ReplicaSpot("a", 0, 10, 9), ReplicaSpot("c", 0, 10, 2), ReplicaSpot("b", 0, 10, 2)], 2)
    assert found is not None and found.device == "b"


def test_no_copy_for_less_than_the_margin_nor_where_there_is_no_room() -> None:
    assert widen(6, 6, [ReplicaSpot("a", 2, 10, 5)], 4) is None
    assert widen(7, 6, [ReplicaSpot("a", 2, 10, 5)], 4) is not None
    assert widen(90, 9, [ReplicaSpot("a", 0, 4, 5)], 4) is None
    assert widen(1, 1, [ReplicaSpot("a", 0, 10, 5)], 0) is None, "half of one is none"


def test_a_device_with_two_foundations_gives_one_of_them_away() -> None:
    """Eight sequences read 10 + 10 bytes of weights; apart, four read 10 and four read 10."""
    found = relieve(8, 20.0 + 8, (4, 1.0, 10), [ReplicaSpot("idle", 0, 100, 10, 0.0, 10)])
    assert found is not None and found.device == "idle" and found.moves == 4
    assert found.gain == pytest.approx(1 - (4 * 14 + 4 * 14) / (8 * 28))


def test_one_foundation_is_not_divided_for_little() -> None:
    """Weights are read once for all sequences: moving half of the sequences saves half of the pages only."""
    assert relieve(8, 100.0 + 8, (8, 1.0, 100), [ReplicaSpot("idle", 0, 200, 100, 0.0, 100)]) is None
    found = relieve(80, 100.0 + 80, (80, 1.0, 100), [ReplicaSpot("idle", 0, 200, 100, 0.0, 100)])
    assert found is not None and found.moves == 40


def test_not_where_there_is_no_room_nor_where_others_would_suffer() -> None:
    share = (4, 1.0, 10)
    assert relieve(8, 28.0, share, [ReplicaSpot("small", 0, 9, 10, 0.0, 10)]) is None
    assert relieve(8, 28.0, share, [ReplicaSpot("busy", 20, 100, 10, 30.0, 10)]) is None
    assert relieve(8, 28.0, share, []) is None
    found = relieve(
        8, 28.0, share, [ReplicaSpot("other", 1, 100, 10, 11.0, 10), ReplicaSpot("same", 1, 100, 1, 11.0, 0)]
    )
    assert found is not None and found.device == "same", "where the block is in use already"


def test_where_the_weights_are_already_less_has_to_be_gained() -> None:
    """Half of sixty sequences on an idle copy save much; of eight some hundredths, and of two too little."""
    here = 100.0 + 8 * 2
    spot = {"load": 0, "reads": 0.0, "adds": 100, "room": 0}
    found = relieve(8, here, (8, 2.0, 100), [ReplicaSpot("copy", more=0, **spot)])
    assert found is not None and (found.device, found.moves) == ("copy", 4) and 0.04 <= found.gain < 0.1
    assert relieve(8, here, (8, 2.0, 100), [ReplicaSpot("empty", more=100, **{**spot, "room": 200})]) is None
    assert relieve(2, 100.0 + 2, (2, 1.0, 100), [ReplicaSpot("copy", more=0, **spot)]) is None, (
        "two gain next to nothing"
    )
