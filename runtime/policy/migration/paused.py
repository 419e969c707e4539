"""Decide whether a paused sequence's K and V migrate while it waits for a tool or a person (BL-17).

    T_INT = now - called          time paused so far, also the estimate of the time remaining (InferCept)
    migrate  iff  T_INT > migration time * margin

So a migration starts once the pause has lasted as long as the migration takes, and lies within the pause if that lasts
twice as long; a pause shorter than the migration causes no traffic. A sequence that resumes earlier waits at most for
the rest of the migration, and not at all if the source continues to serve it.

If the length of a pause is known (`expected`), its remaining time replaces T_INT until it is over. Pure; times are
integer nanoseconds and arguments.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PausedSequence:
    """Describe a sequence paused since `called`. `expected`: the expected length of the pause; None if unknown."""

    seq: str
    called: int
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class Foresight:
    """Hold the decision for a paused sequence.

    Fields:
        remaining: Estimated remaining time of the pause.
        needed: Time of the migration, with its margin.
        again: When to decide again if it is still paused; None if it migrates.
    """

    migrate: bool
    remaining: int
    needed: int
    again: int | None


def foresee(pause: PausedSequence, migration: int, now: int, margin: float = 1.0) -> Foresight:
    """Decide for one paused sequence with a migration time of `migration`.

    Raises ValueError for a pause that has not begun.
    """
    paused = now - pause.called
    if paused < 0:
        raise ValueError(f"sequence {pause.seq} is not paused yet")
    expected = pause.expected or 0
    remaining = expected - paused if paused < expected else paused
    needed = int(migration * margin)
    if remaining > needed:
        return Foresight(True, remaining, needed, None)
    # What is left of a known pause only shrinks; once that is over, the time spent counts.
    return Foresight(False, remaining, needed, pause.called + max(needed + 1, expected))
