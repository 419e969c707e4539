"""What background rows get of a step: by what interactive rows earn, and by the time that a request would wait."""

from __future__ import annotations

from runtime.policy.slo.background import Background, BackgroundShare, StepCosts

MS = 1_000_000
SECOND = 1000 * MS


def step(rows: int) -> float:
    """A step of 10 ms, and 2 ms more per row."""
    return (10 + 2 * rows) * MS


def test_all_rows_run_once_as_many_steps_have_earned_their_time() -> None:
    """Half of a tenth of 12 ms is 0.6 ms per step; five rows take 10."""
    background = Background(0.1)
    rows = [background.next_step(1, 5, None, step, 0).rows for _ in range(60)]
    assert [at for at, each in enumerate(rows) if each] == [16, 33, 50] and set(rows) == {0, 5}


def test_a_prompt_is_saved_up_for_and_no_more_than_that() -> None:
    background = Background(0.1)
    spare = [background.next_step(1, 0, 6.0 * MS, step, 0).spare or 0.0 for _ in range(40)]
    assert next(at for at, each in enumerate(spare) if each) == 9 and max(spare) == 6 * MS
    background.pay(6.0 * MS)
    assert background.next_step(1, 0, 6.0 * MS, step, 0).spare == 0.0


def test_steps_of_the_background_alone_are_short_for_a_minute_after_a_request() -> None:
    background = Background(0.2)
    assert background.next_step(0, 20, None, step, 0) == BackgroundShare(20), "no request was seen yet"
    background.record_stay(100 * MS, 0)
    assert background.next_step(0, 20, None, step, 59 * SECOND) == BackgroundShare(15, 0.0), "twice 20 ms: 15 rows"
    assert background.next_step(0, 20, None, step, 61 * SECOND) == BackgroundShare(20)
    for _ in range(60):
        background.record_stay(10 * MS, 62 * SECOND)
    assert background.next_step(0, 20, None, step, 63 * SECOND).rows == 7, "at least twice a step of one row: 24 ms"
    assert background.next_step(0, 1, None, lambda rows: 500.0 * MS * rows, 63 * SECOND).rows == 1, "one always runs"


def test_a_prompt_of_the_background_alone_always_runs() -> None:
    background = Background(0.2)
    background.record_stay(100 * MS, 0)
    assert background.next_step(0, 3, 4.0 * MS, step, 0) == BackgroundShare(3, 24.0 * MS)
    assert background.next_step(0, 3, 90.0 * MS, step, 0) == BackgroundShare(3, 90.0 * MS)


def test_rests_leave_the_mean_wait_at_half_of_the_share() -> None:
    """A request that comes at any moment of a step and its rest waits for the end of the step."""
    background = Background(0.2)
    assert background.rest(50.0 * MS, 0) == 0.0, "no request was seen yet"
    background.record_stay(100 * MS, 0)
    for took in (21.0 * MS, 40.0 * MS, 190.0 * MS):
        rest = background.rest(took, SECOND)
        assert abs(took / (took + rest) * took / 2 - 20 * MS / 2) < 1.0
    assert background.rest(20.0 * MS, SECOND) == background.rest(5.0 * MS, SECOND) == 0.0
    assert background.rest(300.0 * MS, SECOND) == 2700.0 * MS, "a tenth of the time is the background's"
    assert background.rest(300.0 * MS, 61 * SECOND) == 0.0


def test_costs_of_steps_are_fitted() -> None:
    costs = StepCosts()
    assert not costs.known
    for number in range(60):
        rows, prompt = 1 + number % 7, (number % 3) * 24
        costs.add(rows, prompt, int(4 * MS + rows * MS // 2 + prompt * MS // 4))
    assert costs.known and abs(costs.step(10) - 9 * MS) < MS / 4
    assert abs(costs.prompt(25) - 6.5 * MS) < MS / 4
    assert abs(costs.step_with_prompts(3, 24) - 11.5 * MS) < MS / 4
