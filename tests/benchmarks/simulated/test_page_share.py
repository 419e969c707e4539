"""The simulated comparison of page shares answers all requests on both sides."""

from __future__ import annotations

from benchmarks.simulated.page_share import CASES, SHARES, rows, run


def test_both_shares_answer_everything_and_what_weights_leave_is_of_use() -> None:
    fixed, rest = (run("6 models, 90 % for weights", pages, 0, 60) for pages in SHARES)
    assert fixed["completed"] == rest["completed"] == 60
    assert rest["throughput_tokens"] > fixed["throughput_tokens"]


def test_a_row_per_case_and_seed() -> None:
    assert len(list(rows(1, 10))) == len(CASES)
