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
    assert background.next_step(0, 20, None, step, 59 * SECOND) == BackgroundShare(5, 0.0), "20 ms: five rows"
    assert background.next_step(0, 20, None, step, 61 * SECOND) == BackgroundShare(20)
    background.record_stay(10 * MS, 62 * SECOND)
    for _ in range(60):
        background.record_stay(10 * MS, 62 * SECOND)
    assert background.next_step(0, 20, None, step, 63 * SECOND).rows == 1, "one always runs"


def test_costs_of_steps_are_fitted() -> None:
    costs = StepCosts()
    assert not costs.known
    for number in range(60):
        rows, prompt = 1 + number % 7, (number % 3) * 24
        costs.add(rows, prompt, int(4 * MS + rows * MS // 2 + prompt * MS // 4))
    assert costs.known and abs(costs.step(10) - 9 * MS) < MS / 4
    assert abs(costs.prompt(25) - 6.5 * MS) < MS / 4
