"""Loads are estimated by the tier that their bytes come from, per device (BL-21, UN-04)."""

from __future__ import annotations

import pytest

from runtime.chains import Stage
from runtime.scheduler.observe.load_times import LoadTimes

SIZE = 100_000_000
SIZES = {"a": SIZE}
DISK, HOST = 0.5, 0.02


def load(times: LoadTimes, device: str, block: str, seconds: float, disk: int, host: int) -> float:
    """Load a stage with one block, and return what was expected of it."""
    stage = Stage(block, 0, 1)
    times.begin(device, stage, {block: SIZE}, 0, ())
    estimate = times.end(device, stage, seconds, disk, host)
    assert estimate is not None
    return estimate


def learned(device: str = "d") -> LoadTimes:
    """Return times of a device: a block comes from its disk in .5 s, from its host memory in .02 s."""
    times = LoadTimes((), 1e9)
    for at in range(12):
        load(times, device, f"new{at}", DISK, SIZE, 0)
        times.keep_blocks(device, [(f"new{at}", SIZE)])
        load(times, device, f"new{at}", HOST, 0, SIZE)
        times.keep_blocks(device, [(f"new{at}", 0)])
    return times


def test_a_block_that_host_memory_keeps_is_expected_sooner() -> None:
    times = learned()
    assert times.seconds("d", SIZES) == pytest.approx(DISK, rel=0.1)
    times.keep_blocks("d", [("a", SIZE)])
    assert times.seconds("d", SIZES) == pytest.approx(HOST, rel=0.1)
    assert times.host_bytes("d") == SIZE
    times.keep_blocks("d", [("a", SIZE // 2)])
    assert times.seconds("d", SIZES) == pytest.approx((DISK + HOST) / 2, rel=0.1)
    times.keep_blocks("d", [("a", 0)])
    assert times.seconds("d", SIZES) == pytest.approx(DISK, rel=0.1) and times.host_bytes("d") == 0


def test_the_terms_of_a_path_follow_the_tier() -> None:
    times = learned()
    slow = times.block_seconds("d", "a", SIZE)
    times.keep_blocks("d", [("a", SIZE)])
    fast = times.block_seconds("d", "a", SIZE)
    assert times.delay("d", SIZES) + fast == pytest.approx(HOST, rel=0.1)
    times.keep_blocks("d", [("a", 0)])
    assert times.delay("d", SIZES) + slow == pytest.approx(DISK, rel=0.1)
    assert times.delay("d") == pytest.approx(times.delay("d", SIZES)), "the slowest tier"


def test_the_first_load_from_host_memory_is_not_expected_to_begin_as_late_as_reading_does() -> None:
    """As recorded: 326 MB were read in .485 s and then 106 MB in .22 s each; from host memory 106 MB took 4.4 ms."""
    times, first, later = LoadTimes((), 1e9), 325_720_000, 106_230_000
    for at, (size, seconds) in enumerate([(first, 0.485), *[(later, 0.22)] * 8]):
        stage = Stage(f"m{at}", 0, 1)
        times.begin("d", stage, {f"b{at}": size}, 0, ())
        times.end("d", stage, seconds, size, 0)
    assert times.seconds("d", {"new": later}) == pytest.approx(0.22, rel=0.1)
    assert times.delay("d", {"new": later}) > 0.05
    times.keep_blocks("d", [("b1", later)])
    assert times.seconds("d", {"b1": later}) < 0.02 and times.delay("d", {"b1": later}) < 0.01


def test_a_rate_is_learned_from_what_came_not_from_what_was_expected() -> None:
    """Host memory had what the scheduler did not know of: those loads say nothing of the disk."""
    times = learned()
    for at in range(8):
        assert load(times, "d", f"there{at}", HOST, 0, SIZE) == pytest.approx(DISK, rel=0.1)
    assert times.seconds("d", SIZES) == pytest.approx(DISK, rel=0.1)
    times.keep_blocks("d", [("a", SIZE)])
    assert times.seconds("d", SIZES) == pytest.approx(HOST, rel=0.1)


def test_rates_are_kept_per_device_and_a_new_one_begins_with_those_of_all() -> None:
    times = learned("d0")
    assert times.seconds("d1", SIZES) == pytest.approx(DISK, rel=0.1)
    for at in range(6):
        load(times, "d1", f"b{at}", 4 * DISK, SIZE, 0)
    assert times.seconds("d1", SIZES) == pytest.approx(4 * DISK, rel=0.1)
    assert times.seconds("d0", SIZES) == pytest.approx(DISK, rel=0.1)


def test_a_device_that_dies_has_nothing_in_host_memory() -> None:
    times = learned()
    times.keep_blocks("d", [("a", SIZE)])
    times.remove_device("d")
    assert times.seconds("d", SIZES) == pytest.approx(DISK, rel=0.1)


def test_a_removed_block_is_forgotten() -> None:
    times = learned()
    times.keep_blocks("d", [("a", SIZE)])
    times.remove_blocks(["a"])
    assert times.host_bytes("d") == 0


def test_without_a_report_the_load_counts_as_expected() -> None:
    times = LoadTimes((), 1e9)
    stage = Stage("m", 0, 1)
    times.begin("d", stage, SIZES, 0, ())
    assert times.end("d", stage, 0.3) == pytest.approx(0.1, rel=0.1)
    assert times.seconds("d", {"b": SIZE}) == pytest.approx(0.3, rel=0.1)


def test_loads_under_way_are_expected_to_take_what_is_known_now() -> None:
    """What was assumed when they were requested may be far off: a second, until the first load took a half."""
    times = LoadTimes((), SIZE)
    for name in ("a", "b"):
        times.begin("d", Stage(name, 0, 1), {name: SIZE}, 0, ())
    assert times.pending("d") == pytest.approx(2.0, rel=0.01)
    times.end("d", Stage("a", 0, 1), DISK, SIZE, 0)
    assert times.pending("d") == pytest.approx(DISK, rel=0.1)
    assert times.delay("d") == pytest.approx(times.pending("d") + times.fixed("d"))
