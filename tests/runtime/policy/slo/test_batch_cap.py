"""Rows that are left out: the fewest that suffice, only those that can wait, and none for what is late anyway."""

from __future__ import annotations

from runtime.policy.slo import batch_cap
from runtime.policy.slo.batch_cap import BatchCap, Claim
from runtime.policy.slo.step_times import StepTimes

MS = 1_000_000
NONE = BatchCap()


def step(rows: int) -> float:
    """A step of 10 ms, and 2 ms more per row."""
    return (10 + 2 * rows) * MS


def cap_batch(claims: list[Claim], excess_ms: float = 0.0) -> BatchCap:
    """Return what is left out at time 0; each step may exceed its mean by so much."""
    return batch_cap.cap_batch(claims, step, lambda steps: steps * excess_ms * MS, 0)


def batch(count: int, due: int = 100_000) -> list[Claim]:
    return [Claim(f"b{number:02}", due * MS, 200, limits=False) for number in range(count)]


def test_as_many_rows_run_as_the_tightest_deadline_allows() -> None:
    urgent = Claim("u", 500 * MS, 20)
    found = cap_batch([*batch(15), urgent])
    # 25 ms per step are left: seven rows take 24 ms, eight 26.
    assert len(found.left_out) == 9 and "u" not in found.left_out
    assert found.until == 20 * step(7)
    assert not cap_batch([*batch(15), Claim("u", 1000 * MS, 20)]).left_out


def test_what_steps_may_exceed_their_means_by_is_kept_in_reserve() -> None:
    found = cap_batch([*batch(15), Claim("u", 500 * MS, 20)], excess_ms=4)
    assert len(found.left_out) == 11, "21 ms per step are left: five rows take 20"


def test_an_urgent_one_is_not_given_up_because_it_is_close() -> None:
    """Alone it would be on time, hardly: with a reserve, or 15 % less time, it would count as late anyway."""
    close = Claim("u", 250 * MS, 20)
    assert len(cap_batch([*batch(15), close], excess_ms=4).left_out) == 15
    assert cap_batch([*batch(15), Claim("u", 239 * MS, 20)]) == NONE


def test_time_that_is_left_is_what_another_prompt_may_take() -> None:
    calm = cap_batch([*batch(3), Claim("u", 500 * MS, 20)], excess_ms=1)
    assert (calm.left_out, calm.spare) == (frozenset(), (500 - 20 * 20 - 20) * MS), "with a fifth row in each step"
    assert cap_batch([*batch(15), Claim("u", 500 * MS, 20)]).spare == 0
    assert cap_batch(batch(15)).spare is None


def test_those_with_the_least_time_stay() -> None:
    soon = [Claim("soon", 9_000 * MS, 200, limits=False)]
    found = cap_batch([*batch(6), *soon, Claim("u", 400 * MS, 20)])
    assert len(found.left_out) == 3 and "soon" not in found.left_out


def test_a_row_that_would_be_late_by_waiting_is_not_left_out() -> None:
    able = batch(15)
    tight = [Claim(f"t{number}", (200 * 42 + 100) * MS, 200) for number in range(15)]
    urgent = Claim("u", 500 * MS, 20)
    assert cap_batch([*tight, urgent]) == BatchCap(until=20 * step(16), spare=0)
    assert cap_batch([*able, urgent]).left_out


def test_what_is_late_anyway_limits_nothing() -> None:
    late = Claim("late", 100 * MS, 20)
    assert cap_batch([*batch(15), late]) == NONE
    found = cap_batch([*batch(14), late, Claim("u", 500 * MS, 20)])
    assert found.left_out and not found.left_out & {"late", "u"}


def test_deadlines_that_may_not_limit_do_not() -> None:
    assert cap_batch([*batch(15), Claim("u", 500 * MS, 20, limits=False)]) == NONE


def test_a_prompt_that_is_not_computed_takes_of_the_time() -> None:
    without, beside = (cap_batch([*batch(15), Claim("u", 500 * MS, 20, context)]) for context in (0, 60 * MS))
    assert len(beside.left_out) > len(without.left_out)


def test_prompts_beside_it_take_of_the_time() -> None:
    urgent, other = Claim("u", 500 * MS, 20), Claim("b15", 100_000 * MS, 200, 60 * MS, limits=False)
    assert len(cap_batch([*batch(14), other, urgent]).left_out) == 10, "22 ms per step: six rows"


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


def test_the_reserve_is_what_as_many_consecutive_steps_exceeded_their_means_by() -> None:
    times = StepTimes()
    times.add(4, 20.0)
    assert times.excess(10) == 0.15 * 10 * 20.0, "until errors are known"
    for number in range(400):
        times.add(4, 120.0 if number % 50 == 0 else 20.0)
    mean = times.at(4)
    assert 20.0 < mean < 23.0
    one, ten = times.excess(1), times.excess(10)
    assert 90.0 < one < 100.0, "a step in fifty stalls: a single one may be it"
    assert 60.0 < ten < one, "ten steps have one stall at most, and fall short of the mean in the others"
    assert times.excess(200) == 2 * times.excess(100), "too few windows of that many"
