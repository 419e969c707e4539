"""Estimate how long a sequence's K and V take to move, and decide when the migration ends (BL-16).

    T = min over m of max( front(m), (P - m) * copy + turns(P - m) * turn + m * inputs )
                                                                P page sets in all, m of them recomputed

    front(m)  time to recompute m page sets in chunks, each at the context before it, upstream work included
    copy      time of a page set over the link; infinite without a link
    turns(k)  how often the back waits for an answer until k page sets are copied (`pace.copy_turns`)
    turn      what such a wait takes beside the link: source and destination answer between two steps of their own
    inputs    time over the link of the hidden states that a page set is recomputed from; 0 if from token ids

An agent that handles messages between its steps only (`between_steps`) takes no pages while a row of the front runs.
It has `fetch_sets` page sets under way at once, k of which come during a row of r page sets. Then

    T = min( P * copy + ceil(P / fetch_sets) * turn,  min over r of front(P * r / (r + k)) )

and such an agent does what is faster (`pace.front_rests`).

Recomputing a block needs its input for the whole context. At the start of a chain these are token ids. Elsewhere the
preceding blocks run again, which is `upstream` and charged to the front; or the source sends hidden states that it
cached, which is `inputs` and charged to the link. The front waits only for the inputs of its first chunk.

Pure arithmetic on costs that the caller takes from profiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from runtime.policy.migration.pace import copy_turns

#: (context before the chunk, tokens of the chunk) -> seconds. Never less for more tokens.
ChunkSeconds = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Costs:
    """Hold the costs of a migration.

    Fields:
        recompute: Time of a chunk; None if recomputing is impossible (no inputs).
        copy_group: Seconds to copy a page set; infinite without a link.
        upstream: Seconds that preceding blocks take for a chunk; None if they need not run.
        inputs_group: Seconds that the cached inputs of a page set take over the link.
        copy_turn: Seconds of a turn of the back.
        fetch_sets: Most page sets of a turn.
        between_steps: Whether pages are taken between rows of the front only.
    """

    page_tokens: int
    chunk_tokens: int
    recompute: ChunkSeconds | None
    copy_group: float = math.inf
    upstream: ChunkSeconds | None = None
    inputs_group: float = 0.0
    copy_turn: float = 0.0
    fetch_sets: int = 8
    between_steps: bool = False

    def __post_init__(self) -> None:
        if self.page_tokens < 1 or self.chunk_tokens < 1 or not self.copy_group >= 0 or not self.inputs_group >= 0:
            raise ValueError("pages and chunks hold tokens, and copying takes time")

    @property
    def chunk_groups(self) -> int:
        return max(1, self.chunk_tokens // self.page_tokens)

    def chunk(self, context: int, tokens: int) -> float:
        """Return the seconds for one chunk of the front."""
        if self.recompute is None:
            return math.inf
        return self.recompute(context, tokens) + (self.upstream(context, tokens) if self.upstream is not None else 0.0)

    def back(self, groups: int) -> float:
        """Return the seconds to copy `groups` page sets; 0 for none, even without a link."""
        if not groups:
            return 0.0
        turns = copy_turns(groups, self.fetch_sets, self.between_steps) * self.copy_turn if self.copy_turn else 0.0
        return groups * self.copy_group + turns

    def link(self, copied: int, recomputed: int) -> float:
        """Return the seconds that the link is busy."""
        return self.back(copied) + recomputed * self.inputs_group


@dataclass(frozen=True, slots=True)
class Meeting:
    """Hold when and where both ends meet: `groups` page sets with `tokens` tokens are recomputed."""

    seconds: float
    groups: int
    tokens: int


def finish_time(tokens: int, costs: Costs, context: int = 0) -> Meeting:
    """Return the best meeting point for `tokens` tokens behind `context` existing ones.

    Of equal points the one that copies the most wins.
    """
    total = -(-tokens // costs.page_tokens)
    if (
        costs.inputs_group and costs.inputs_group >= costs.copy_group
    ):  # recomputing a page set would occupy the link longer than copying it
        return Meeting(costs.back(total), 0, 0)
    if costs.between_steps and costs.recompute is not None and costs.copy_group < math.inf:
        rows = (_rounds(tokens, costs, context, row) for row in range(1, min(costs.chunk_groups, total) + 1))
        return min((Meeting(costs.back(total), 0, 0), *rows), key=lambda each: each.seconds)
    # Advance the front by chunks, while it would reach the end of the chunk before the back.
    reached, done = 0, min(costs.chunk_groups, total) * costs.inputs_group
    while reached < total:
        ahead = min(reached + costs.chunk_groups, total)
        after = done + _chunk(reached, ahead, tokens, costs, context)
        if after >= costs.link(total - ahead, ahead):
            break
        reached, done = ahead, after
    # The front is faster up to `reached` and slower beyond `ahead`: the best point lies between.
    best = min(
        (max(done + _chunk(reached, place, tokens, costs, context), costs.link(total - place, place)), place)
        for place in range(reached, min(reached + costs.chunk_groups, total) + 1)
    )
    return Meeting(best[0], best[1], min(best[1] * costs.page_tokens, tokens))


def _rounds(tokens: int, costs: Costs, context: int, row: int) -> Meeting:
    """Return the time of both ends, where pages are taken between rows of so many page sets."""
    total = -(-tokens // costs.page_tokens)
    turn = costs.fetch_sets * costs.copy_group + costs.copy_turn
    seconds, front, copied = 0.0, 0, 0.0
    while front + copied < total:
        ahead = min(front + row, total - int(copied))
        took = _chunk(front, ahead, tokens, costs, context)
        copied += min(1.0, took / turn if turn else 1.0) * costs.fetch_sets
        seconds, front = seconds + took, ahead
    return Meeting(seconds, front, min(front * costs.page_tokens, tokens))


def _chunk(first: int, last: int, tokens: int, costs: Costs, context: int) -> float:
    """Return the seconds for the front to recompute page sets [first, last) in one chunk."""
    lo, hi = first * costs.page_tokens, min(last * costs.page_tokens, tokens)
    return costs.chunk(context + lo, hi - lo) if hi > lo else 0.0


class MigrationStage(Enum):
    """Define what follows a stage of a migration during which the sequence ran on at the source."""

    CONTINUE = "continue"
    FINAL = "final"
    GIVE_UP = "give up"


def next_stage(remaining_groups: int, stages: int, limit_groups: int, max_stages: int) -> MigrationStage:
    """Decide what follows after `stages` stages, with `remaining_groups` page sets computed meanwhile.

    CONTINUE copies them while the sequence runs. FINAL stops it and copies the rest; few enough page sets are always
    final (Llumnix). GIVE_UP leaves the sequence where it is, because it grows faster than it moves.
    """
    if remaining_groups <= limit_groups:
        return MigrationStage.FINAL
    return MigrationStage.GIVE_UP if stages >= max_stages else MigrationStage.CONTINUE
