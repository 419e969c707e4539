"""Choose which of the rows that wait on a device run in its next step (BL-14, BL-22).

`decide` takes the rows of all entry queues of the device, in order of arrival, and returns those that run:

  1. first rows that have waited longer than `patience`, then rows of sequences with K and V here, then the rest; each
     first in, first out;
  2. only the first row of a sequence in a stage: chunks of a prompt keep their order, and none is in a step twice;
  3. through no block more rows than its limit, whatever their stages and models. Slots are reserved against the rest
     for sequences that are expected back, until their deadlines; but not on a block that would have no row at all;
  4. no more tokens than the budget, but one row always runs;
  5. of divisible rows as many tokens as the budget leaves after the other rows, so that prompts do not delay decodes
     (TI-08). An overdue divisible row comes before rows that are not overdue.

A rejected row does not block rows behind it, which may need other blocks or less of the budget. It ages, and the oldest
row of its rank cannot be rejected by the budget for long, because the first row always fits. The loops are plain and
work on the caller's data, because the step waits for the decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class HopRow(Protocol):
    """Define a row in an entry queue, as its queue stores it; `WaitingRow` is a plain implementation."""

    @property
    def name(self) -> str: ...

    @property
    def stage(self) -> str: ...

    @property
    def tokens(self) -> int: ...

    @property
    def holds(self) -> bool: ...

    @property
    def since(self) -> int: ...

    @property
    def divisible(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """Describe a row in an entry queue.

    Fields:
        name: Name of the sequence in that stage.
        holds: Its sequence has K and V here.
        since: Time of arrival, in ns.
        divisible: A part of its tokens may run first.
    """

    name: str
    stage: str
    tokens: int
    holds: bool
    since: int
    divisible: bool = False


@dataclass(frozen=True, slots=True)
class Return:
    """Describe a sequence that left and is expected back in `stage`. Its slot is reserved until `deadline`, in ns."""

    stage: str
    deadline: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Describe the device's block instances.

    Fields:
        passes: Blocks that a row of each stage runs through.
        limits: Rows per step of each block.
    """

    passes: Mapping[str, Sequence[str]]
    limits: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class HopLimits:
    """Configure the limits of one step.

    Fields:
        patience: Nanoseconds after which a waiting row is overdue.
        divide: Whether divisible rows are divided.
    """

    tokens: int
    rows: int
    patience: int = 1_000_000_000
    divide: bool = False


@dataclass(frozen=True, slots=True)
class HopDecision:
    """Hold the rows of the next step, and counts of the rejected rows by reason.

    Fields:
        rows: Positions in the input, in the order chosen.
        behind: Rejected because an earlier row of the same sequence waits.
        full: Rejected because a block has no slot left.
        kept: Rejected because the slots left are reserved.
        budget: Rejected because no tokens or rows are left.
        parts: For divided rows, by position, the tokens that run now.
    """

    rows: tuple[int, ...]
    behind: int = 0
    full: int = 0
    kept: int = 0
    budget: int = 0
    parts: Mapping[int, int] = field(default_factory=dict)


def countdown(now: int, round_trip: int, slack: float) -> int:
    """Return the deadline of a sequence that leaves now: its round trip times (1 + `slack`)."""
    return now + int(round_trip * (1 + slack))


def decide(
    waiting: Sequence[HopRow], returning: Sequence[Return], blocks: Blocks, limits: HopLimits, now: int
) -> HopDecision:
    """Choose the next step of a device. Raises KeyError for a row of an unknown stage."""
    first, others, behind = _ranked(waiting, now - limits.patience)
    if not returning and all_fit(waiting, blocks, limits):
        return HopDecision((*first, *others), behind)
    step = _StepBuilder(waiting, blocks, limits)
    parts: list[int] = []
    more: list[int] = []
    if limits.divide:
        overdue = now - limits.patience
        first, parts = _divided(waiting, first, overdue)
        others, more = _divided(waiting, others, overdue)
    step.choose_rows(first)
    if others or more:
        step.reserve_slots(returning, now)
    step.choose_rows(others, spare=True)
    step.choose_rows(parts)
    step.choose_rows(more, spare=True)
    return HopDecision(tuple(step.chosen), behind, step.full, step.kept, step.budget, step.parts)


