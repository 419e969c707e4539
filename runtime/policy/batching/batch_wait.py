"""Whether a device waits a moment before its next step for rows that are due back from the scheduler.

A row that has come to the end of its path goes on when the scheduler has seen its token: a control message there and
one back. A step that begins meanwhile with whoever waits leaves those rows behind for all its length, then they run
without the others, and so on: two halves that never meet in one batch, and every weight is read once for each of them.
So

    until(...)     the moment up to which the step waits, or None for a step at once

Contract: it waits only where rows are due, for no longer than `limit`, and only where that gains: `due` rows save about
a step each, and `waiting` rows lose what is left of the round trip. Nobody who is alone waits (BL-14), and a device
whose rows are away for longer (with other devices, with somebody's tool) does not. Pure; nanoseconds.
"""

from __future__ import annotations


def until(waiting: int, due: int, deadline: int, step: float, limit: int, now: int) -> int | None:
    """`due`: rows that are expected by `deadline`; `step`: how long one takes here lately."""
    left = deadline - now
    if not waiting or not due or not 0 < left <= limit or due * step <= waiting * left:
        return None
    return deadline
