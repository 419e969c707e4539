"""Idle computation (BA-18): count the places in dense batches' windows without a wanted token, by reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class IdleCounts:
    """Counts of places in windows.

    Derived: `shaped` is all places, which is what the paper computes, and `idle` the idle ones among them; `computed`
    is what is computed here, and `wasted` the idle part of that.

    Fields:
        useful: Tokens of sequences. All other places are idle.
        finished: Places of slots with ended sequences that are still computed with the batch.
        shaping: Padding of rows that decode, to the width of a new sequence's prompt.
        prompts: Padding of prompts to the longest one beside them.
        waiting: Places of rows that do not run in a step.
        skipped: Idle places that are part of the shape only and are not computed.
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
    """One row of a window.

    Fields:
        tokens: Tokens that it runs.
        fresh: Whether these are its first ones.
        alive: Whether its sequence has not ended.
    """

    tokens: int
    fresh: bool
    alive: bool = True


def counted(rows: Iterable[RanRow], width: int) -> IdleCounts:
    """Count the places of a window of `width` tokens per row."""
    sums = dict.fromkeys((each.name for each in fields(IdleCounts)), 0)
    for row in rows:
        sums["useful"] += row.tokens
        sums[_why(row)] += width - row.tokens
    return IdleCounts(**sums)


def _why(row: RanRow) -> str:
    """Return the field that counts a row's padding."""
    if not row.alive:
        return "finished"
    if not row.tokens:
        return "waiting"
    return "prompts" if row.fresh else "shaping"
