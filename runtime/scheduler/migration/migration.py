"""A sequence that changes a device, as the scheduler has it (`handover`): which blocks, from where to where, how far it
is. Data only.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.chains import Chain, Hop, Path
from runtime.messages import MigrationReady
from runtime.policy.migration.recompute_source import Front
from runtime.scheduler.sequences.sequence import ScheduledSequence


@dataclass(slots=True)
class Migration:
    """One move: blocks of a chain, components and layers of `part`, from `source` to `target`; then the sequence's path
    is `path`.

    `front`: what it recomputes from. `upto`: tokens that the destination has been asked for; `groups`: page groups
    taken there. `asked`: an answer is awaited; `last`: the latest; `orphan`: the source is dead.
    """

    number: int
    member: ScheduledSequence
    chain: Chain
    part: Hop
    target: str
    path: Path
    copy: bool
    front: Front
    upto: int = 0
    groups: int = 0
    stages: int = 0
    asked: bool = True
    orphan: bool = False
    last: MigrationReady | None = None

    @property
    def source(self) -> str:
        return self.part.device

    @property
    def recompute(self) -> bool:
        return self.front.origin != "none"

    @property
    def pages(self) -> int:
        """Of a group."""
        return self.part.layers[1] - self.part.layers[0]


@dataclass(slots=True)
class MigrationCounts:
    """Totals since the beginning. Tokens are those that were copied and recomputed in committed moves; `nbytes` of K
    and V travelled, and `inputs` of hidden states."""

    started: int = 0
    committed: int = 0
    aborted: int = 0
    copied: int = 0
    recomputed: int = 0
    nbytes: int = 0
    inputs: int = 0


def part_of(chain: Chain, blocks: range, device: str) -> Hop:
    """These blocks as if they were a hop."""
    first = sum(use.kv_layers for use in chain.uses[: blocks.start])
    last = first + sum(use.kv_layers for use in chain.uses[blocks.start : blocks.stop])
    return Hop(device, chain.uses[blocks.start].lo, chain.uses[blocks.stop - 1].hi, (first, last))
