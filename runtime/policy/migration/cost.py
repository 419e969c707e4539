"""How long a sequence's K and V take to move, and when the move is over (BL-16).

    T = min over m of max( front(m), (P - m) * copy + m * inputs )        P groups in all, m of them recomputed

    front(m)  chunks of m groups one after another, each at the context before it, and what upstream must do for it
    copy      a group's way over the link; infinite without one
    inputs    that of the hidden states that a group is recomputed from, over the same link; none where token ids do

Recomputing a block needs its input for all of the context: token ids at the start of a chain; elsewhere whoever is
upstream runs again, which is `upstream` here and charged to the front, that waits for it; or the source ships hidden
states that it kept, which is `inputs` and charged to the link. The front waits for those of its first chunk only.

Pure arithmetic over costs that the caller takes from profiles. It knows no pages, no clock and not who the sequence is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

#: (context before the chunk, tokens of the chunk) -> seconds. Never less for more tokens.
ChunkSeconds = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Costs:
    """What moving costs. `recompute` None: it cannot be (no inputs). `copy_group`: seconds for a group of pages;
    infinite: no link.

    `upstream`: seconds that preceding blocks take for a chunk; None where they need not run. `inputs_group`: seconds
    that a group's kept inputs take over the link.
    """

    page_tokens: int
    chunk_tokens: int
    recompute: ChunkSeconds | None
    copy_group: float = math.inf
    upstream: ChunkSeconds | None = None
    inputs_group: float = 0.0

    def __post_init__(self) -> None:
        if self.page_tokens < 1 or self.chunk_tokens < 1 or not self.copy_group >= 0 or not self.inputs_group >= 0:
            raise ValueError("pages and chunks hold tokens, and copying takes time")

    @property
    def chunk_groups(self) -> int:
        return max(1, self.chunk_tokens // self.page_tokens)

    def chunk(self, context: int, tokens: int) -> float:
        """Seconds for one chunk of the front."""
        if self.recompute is None:
            return math.inf
        return self.recompute(context, tokens) + (self.upstream(context, tokens) if self.upstream is not None else 0.0)

    def back(self, groups: int) -> float:
        """Seconds to copy so many groups; nothing takes no time even over no link."""
        return groups * self.copy_group if groups else 0.0

    def link(self, copied: int, recomputed: int) -> float:
        """Seconds that the link is at work."""
        return self.back(copied) + recomputed * self.inputs_group


@dataclass(frozen=True, slots=True)
class Meeting:
    """When both ends meet. `groups`: how many the front recomputes; `tokens`: they hold so many."""

    seconds: float
    groups: int
    tokens: int


def finish_time(tokens: int, costs: Costs, context: int = 0) -> Meeting:
    """The best place to meet for `tokens` tokens behind `context` others that are there already; of equals the one
    copied most.
    """
    total = -(-tokens // costs.page_tokens)
    if (
        costs.inputs_group and costs.inputs_group >= costs.copy_group
    ):  # every group that is recomputed keeps the link longer
        return Meeting(costs.back(total), 0, 0)
    # The front at a chunk's end, while it would be there before the back.
    reached, done = 0, min(costs.chunk_groups, total) * costs.inputs_group
    while reached < total:
        ahead = min(reached + costs.chunk_groups, total)
        after = done + _chunk(reached, ahead, tokens, costs, context)
        if after >= costs.link(total - ahead, ahead):
            break
        reached, done = ahead, after
    # The front is faster up to `reached` and slower behind `ahead`: the best place lies between.
    best = min(
        (max(done + _chunk(reached, place, tokens, costs, context), costs.link(total - place, place)), place)
        for place in range(reached, min(reached + costs.chunk_groups, total) + 1)
    )
    return Meeting(best[0], best[1], min(best[1] * costs.page_tokens, tokens))


def _chunk(first: int, last: int, tokens: int, costs: Costs, context: int) -> float:
    """Seconds for the front to recompute groups [first, last) at once."""
    lo, hi = first * costs.page_tokens, min(last * costs.page_tokens, tokens)
    return costs.chunk(context + lo, hi - lo) if hi > lo else 0.0


class MigrationStage(Enum):
    """What follows a stage of a move whose sequence runs on at the source."""

    CONTINUE = "continue"
    FINAL = "final"
    GIVE_UP = "give up"


def next_stage(remaining_groups: int, stages: int, limit_groups: int, max_stages: int) -> MigrationStage:
    """After `stages` stages `remaining_groups` have come up meanwhile: ship them as it runs (CONTINUE), stop it and
    ship the rest (FINAL), or leave it where it is, for it grows faster than it moves (GIVE_UP). Few enough is final
    whatever the number of stages (Llumnix)."""
    if remaining_groups <= limit_groups:
        return MigrationStage.FINAL
    return MigrationStage.GIVE_UP if stages >= max_stages else MigrationStage.CONTINUE
