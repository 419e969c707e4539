"""What a load brings, by the tier that it comes from (UN-04)."""

from __future__ import annotations

from runtime.policy.residency.swap import SwapBytes, swap_bytes


def test_bytes_by_tier() -> None:
    missing = {"new": 100, "old": 50, "kept": 30, "half": 20}
    found = swap_bytes(missing, 7, {"old", "half", "kept"}, {"kept": 30, "half": 5, "other": 9})
    assert found == SwapBytes(first=107, again=65, host=35)
    assert found.terms == (1.0, 107.0, 65.0, 1.0, 35.0)


def test_host_memory_never_counts_for_more_than_the_block() -> None:
    assert swap_bytes({"a": 10}, 0, (), {"a": 25}) == SwapBytes(host=10)


def test_nothing_missing_costs_the_fixed_part_alone() -> None:
    assert swap_bytes({}, 0, {"a"}, {"a": 5}).terms == (0.0, 0.0, 0.0, 1.0, 0.0)


def test_what_came_replaces_what_was_expected() -> None:
    expected = SwapBytes(first=100, again=40, host=60)
    assert expected.as_brought(disk=140, host=60, own=0) == expected
    assert expected.as_brought(disk=200, host=0, own=0) == SwapBytes(100, 100, 0), "host memory had nothing of it left"
    assert expected.as_brought(disk=10, host=190, own=3) == SwapBytes(13, 0, 190)
