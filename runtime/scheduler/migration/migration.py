"""Records of migrations under way: which blocks, from which device to which, and how far each is.

Contract: `Moves` tracks each migration under way, the pages taken for it at its destination, and totals. It decides
nothing; the one message that it sends ends the migration of a sequence that leaves its devices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from runtime.chains import Chain, Hop, Path
from runtime.messages import FinishMigration, MigrationReady
from runtime.policy.migration.recompute_source import Front
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState


@dataclass(slots=True)
class Migration:
    """One migration of blocks of a running sequence to another device.

    Fields:
        part: The blocks on the source, as a hop: components and layers.
        target: The destination.
        path: The sequence's path after the migration.
        copy: Whether pages are copied, from the back.
        front: What pages are recomputed from, from the front.
        upto: Tokens that the destination has been asked for.
        groups: Page sets taken at the destination.
        stages: Number of requests to the destination so far.
        asked: Whether an answer of the destination is awaited.
        orphan: Whether the source is dead.
        last: Latest answer of the destination.
        began: Time of the first request in ns.
        estimate: Expected time until its answer, in seconds.
    """

    number: int
    sequence: ScheduledSequence
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
    began: int = 0
    estimate: float = 0.0

    @property
    def source(self) -> str:
        return self.part.device

    @property
    def recompute(self) -> bool:
        return self.front.origin != "none"

    @property
    def pages(self) -> int:
        """Pages per page set at the destination."""
        return self.part.layers[1] - self.part.layers[0]


@dataclass(slots=True)
class MigrationCounts:
    """Totals of migrations since the start.

    Fields:
        copied, recomputed: Tokens, in committed migrations.
        nbytes: Bytes of K and V sent, in committed migrations.
        inputs: Bytes of hidden states sent, in committed migrations.
    """

    started: int = 0
    committed: int = 0
    aborted: int = 0
    copied: int = 0
    recomputed: int = 0
    nbytes: int = 0
    inputs: int = 0


class Moves:
    """Migrations under way, by number."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._moves: dict[int, Migration] = {}
        self.counts = MigrationCounts()

    def __len__(self) -> int:
        return len(self._moves)

    def __iter__(self) -> Iterator[Migration]:
        return iter(tuple(self._moves.values()))

    def get(self, number: int) -> Migration | None:
        return self._moves.get(number)

    def get_move(self, sequence: ScheduledSequence) -> Migration | None:
        """Return the migration that a sequence is in, None if it is in none."""
        return self._moves.get(sequence.waits.move)

    def target(self, sequence: ScheduledSequence) -> str | None:
        """Return the destination of a sequence's migration, None if it is in none."""
        move = self.get_move(sequence)
        return None if move is None else move.target

    def totals(self) -> MigrationCounts:
        """Return a copy of the totals."""
        return replace(self.counts)

    def held(self) -> dict[str, int]:
        """Return the pages that are taken for migrations, by destination."""
        held: dict[str, int] = {}
        for move in self._moves.values():
            held[move.target] = held.get(move.target, 0) + move.pages * move.groups
        return held

    def bound_for(self, device: str, blocks: Collection[str]) -> bool:
        """Return whether a migration of any of these blocks to a device is under way."""
        there = (move for move in self._moves.values() if move.target == device)
        return any(not move.chain.blocks(move.part.lo, move.part.hi).isdisjoint(blocks) for move in there)

    def begin(self, move: Migration) -> None:
        """Add a migration."""
        self._moves[move.number] = move
        move.sequence.moves(move.number)
        self.counts.started += 1

    def end_move(self, move: Migration) -> None:
        """Remove a migration, and release its pages at the destination.

        On a commit the page accounting takes them for the sequence next (`SequenceLifecycle.reseat`).
        """
        del self._moves[move.number]
        move.sequence.moves(0)
        device = self._state.devices[move.target]
        if device.alive:
            device.pages.used -= move.pages * move.groups
            self._state.changed = True

    def cancel(self, sequence: ScheduledSequence) -> None:
        """Abort the migration of a sequence that leaves its devices."""
        move = self.get_move(sequence)
        if move is not None:
            self.end_move(move)
            self.counts.aborted += 1
            self._state.out.add_message(move.target, FinishMigration(move.number, sequence.seq, sequence.epoch, False))


def part_of(chain: Chain, blocks: range, device: str) -> Hop:
    """Return these blocks of a chain on a device in the form of a hop."""
    first = sum(use.kv_layers for use in chain.uses[: blocks.start])
    last = first + sum(use.kv_layers for use in chain.uses[blocks.start : blocks.stop])
    return Hop(device, chain.uses[blocks.start].lo, chain.uses[blocks.stop - 1].hi, (first, last))
