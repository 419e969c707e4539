"""Conditions of a promotion: what a candidate must reach on a task, as a number or beside what is live.

    library_cloze>=0.6        the task's first metric is at least 0.6
    library_cloze>=live       … at least what the live model has
    library_ppl:bits_per_byte<=live     another metric of the task; of this one less is better

Pure functions of lm-eval's documents.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zoo.errors import InputError

LIVE = "live"
_SHAPE = re.compile(r"(?P<task>[^<>=:\s]+)(?::(?P<metric>\w+))?(?P<sign>>=|<=)(?P<bound>\S+)")


@dataclass(frozen=True, slots=True)
class GateCondition:
    """One condition.

    Fields:
        metric: None for the first one of the task.
        least: Whether the bound is the least value; else it is the most.
        bound: None for what the live model has.
    """

    text: str
    task: str
    metric: str | None
    least: bool
    bound: float | None


@dataclass(frozen=True, slots=True)
class GateFigure:
    """What a condition was judged by. `live`, `bound`: None where nothing is live."""

    condition: str
    task: str
    metric: str
    candidate: float
    live: float | None
    bound: float | None
    met: bool


def parse_conditions(texts: Sequence[str]) -> tuple[GateCondition, ...]:
    """Return the conditions of a promotion. Raises InputError; also if there are none."""
    if not texts:
        raise InputError("a promotion needs a condition (--if TASK>=X); `zoo alias` sets an alias without one")
    return tuple(map(_parsed, texts))


def judge(
    conditions: Sequence[GateCondition], candidate: Mapping[str, Any], live: Mapping[str, Any] | None
) -> tuple[GateFigure, ...]:
    """Return what each condition is judged by.

    Args:
        candidate, live: The documents of `record.evaluate_stored`; None: nothing is live, and what compares with it
            is met.

    Raises InputError: a task without a result or such a metric, or a sign that asks for the worse side of a metric.
    """
    return tuple(_judged(each, candidate, live) for each in conditions)


def _parsed(text: str) -> GateCondition:
    found = _SHAPE.fullmatch(text.replace(" ", ""))
    bound = None if found is None or found["bound"] == LIVE else _number(found["bound"])
    if found is None or (bound is not None and not math.isfinite(bound)):
        raise InputError(f"a condition is TASK>=X, TASK<=X or TASK>=live: not {text[:80]!r}")
    return GateCondition(text, found["task"], found["metric"], found["sign"] == ">=", bound)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _judged(condition: GateCondition, candidate: Mapping[str, Any], live: Mapping[str, Any] | None) -> GateFigure:
    metric = condition.metric or _first_metric(condition, candidate)
    value = _value(condition, metric, candidate)
    beside = None if live is None else _value(condition, metric, live)
    _refuse_worse(condition, metric, candidate)
    bound = beside if condition.bound is None else condition.bound
    if bound is None:
        met = math.isfinite(value)
    else:
        met = value >= bound if condition.least else value <= bound  # false for what is no number
    return GateFigure(condition.text, condition.task, metric, value, beside, bound, met)


def _metrics(condition: GateCondition, document: Mapping[str, Any]) -> dict[str, float]:
    """Return metric -> value of the condition's task, in the order of lm-eval's document, without the errors."""
    results = document["results"]["results"]
    if condition.task not in results:
        known = ", ".join(sorted(results)[:8])
        raise InputError(f"{condition.text!r}: there is no result of a task {condition.task!r}; there are {known}")
    found: dict[str, float] = {}
    for key, value in results[condition.task].items():
        metric, _, choice = key.partition(",")
        if choice and not metric.endswith("_stderr") and isinstance(value, int | float):
            found.setdefault(metric, float(value))
    return found


def _first_metric(condition: GateCondition, document: Mapping[str, Any]) -> str:
    metrics = _metrics(condition, document)
    if not metrics:
        raise InputError(f"{condition.text!r}: the task has no number as its result")
    return next(iter(metrics))


def _value(condition: GateCondition, metric: str, document: Mapping[str, Any]) -> float:
    metrics = _metrics(condition, document)
    if metric not in metrics:
        raise InputError(f"{condition.text!r}: the task has no metric {metric!r}; it has {', '.join(metrics)}")
    return metrics[metric]


def _refuse_worse(condition: GateCondition, metric: str, document: Mapping[str, Any]) -> None:
    higher = document["results"].get("higher_is_better", {}).get(condition.task, {}).get(metric)
    if higher is not None and bool(higher) != condition.least:
        better, sign = ("more", ">=") if higher else ("less", "<=")
        raise InputError(f"{condition.text!r}: of {metric} {better} is better: use {sign}")