def all_fit(waiting: Sequence[HopRow], blocks: Blocks, limits: HopLimits) -> bool:
    """Return whether all rows fit even if all went through the block with the lowest limit.

    Then slots need not be counted per block.
    """
    count = len(waiting)
    if count > limits.rows or any(limit < count for limit in blocks.limits.values()):
        return False
    if any(len(set(through := blocks.passes[stage])) < len(through) for stage in {row.stage for row in waiting}):
        return False  # a row takes two slots of a block that it passes twice
    return sum([row.tokens for row in waiting]) <= limits.tokens


def _ranked(waiting: Sequence[HopRow], overdue: int) -> tuple[list[int], list[int], int]:
    """Rank the rows: positions that may take reserved slots, positions of the rest, and the number of duplicates.

    A duplicate is a later row of the same name.
    """
    if all([row.holds and row.since >= overdue for row in waiting]) and len({row.name for row in waiting}) == len(  # noqa: C419
        waiting
    ):
        return list(range(len(waiting))), [], 0  # a plain decode step, the most frequent case
    first: dict[str, int] = {}
    for place, row in enumerate(waiting):
        first.setdefault(row.name, place)
    late: list[int] = []
    holders: list[int] = []
    others: list[int] = []
    for place in first.values():
        row = waiting[place]
        (late if row.since < overdue else holders if row.holds else others).append(place)
    return late + holders, others, len(waiting) - len(first)


def _divided(waiting: Sequence[HopRow], places: Sequence[int], overdue: int) -> tuple[list[int], list[int]]:
    """Split positions into rows that run whole, or are overdue, and divisible rows that get what is left."""
    parts = [place for place in places if waiting[place].divisible and waiting[place].since >= overdue]
    apart = set(parts)
    return [place for place in places if place not in apart], parts


class _StepBuilder:
    """Track one decision: what is left of tokens, rows and each block's slots."""

    def __init__(self, waiting: Sequence[HopRow], blocks: Blocks, limits: HopLimits) -> None:
        self._waiting = waiting
        self._passes = blocks.passes
        self._limits = blocks.limits
        self._room = dict(blocks.limits)
        self._kept: dict[str, int] = {}  # reserved slots by block
        self._tokens, self._rows = limits.tokens, limits.rows
        self._divide = limits.divide
        self.chosen: list[int] = []
        self.parts: dict[int, int] = {}
        self.full = self.kept = self.budget = 0

    def choose_rows(self, places: Sequence[int], spare: bool = False) -> None:
        """Choose rows in this order while they fit. `spare`: not in reserved slots."""
        waiting, passes, room, chosen = self._waiting, self._passes, self._room, self.chosen
        tokens, rows, kept = self._tokens, self._rows, self._kept if spare else {}
        for place in places:
            row = waiting[place]
            count = min(row.tokens, tokens) if self._divide and row.divisible else row.tokens
            if (count > tokens or count < 1 or not rows) and chosen:
                self.budget += 1
                continue
            through = passes[row.stage]
            for block in through:
                if room[block] <= (kept.get(block, 0) if kept else 0):
                    self.kept, self.full = self.kept + (block in kept), self.full + (block not in kept)
                    break
            else:
                for block in through:
                    room[block] -= 1
                tokens -= count
                rows -= 1
                chosen.append(place)
                if count < row.tokens:
                    self.parts[place] = count
        self._tokens, self._rows = tokens, rows

    def reserve_slots(self, returning: Sequence[Return], now: int) -> None:
        """Reserve slots for sequences that are still expected, on blocks that have rows already."""
        expected: dict[str, int] = {}
        for each in returning:
            if each.deadline > now:
                expected[each.stage] = expected.get(each.stage, 0) + 1
        busy = {block for block, room in self._room.items() if room < self._limits[block]}
        for stage, count in expected.items():
            for block in self._passes[stage]:
                if block in busy:
                    self._kept[block] = self._kept.get(block, 0) + count
