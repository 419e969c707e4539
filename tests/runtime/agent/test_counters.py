"""The single list of counters: what the agent counts, what it reports, and what `/metrics` shows."""

from __future__ import annotations

from dataclasses import asdict, fields

from runtime.control.counters import AgentCounters, Counters
from runtime.types import StepPlan, StepResult

#: Counters that are no metrics of their own: the frontend counts these by model.
_TOLD_ELSEWHERE = {"prompt_tokens", "generated_tokens", "finished"}


def test_every_counter_is_a_metric_of_its_own_name() -> None:
    shown = [(name, documentation) for name, documentation, _ in AgentCounters().shown()]
    assert len({name for name, _ in shown}) == len(shown) == len(fields(AgentCounters)) - len(_TOLD_ELSEWHERE)
    assert all(name.startswith(("vllm:", "blockzoo:")) and documentation.endswith(".") for name, documentation in shown)


def test_each_metric_has_its_own_counter_in_the_metrics_unit() -> None:
    counters = Counters()
    counted = [each.name for each in fields(counters) if each.name not in _TOLD_ELSEWHERE]
    for number, name in enumerate(counted, 1):
        setattr(counters, name, number)
    values = {name: value for name, _, value in counters.shown()}
    units = {
        "busy": ("blockzoo:step_seconds", 1e9),
        "load_ns": ("blockzoo:load_seconds", 1e9),
        "plan_ns": ("blockzoo:plan_seconds", 1e9),
        "handoff_ns": ("blockzoo:handoff_seconds", 1e9),
        "prediction_ns": ("blockzoo:length_prediction_seconds", 1e9),
        "loan_ns": ("blockzoo:loan_seconds", 1e9),
        "recovery_ns": ("blockzoo:recovery_seconds", 1e9),
        "adapted_similarity": ("blockzoo:adapted_similarity", 1e6),
    }
    for name, (metric, per) in units.items():
        assert values.pop(metric) == (counted.index(name) + 1) / per
    assert sorted(values.values()) == [number for number, name in enumerate(counted, 1) if name not in units]


def test_a_snapshot_does_not_grow() -> None:
    counters = Counters()
    counters.finished["stop"] += 1
    before = counters.snapshot()
    counters.finished["stop"] += 1
    counters.preemptions += 1
    counters.step(StepPlan(1, ()), StepResult(1, (), idle=3))
    assert (before.preemptions, before.idle_tokens, before.finished) == (0, 0, {"stop": 1})
    assert asdict(counters.snapshot())["finished"] == {"stop": 2} and counters.idle_tokens == 3
    assert Counters().finished["error"] == 0, "each has its own"
