"""Choose the rows that are left out of a device's steps, so that an urgent sequence there ends in time.

A step takes longer the more rows it has. The largest batch with steps short enough for the tightest deadline that can
still be met is chosen, and rows that can wait for that sequence's end are left out, those with the most time
first. Rows that are late anyway limit nothing. (Chiron, arXiv 2501.08090; SLOs-Serve, arXiv 2504.08784.) Pure; times in
ns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Share of the time that is left which steps may take: the rest is for other prompts and for stalls.
_SHARE = 0.85


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
        until: Time at which the sequence for which they are will have ended; 0 where none are.
    """

    left_out: frozenset[str] = frozenset()
    until: int = 0


def cap_batch(claims: Sequence[Claim], step: Callable[[int], float], now: int) -> BatchCap:
    """Return the rows that are left out.

    `step`: returns the time of a step of so many rows; it never falls.
    """
    if not any(each.limits for each in claims):
        return BatchCap()
    ranked = sorted(claims, key=lambda each: (_pace(each, now), each.seq))
    for position, tightest in enumerate(ranked, 1):
        pace = _SHARE * _pace(tightest, now)
        if tightest.limits and step(position) <= pace:
            break
    else:
        return BatchCap()  # what has a deadline will be late, whatever runs beside it
    rows = len(ranked)
    if step(rows) <= pace:
        return BatchCap()
    while rows > position and step(rows) > pace:
        rows -= 1
    until = now + tightest.context + int(tightest.steps * step(rows))
    whole = step(len(ranked))
    able = [each for each in ranked[position:] if until + each.context + each.steps * whole <= each.due]
    leave = len(ranked) - rows
    return BatchCap(frozenset(each.seq for each in able[-leave:]), until) if able else BatchCap()


def _pace(claim: Claim, now: int) -> float:
    """Return the time that each of a sequence's steps may take."""
    return (claim.due - now - claim.context) / claim.steps
