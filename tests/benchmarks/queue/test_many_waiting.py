"""The benchmark of many waiting requests: a plan is asked for, and both kernels find the same one."""

from __future__ import annotations

from benchmarks.queue.many_waiting import measure
from runtime.policy.slo.plan.compiled import PLAIN


def test_requests_wait_and_are_planned() -> None:
    found = measure(60, 20, 4, 2, 4, PLAIN)
    assert found["waiting"] == 56
    assert found["groups"] and found["groups"][0] > 4
    assert found["digest"]["plain"] == found["digest"]["compiled"]
