"""Decide whether a device delays its next step for rows that are due back from the scheduler.

A row that left the end of its path continues once the scheduler has seen its token: one control message there and one
back. If a step starts meanwhile with the rows that wait, the returning rows miss it and later run without them, and so
on: two halves that never meet in one batch, with every weight read once for each half.

The step waits only if rows are due, for at most `limit`, and only if that gains: each `due` row saves about a step,
each `waiting` row loses the rest of the round trip. So a sequence that is alone never waits (BL-14), nor does a device
with rows that are away for longer (on other devices, or during a tool call). Pure; times in nanoseconds.
"""

from __future__ import annotations


def until(waiting: int, due: int, deadline: int, step: float, limit: int, now: int) -> int | None:
    """Return the time until which the next step waits, or None to start it at once.

    Args:
        waiting: Rows that wait here.
        due: Rows expected back by `deadline`.
        step: Recent duration of a step here.
        limit: Longest wait.
    """
    left = deadline - now
    if not waiting or not due or not 0 < left <= limit or due * step <= waiting * left:
        return None
    return deadline
