"""Plans judged by both objectives."""

from __future__ import annotations

import pytest

from benchmarks.queue.objectives import compare

pytest.importorskip("scipy", reason="SKIPPED: scipy is not installed (extra `plan`)")


def test_the_papers_program_has_the_least_penalties_of_plans_that_meet_all_deadlines() -> None:
    found = compare(3, 4, 4.0)
    assert found["with a plan of the paper's program"] >= 1
    means = found["means"]
    assert means["paper"]["on time"] == 1.0
    assert all(
        each["penalties s"] >= means["paper"]["penalties s"] for each in means.values() if each["on time"] == 1.0
    )
