"""Whether a paused sequence's K and V should move while it waits for somebody else, a tool or a person (BL-17).

    T_INT = now - called          how long it has been paused: the estimate, too, of how long it still will be
                                  (InferCept)
    migrate  iff  T_INT > migration time * margin

So a move begins once the pause has lasted as long as the move takes, and lies inside the pause if that lasts twice
as long; a pause shorter than the move causes no traffic at all. Whoever resumes earlier waits for no longer than
the move takes, and for nothing if the source goes on serving. Where the length of a pause is known (`expected`),
what is left of it takes T_INT's place until it is over.
Pure: times are integer nanoseconds and arguments.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PausedSequence:
    """A sequence that waits since `called`. `expected`: how long it will, where that is known; None where it is not."""

    seq: str
    called: int
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class Foresight:
    """`remaining`: how long the pause is taken to last from now; `needed`: the move, with its margin; `again`: when to
    ask again if it is still paused, None if it moves."""

    migrate: bool
    remaining: int
    needed: int
    again: int | None


def foresee(pause: PausedSequence, migration: int, now: int, margin: float = 1.0) -> Foresight:
    """Decide for one paused sequence whose move would take `migration`. Raises ValueError for a pause that has not
    begun.
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
