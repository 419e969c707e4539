"""Batches keep their number as long as the same rows decode on together, and no longer."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.scheduler.decode.batch_numbers import BatchNumbers

ROWS: dict[str, Any] = {
    "device": "d", "seqs": ("a", "b"), "epochs": (1, 3), "starts": (4, 9), "counts": (1, 1), "sample": (True, True),
    "steps": (1, 1),
}  # fmt: skip


def later(tokens: int = 1, **changes: Any) -> dict[str, Any]:
    """The rows that many tokens on, with some columns changed."""
    return {**ROWS, "starts": tuple(start + tokens for start in ROWS["starts"]), **changes}


def test_rows_that_decode_on_keep_their_number() -> None:
    numbers = BatchNumbers()
    assert [numbers.number(**later(step)) for step in range(5)] == [1] * 5


@pytest.mark.parametrize(
    "change",
    [
        {"device": "e"}, {"seqs": ("a", "c")}, {"seqs": ("b", "a"), "epochs": (3, 1), "starts": (10, 5)},
        {"epochs": (1, 4)}, {"starts": (4, 9)}, {"starts": (6, 11)}, {"starts": (5, 11)},
        {"seqs": ("a",), "epochs": (1,), "starts": (5,), "counts": (1,), "sample": (True,), "steps": (1,)},
    ],
    ids=str,
)  # fmt: skip
def test_any_other_rows_get_a_new_number(change: dict[str, Any]) -> None:
    numbers = BatchNumbers()
    assert numbers.number(**ROWS) == 1
    assert numbers.number(**later(**change)) == 2


@pytest.mark.parametrize("change", [{"counts": (1, 2)}, {"steps": (4, 1)}, {"sample": (True, False)}], ids=str)
def test_rows_that_do_not_give_one_token_each_have_no_number(change: dict[str, Any]) -> None:
    assert BatchNumbers().number(**{**ROWS, **change}) == 0


def test_batches_that_run_in_turn_keep_their_numbers() -> None:
    """Two groups of a device, whose messages alternate, up to the most that are remembered."""
    numbers = BatchNumbers()
    others = {"seqs": ("c", "d")}
    found = [numbers.number(**later(step, **change)) for step in range(3) for change in ({}, others)]
    assert found == [1, 2] * 3
    for number in range(300):
        numbers.number(**{**ROWS, "seqs": (f"x{number}", "y")})
    assert len(numbers._known) == 256 and numbers.number(**later(3)) == 303
