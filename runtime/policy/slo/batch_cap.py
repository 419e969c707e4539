"""Choose the rows that are left out of a device's steps, so that an urgent sequence there ends in time.

A step takes longer the more rows it has. The largest batch with steps short enough for the tightest deadline that can
still be met is chosen, and rows that can wait for that sequence's end are left out, those with the most time
first. Rows that are late anyway limit nothing. (Chiron, arXiv 2501.08090; SLOs-Serve, arXiv 2504.08784.)

Of the time that is left, the steps do not get what as many steps may exceed their means by, nor what other prompts take
that run beside them. That reserve depends on the steps that are left alone: a share of the time that is left would get
smaller with each step that takes its part, until the last ones had none. A deadline counts as met if it can be without
a reserve: an urgent sequence is not given up because it is close. Pure; times in ns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """A running sequence.

    Fields:
        due: Its deadline.
        steps: Steps that it still takes, an upper bound.
        context: Time of its prompt, as far as it is not computed.
        limits: Whether its deadline may limit the batch.
    """

    seq: str
    due: int
    steps: int
    context: int = 0
    limits: bool = True


@dataclass(frozen=True, slots=True)
class BatchCap:
    """What is left out of the next steps.

    Fields:
        left_out: None may be.
        until: Time at which the sequence for which they are will have ended; 0 where no deadline limits anything.
        spare: Time that another sequence's prompt may take beside it, with a row more in each step; None: any.
    """

    left_out: frozenset[str] = frozenset()
    until: int = 0
    spare: int | None = None


def cap_batch(
    claims: Sequence[Claim], step: Callable[[int], float], excess: Callable[[int], float], now: int
) -> BatchCap:
    """Return the rows that are left out.

    Args:
        step: Returns the mean time of a step of so many rows; it never falls.
        excess: Returns by how much so many steps may exceed their means.
    """
    if not any(each.limits for each in claims):
        return BatchCap()
    prompts = sum(each.context for each in claims)
    ranked = sorted(claims, key=lambda each: (_pace(each, now), each.seq))
    for position, tightest in enumerate(ranked, 1):
        if tightest.limits and step(position) <= _pace(tightest, now):
            break
    else:
        return BatchCap()  # what has a deadline will be late, whatever runs beside it
    left = tightest.due - now - prompts - excess(tightest.steps)
    rows = len(ranked)
    while rows > position and tightest.steps * step(rows) > left:
        rows -= 1
    whole = step(len(ranked))
    until = now + prompts + int(tightest.steps * step(rows))
    able = [each for each in ranked[position:] if until + each.context + each.steps * whole <= each.due]
    leave = able[len(able) - min(len(ranked) - rows, len(able)) :]
    if not leave:
        spare = left - tightest.steps * step(len(ranked) + 1)
        return BatchCap(until=now + prompts + int(tightest.steps * whole), spare=max(0, int(spare)))
    return BatchCap(frozenset(each.seq for each in leave), until, spare=0)


def _pace(claim: Claim, now: int) -> float:
    """Return the time that each of a sequence's steps may take."""
    return (claim.due - now - claim.context) / claim.steps
