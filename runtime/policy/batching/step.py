"""Which rows that wait on a device run in its next step (BL-14, BL-22).

Contract: `decide` takes the rows of all the device's entry queues in the order of arrival and answers with those that
run:

  1. rows that have waited longer than `patience`; rows whose sequence has K and V here; then all others. Within each,
    first in, first out;
  2. of one sequence in one stage only the first: chunks of a prompt keep their order, and none is in a step twice;
  3. through no block more rows than its own limit, whatever stages and models they are of. Of that, slots are kept from
    those others for
     sequences that are expected back until their countdowns run out; but not on a block that would have no row at all;
  4. no more tokens than the budget, but one row always runs;
  5. of rows that may be divided as many tokens as the budget leaves, when all others have theirs: prompts do not hold
    up decodes (TI-08).
     One that is overdue comes before those that are not.

A row that is turned away does not hold back rows behind it, which may need other blocks or less of the budget: it gets
older, and the oldest in its rank cannot be turned away by the budget for long, for whoever comes first fits. It knows
no pages, clocks, tensors or where rows come from. Plain loops over what the caller keeps: the step waits for this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class HopRow(Protocol):
    """A row in an entry queue, as whoever keeps it has it; `WaitingRow` is the plain one."""

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
    """A row in an entry queue. `name`: of the sequence in that stage; `holds`: K and V of it are here; `since`: when it
    came, in ns;
    `divisible`: a part of its tokens may run first."""

    name: str
    stage: str
    tokens: int
    holds: bool
    since: int
    divisible: bool = False


@dataclass(frozen=True, slots=True)
class Return:
    """A sequence that went on from here and is expected back in `stage`. Nobody waits for it after `deadline`,
    nanoseconds.
    """

    stage: str
    deadline: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """The device's block instances. `passes`: the blocks that a row of each stage runs through; `limits`: rows per step
    of each block.
    """

    passes: Mapping[str, Sequence[str]]
    limits: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class HopLimits:
    """`tokens` and `rows` of one step; `patience` in nanoseconds. `divide`: whether rows that may be divided are."""

    tokens: int
    rows: int
    patience: int = 1_000_000_000
    divide: bool = False


@dataclass(frozen=True, slots=True)
class HopDecision:
    """`rows`: places in the input, in the order in which they were chosen. Then how many were turned away and why: a
    later row of the same sequence (`behind`), no slot left (`full`), a slot that is kept for others (`kept`), no tokens
    or rows left (`budget`). `parts`: of the rows that are divided, the tokens that run now, by place."""

    rows: tuple[int, ...]
    behind: int = 0
    full: int = 0
    kept: int = 0
    budget: int = 0
    parts: Mapping[int, int] = field(default_factory=dict)


def countdown(now: int, round_trip: int, slack: float) -> int:
    """The deadline of a sequence that leaves now: its chain's round trip, and `slack` of that more (0.5: half as long
    again).
    """
    return now + int(round_trip * (1 + slack))


def decide(
    waiting: Sequence[HopRow], returning: Sequence[Return], blocks: Blocks, limits: HopLimits, now: int
) -> HopDecision:
    """The next step of a device. Raises KeyError for a row of a stage that is not there."""
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
    """Whether all of them could run even if they all went through the tightest block: then nothing has to be counted
    block by block.
    """
    count = len(waiting)
    if count > limits.rows or any(limit < count for limit in blocks.limits.values()):
        return False
    if any(len(set(through := blocks.passes[stage])) < len(through) for stage in {row.stage for row in waiting}):
        return False  # a block that is passed twice gives two slots to a row
    return sum([row.tokens for row in waiting]) <= limits.tokens


def _ranked(waiting: Sequence[HopRow], overdue: int) -> tuple[list[int], list[int], int]:
    """Places of rows that may take kept slots, in their order; of the others; and how many are behind one of the same
    name.
    """
    if all([row.holds and row.since >= overdue for row in waiting]) and len({row.name for row in waiting}) == len(  # noqa: C419
        waiting
    ):
        return list(range(len(waiting))), [], 0  # a decode step, as most are
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
    """Places of rows that run whole, and of those that get what is left; one that is overdue is among the first."""
    parts = [place for place in places if waiting[place].divisible and waiting[place].since >= overdue]
    apart = set(parts)
    return [place for place in places if place not in apart], parts


class _StepBuilder:
    """The ledger of one decision: what is left of tokens, rows and each block's slots."""

    def __init__(self, waiting: Sequence[HopRow], blocks: Blocks, limits: HopLimits) -> None:
        self._waiting = waiting
        self._passes = blocks.passes
        self._limits = blocks.limits
        self._room = dict(blocks.limits)
        self._kept: dict[str, int] = {}  # slots that blocks keep
        self._tokens, self._rows = limits.tokens, limits.rows
        self._divide = limits.divide
        self.chosen: list[int] = []
        self.parts: dict[int, int] = {}
        self.full = self.kept = self.budget = 0

    def choose_rows(self, places: Sequence[int], spare: bool = False) -> None:
        """Choose rows in this order while they fit; `spare`: in slots that are not kept."""
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
        """Set slots aside for sequences that are still expected, on blocks that have rows already."""
        expected: dict[str, int] = {}
        for each in returning:
            if each.deadline > now:
                expected[each.stage] = expected.get(each.stage, 0) + 1
        busy = {block for block, room in self._room.items() if room < self._limits[block]}
        for stage, count in expected.items():
            for block in self._passes[stage]:
                if block in busy:
                    self._kept[block] = self._kept.get(block, 0) + count
