"""The compiled kernel beside the plain one."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from runtime.policy.slo.plan import compiled
from runtime.policy.slo.plan.annealing import solve
from runtime.policy.slo.plan.compiled import PLAIN, PlanKernel, compile_kernel
from tests.runtime.policy.slo.plan.problems import drawn

#: Of the plans of `_plans`, by either kernel on any machine.
_DIGEST = "bedbdb8932f66077"


@pytest.fixture(scope="module")
def fast() -> PlanKernel:
    pytest.importorskip("numba", reason="SKIPPED: numba is not installed (extra `plan`)")
    made = compile_kernel()
    assert made is not None
    return made


def _digest(kernel: PlanKernel) -> str:
    state = hashlib.blake2b(digest_size=8)
    for seed in range(3):
        for queues, together in ((1, True), (4, False)):
            made = drawn(20, queues, seed, models=6, together=together, rounds=600)
            groups = tuple(replace(each, priority=each.id % 2) for each in made.groups)
            plan = solve(replace(made, groups=groups), kernel=kernel)
            state.update(f"{plan.orders} {plan.score.classes} {plan.score.completion}".encode())
    return state.hexdigest()


def test_plain_plans_have_the_known_digest() -> None:
    assert _digest(PLAIN) == _DIGEST


def test_compiled_plans_have_the_same_digest(fast: PlanKernel) -> None:
    """Must show 6: one digest with and without numba."""
    assert _digest(fast) == _DIGEST
    made = drawn(40, 5, 1, models=9, together=True, scenarios=32, rounds=2000)
    assert solve(made, kernel=fast) == solve(made)


def test_without_numba_there_is_no_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    assert compile_kernel() is None
