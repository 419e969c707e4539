"""Idle computation (BA-18): of all places in dense batches' windows, in how many nobody asked for a token, and why.

Knows windows; nothing of tensors or of models.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class IdleCounts:
    """Places in windows. `useful`: of sequences; all others are idle: `finished`, of slots whose sequence has ended
    and that run on with the batch; `shaping`, padding of rows that decode, to the width of a new sequence's prompt;
    `prompts`, padding of prompts to the longest that runs beside them; `waiting`, of rows that had no turn in a
    step.

    `skipped`: how many of the idle ones were there in shape only. What the paper computes is all of `shaped`, its
    idle share `idle` of that; what was computed here is `computed`, and what of it was in vain, `wasted`.
    """

    useful: int = 0
    finished: int = 0
    shaping: int = 0
    prompts: int = 0
    waiting: int = 0
    skipped: int = 0

    @property
    def shaped(self) -> int:
        return self.useful + self.idle

    @property
    def idle(self) -> int:
        return self.finished + self.shaping + self.prompts + self.waiting

    @property
    def computed(self) -> int:
        return self.shaped - self.skipped

    @property
    def wasted(self) -> int:
        return self.idle - self.skipped

    def plus(self, other: IdleCounts) -> IdleCounts:
        return IdleCounts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True, slots=True)
class RanRow:
    """One row of a window: `tokens` of its own; `fresh`: its first ones; `alive`: its sequence has not ended."""

    tokens: int
    fresh: bool
    alive: bool = True


def counted(rows: Iterable[RanRow], width: int) -> IdleCounts:
    """What a window of so many tokens per row has places for."""
    sums = dict.fromkeys((each.name for each in fields(IdleCounts)), 0)
    for row in rows:
        sums["useful"] += row.tokens
        sums[_why(row)] += width - row.tokens
    return IdleCounts(**sums)


def _why(row: RanRow) -> str:
    """What a row's padding is."""
    if not row.alive:
        return "finished"
    if not row.tokens:
        return "waiting"
    return "prompts" if row.fresh else "shaping"
