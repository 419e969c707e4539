"""Check that an engine's result answers its plan, before any state changes, so that the step can still be failed."""

from __future__ import annotations

from runtime.types import Sampled, StepPlan, StepResult


def sampled_by_seq(plan: StepPlan, result: StepResult) -> dict[str, Sampled]:
    """Return the sampled tokens of a step by table name.

    Raises ValueError unless there is exactly one for each row that samples and was not deferred, and the deferred rows
    are some, but not all, of the plan's.
    """
    if result.step != plan.step:
        raise ValueError(f"the engine answered step {result.step} instead of {plan.step}")
    if not result.sampled and not result.deferred and not any([row.sample for row in plan.rows]):  # noqa: C419
        return {}
    sampled = {one.seq: one for one in result.sampled}
    deferred = set(result.deferred)
    if deferred and not deferred < {row.seq for row in plan.rows}:
        raise ValueError(f"step {plan.step}: the engine put off rows that it was not given, or all of them")
    expected = {row.seq for row in plan.rows if row.sample and row.seq not in deferred}
    if sampled.keys() != expected or len(result.sampled) != len(expected):
        raise ValueError(f"step {plan.step}: the engine sampled {len(result.sampled)} rows instead of {len(expected)}")
    return sampled
