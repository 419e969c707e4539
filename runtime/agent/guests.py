"""Sequences on one device of a cluster, and their rows that wait there.

Contract: a `Guest` is a sequence under one epoch and path. It has a table of pages per stage that it passes here, under a key that no
other table ever has, so that a step may still write what has been closed already. A `Waiting` row is one hop's work. Nothing here
decides or counts pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.stages import Array, Path
from runtime.types import SequenceRequest


@dataclass(slots=True)
class Guest:
    """`keys`: table by the first component of a stage. `output`: tokens it had produced when it was opened."""

    request: SequenceRequest
    epoch: int
    path: Path
    output: tuple[int, ...]
    keys: dict[int, str] = field(default_factory=dict)

    @property
    def seq(self) -> str:
        return self.request.seq


@dataclass(slots=True)
class Waiting:
    """A row before, or in, a step: `tokens` of a sequence from `start` on. `name`: of its table. `holds`: K and V of it are here already.

    `ids`: the tokens where the stage begins with the embedding, else None and `array` has the hidden states. `steps`: tokens to decode.
    `move`: which migration recomputes by it, 0 for the rows of sequences.
    """

    guest: Guest
    epoch: int
    hop: int
    name: str
    stage: str
    start: int
    tokens: int
    ids: tuple[int, ...] | None
    array: Array | None
    sample: bool
    generated: int
    steps: int
    since: int
    holds: bool
    move: int = 0

    @property
    def work(self) -> int:
        """Tokens whose K and V are written by it."""
        return self.tokens + self.steps - 1
