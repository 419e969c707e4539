"""What a request is to be in time for: its whole answer (`slo_ms`), or its first token (`ttft_slo_ms`; QL-21).

An objective of the first token is settled by it: what comes after has no deadline, and its execution does not count.
Requests of nearly the same objective are one class of groups (QL-03): within a class they run by their own deadlines,
so that classes change no order, only how many groups there are. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

#: Shortest times of the classes from 10 to 100 ms, and so on by tens: those of one class differ by a third at most.
_STEPS = (10, 12, 15, 20, 25, 30, 40, 50, 60, 80)


class TimeObjective(NamedTuple):
    """The time in ms that a request has from its arrival, for its first token or for its whole answer."""

    ms: int
    first_token: bool = False


def objective_of(slo_ms: int | None, ttft_slo_ms: int | None, begun: bool) -> TimeObjective | None:
    """Return what a request still has to be in time for, None for nothing. `begun`: its first token is there."""
    if slo_ms is not None:
        return TimeObjective(slo_ms)
    return None if ttft_slo_ms is None or begun else TimeObjective(ttft_slo_ms, first_token=True)


def class_of(objective: TimeObjective | None) -> TimeObjective | None:
    """Return the class of an objective: the shortest one of it."""
    if objective is None:
        return None
    unit = 10 ** max(len(str(objective.ms)) - 2, 0)
    if objective.ms < _STEPS[0]:
        return objective
    return objective._replace(ms=unit * _STEPS[bisect_right(_STEPS, objective.ms // unit) - 1])
