"""Paths and copies by what steps read."""

from __future__ import annotations

import pytest

from runtime.policy.routing.bytes_read import ReadShare, ReadSpot, choose, relieve


def test_a_newcomer_goes_where_its_block_is_in_use() -> None:
    """Beside others of its foundation it adds its own pages; on the other device all there would read another
    foundation.
    """
    used = {"a": 3 * 1.0, "b": (1 + 1) * (10.0 + 1.0)}
    assert choose([used], {"a": 12.0, "b": 10.0}, 1.0) == ("a",)


def test_until_the_other_foundation_is_the_smaller_evil() -> None:
    for members, expected in ((2, "a"), (9, "a"), (12, "b")):
        adds = {"a": (members + 1) * 1.0, "b": 2 * (10.0 + 1.0)}
        assert choose([adds], {"a": 10.0 + members, "b": 11.0}, 1.0) == (expected,), members


def test_an_idle_device_with_the_block_is_better_still() -> None:
    assert choose([{"a": 3 * 1.0, "b": 1 * (10.0 + 1.0)}], {"a": 12.0, "b": 0.0}, 1.0) == ("b",)


def test_a_chain_stays_whole_where_nothing_speaks_against_it() -> None:
    """A change of device waits for a whole step of the other one."""
    adds = [{"a": 1.0, "b": 1.0}] * 4
    assert choose(adds, {"a": 5.0, "b": 4.0}, 0.5) == ("b",) * 4
    cheaper_behind = [{"a": 1.0, "b": 9.0}, {"a": 9.0, "b": 1.0}]
    assert choose(cheaper_behind, {"a": 5.0, "b": 4.0}, 0.5) == ("a", "b")
    assert choose(cheaper_behind, {"a": 5.0, "b": 9.0}, 0.5) == ("a", "a")


def test_a_block_that_is_nowhere_has_no_path() -> None:
    assert choose([], {}, 0.0) is None
    assert choose([{"a": 1.0}, {}], {"a": 0.0}, 0.0) is None


def test_a_device_with_two_foundations_gives_one_of_them_away() -> None:
    """Eight sequences read 10 + 10; apart, four read 10 and four read 10."""
    found = relieve(8, 20.0 + 8, ReadShare(4, 1.0, 10), [ReadSpot("idle", 0, 0.0, 10, 100, 10)])
    assert found is not None and found.device == "idle" and found.moves == 4
    assert found.gain == pytest.approx(1 - (4 * 14 + 4 * 14) / (8 * 28))


def test_one_foundation_is_not_divided_for_little() -> None:
    """Weights are read once for all: half the sequences elsewhere saves half of the pages only."""
    assert relieve(8, 100.0 + 8, ReadShare(8, 1.0, 100), [ReadSpot("idle", 0, 0.0, 100, 200, 100)]) is None
    found = relieve(80, 100.0 + 80, ReadShare(80, 1.0, 100), [ReadSpot("idle", 0, 0.0, 100, 200, 100)])
    assert found is not None and found.moves == 40


def test_not_where_there_is_no_room_nor_where_others_would_suffer() -> None:
    share = ReadShare(4, 1.0, 10)
    assert relieve(8, 28.0, share, [ReadSpot("small", 0, 0.0, 10, 9, 10)]) is None
    assert relieve(8, 28.0, share, [ReadSpot("busy", 20, 30.0, 10, 100, 10)]) is None
    assert relieve(8, 28.0, share, []) is None
    found = relieve(8, 28.0, share, [ReadSpot("other", 1, 11.0, 10, 100, 10), ReadSpot("same", 1, 11.0, 0, 100, 1)])
    assert found is not None and found.device == "same", "where the block is in use already"


def test_where_the_weights_are_already_less_has_to_be_gained() -> None:
    """Half of sixty sequences to an idle copy saves much; of eight some hundredths, which no load is worth."""
    here = 100.0 + 8 * 2
    spot = {"load": 0, "reads": 0.0, "adds": 100, "room": 0}
    found = relieve(8, here, ReadShare(8, 2.0, 100), [ReadSpot("copy", more=0, **spot)])
    assert found is not None and (found.device, found.moves) == ("copy", 4) and 0.04 <= found.gain < 0.1
    assert relieve(8, here, ReadShare(8, 2.0, 100), [ReadSpot("empty", more=100, **{**spot, "room": 200})]) is None
    assert relieve(2, 100.0 + 2, ReadShare(2, 1.0, 100), [ReadSpot("copy", more=0, **spot)]) is None, (
        "two gain next to nothing"
    )
