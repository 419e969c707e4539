"""Order waiting prompts, and cut them into chunks of one size over several requests (TI-05 to TI-08). Pure.

    raw prompts, by arrival -> `next_window` sorts the first few of them -> scheduled prompts
    scheduled prompts, with what each still has to compute -> `assemble` -> one chunk

Only a window of prompts is sorted at a time, so that with the shortest first a long prompt waits at most for those of
its own window and of earlier ones (TI-07). What is scheduled keeps its order: later prompts do not overtake it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

#: `fcfs`: by arrival. `sjf`, `ljf`: the shortest or the longest prompt first, within a window (TI-06).
PromptOrder = Literal["fcfs", "sjf", "ljf"]


class PromptJob(NamedTuple):
    """A waiting prompt.

    Fields:
        left: Tokens that it still has to compute; those of a cached prefix are not among them.
        priority: Lower runs first, whatever its length.
    """

    seq: str
    left: int
    priority: int = 0


class ChunkPart(NamedTuple):
    """The tokens of one prompt in a chunk."""

    seq: str
    tokens: int


def next_window(raw: Sequence[PromptJob], size: int, order: PromptOrder) -> tuple[str, ...]:
    """Return the prompts that are scheduled next, at most `size`, in the order in which they run.

    `raw`: by arrival. A window has prompts of the most urgent priorities; equally long ones run by arrival.
    """
    window = sorted(raw, key=lambda job: job.priority)[:size]
    if order != "fcfs":
        sign = 1 if order == "sjf" else -1
        window.sort(key=lambda job: (job.priority, sign * job.left))
    return tuple(job.seq for job in window)


def assemble(scheduled: Iterable[PromptJob], size: int) -> tuple[ChunkPart, ...]:
    """Return the next chunk: the first tokens that are left of scheduled prompts, together at most `size`.

    Every prompt but the last one of a chunk is in it with all that it has left.
    """
    parts: list[ChunkPart] = []
    for job in scheduled:
        if size <= 0:
            break
        tokens = min(job.left, size)
        parts.append(ChunkPart(job.seq, tokens))
        size -= tokens
    return tuple(parts)
