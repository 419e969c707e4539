"""Rows that are left out: the fewest that suffice, only those that can wait, and none for what is late anyway."""

from __future__ import annotations

from runtime.policy.slo.batch_cap import BatchCap, Claim, cap_batch
from runtime.policy.slo.step_times import StepTimes

MS = 1_000_000


def step(rows: int) -> float:
    """A step of 10 ms, and 2 ms more per row."""
    return (10 + 2 * rows) * MS


def batch(count: int, due: int = 100_000) -> list[Claim]:
    return [Claim(f"b{number:02}", due * MS, 200, limits=False) for number in range(count)]


def test_as_many_rows_run_as_the_tightest_deadline_allows() -> None:
    urgent = Claim("u", 500 * MS, 20)
    found = cap_batch([*batch(15), urgent], step, 0)
    # 25 ms per step are left, of which 85 % are used: five rows take 20 ms, six 22.
    assert len(found.left_out) == 11 and "u" not in found.left_out
    assert found.until == 20 * step(5)
    assert cap_batch([*batch(15), Claim("u", 1000 * MS, 20)], step, 0) == BatchCap()


def test_those_with_the_least_time_stay() -> None:
    soon = [Claim("soon", 9_000 * MS, 200, limits=False)]
    found = cap_batch([*batch(6), *soon, Claim("u", 400 * MS, 20)], step, 0)
    assert len(found.left_out) == 5 and "soon" not in found.left_out


def test_a_row_that_would_be_late_by_waiting_is_not_left_out() -> None:
    able = batch(15)
    tight = [Claim(f"t{number}", (200 * 42 + 100) * MS, 200) for number in range(15)]
    urgent = Claim("u", 500 * MS, 20)
    assert cap_batch([*tight, urgent], step, 0) == BatchCap()
    assert cap_batch([*able, urgent], step, 0).left_out


def test_what_is_late_anyway_limits_nothing() -> None:
    late = Claim("late", 100 * MS, 20)
    assert cap_batch([*batch(15), late], step, 0) == BatchCap()
    found = cap_batch([*batch(14), late, Claim("u", 500 * MS, 20)], step, 0)
    assert found.left_out and not found.left_out & {"late", "u"}


def test_deadlines_that_may_not_limit_do_not() -> None:
    assert cap_batch([*batch(15), Claim("u", 500 * MS, 20, limits=False)], step, 0) == BatchCap()


def test_a_prompt_that_is_not_computed_takes_of_the_time() -> None:
    without, beside = (cap_batch([*batch(15), Claim("u", 500 * MS, 20, context)], step, 0) for context in (0, 60 * MS))
    assert len(beside.left_out) > len(without.left_out)


def test_step_times_are_interpolated_and_never_fall() -> None:
    times = StepTimes()
    assert not times.known
    for _ in range(40):
        times.add(4, 18.0)
        times.add(16, 42.0)
        times.add(8, 17.0)
    assert (times.at(4), times.at(16), times.at(8), times.at(12)) == (18.0, 42.0, 18.0, 30.0)
    assert times.at(32) == 84.0 and times.at(1) == 18.0 * (1 + 1 / 4) / 2
    times.add(16, 4200.0)
    assert times.at(16) < 46.0, "a stall counts little"
    for _ in range(200):
        times.add(16, 84.0)
    assert abs(times.at(16) - 84.0) < 0.5, "a slower machine is followed"
