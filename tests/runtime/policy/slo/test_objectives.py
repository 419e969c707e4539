"""Objectives of answers and of first tokens, and their classes."""

from __future__ import annotations

import random

from runtime.policy.slo.objectives import TimeObjective, class_of, objective_of


def test_a_first_token_settles_its_objective_and_no_other() -> None:
    assert objective_of(500, None, begun=False) == objective_of(500, None, begun=True) == TimeObjective(500)
    assert objective_of(None, 500, begun=False) == TimeObjective(500, first_token=True)
    assert objective_of(None, 500, begun=True) is None
    assert objective_of(None, None, begun=False) is None


def test_a_class_holds_times_that_differ_by_a_third_at_most() -> None:
    rng = random.Random(0)
    times = [*range(1, 2000), *(rng.randrange(1, 2**31) for _ in range(3000))]
    for ms in times:
        found = class_of(TimeObjective(ms, ms % 2 > 0))
        assert found is not None and found.ms <= ms < found.ms * 4 / 3 + 1 and found.first_token == (ms % 2 > 0)
        assert class_of(found) == found
    assert len({class_of(TimeObjective(ms)) for ms in range(1000, 10_000)}) == 10
    assert class_of(None) is None
